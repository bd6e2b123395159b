"""A family's class accepts every plan for it; others are refused early, without blaming the user's file."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.layout import plan_layout
from ckpt_prune.model.config_only import checkpoint_of_config
from ckpt_prune.model.containers.choosing import choose_container, unprunable_spaces
from ckpt_prune.model.depth import check_shortened, shorten_config
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import RefusedConfigError, parse_config
from ckpt_prune.model.spaces import recipe_space
from tests.pairs import every

from .models import LED, Case, first_cases


def model_of(case: Case, folder: Path, **changes: Any) -> Model:
    raw = case.published_config | changes
    (folder / "config.json").write_text(json.dumps(raw))
    return Model.of(checkpoint_of_config(folder))


@pytest.mark.parametrize("case", every(4, [*first_cases(), LED]), ids=str)
def test_what_is_planned_is_what_the_class_takes(case: Case, tmp_path: Path) -> None:
    model = model_of(case, tmp_path)
    biases = {module for module in model.family.linears if model.has(module, "bias")}
    able = [name for name, space in model.family.spaces.items() if space.whole is None]
    assert unprunable_spaces(model) == {}
    for space_name in dict.fromkeys(map(recipe_space, able)):
        alike = [name for name in able if recipe_space(name) == space_name]
        (units,) = set(model.unit_counts(alike[0]))
        if units < 2:
            continue
        for kept in {1, units - 1}:
            widths = [{name: kept for name in alike if name in model.spaces(block)} for block in range(model.blocks)]
            for container in ("auto", "any", "padded"):
                try:
                    chosen = choose_container(model, widths, biases, requested=container)
                except RefusedConfigError:
                    raise
                except UserError:
                    continue
                plan_layout(model, widths, chosen)
    try:
        check_shortened(model, [0])
    except RefusedConfigError:
        raise
    except UserError:
        pass
    else:
        parse_config(shorten_config(model, [0]))
