"""An output that carries code is read by that code alone: other classes that its shapes fit compute something else."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedConfig

import ckpt_prune
from ckpt_prune.evaluation.whole_model import load_reported
from ckpt_prune.modeling_pruned import REFUSAL, WEIGHTS_KEY
from ckpt_prune.runner.run_job import run_job
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.stages.test_rotations import random_rotations, rotating

from .dense import Dense, spaces_recipe
from .models import FIRST, Case, unlike_cases
from .test_elsewhere import methods

AUTO_CLASSES = [name for name in dir(transformers) if name.startswith("AutoModel") and name != "AutoModelForDecision"]
"""Without that of a head in a file of its own, which is refused for want of the file."""


def recipe_of(case: Case, name: str) -> FullRecipe:
    if name == "biases":
        return spaces_recipe(case, methods(case), "remote")
    if name == "rotations":
        return rotating("per-layer")
    shipped = load_recipe(name, ratio=0.3)
    return shipped.model_copy(update={"container": "any"}) if shipped.container == "auto" else shipped


def readers(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Every Auto class of transformers that takes a config, and the classes behind it, by name."""
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) not in auto._model_mapping:
            continue
        yield name, auto
        stock = auto._model_mapping[type(config)]
        yield from (
            (model_class.__name__, model_class) for model_class in (stock if isinstance(stock, tuple) else (stock,))
        )


def assert_refused(folder: Path, config: PreTrainedConfig, architecture: str) -> None:
    classes = dict(readers(config))
    assert {architecture, "AutoModel"} <= classes.keys()
    carried = getattr(config, "auto_map", {})
    for name, reader in classes.items():
        # Auto classes that the output has no code for would take the stock class, also where code is trusted.
        trusting = [{}, {"trust_remote_code": True}] if carried and name.startswith("Auto") else [{}]
        for options in trusting[: 1 if name in carried else 2]:
            with pytest.raises(ValueError, match=re.escape(REFUSAL)):
                reader.from_pretrained(folder, **options)


@pytest.mark.parametrize("case", unlike_cases(), ids=str)
def test_the_key_is_refused_before_weights_are_read(case: Case, tmp_path: Path) -> None:
    config = json.loads(case.config.to_json_string())
    config |= {"architectures": [f"Pruned{case.architecture}"], WEIGHTS_KEY: REFUSAL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(tmp_path, AutoConfig.from_pretrained(tmp_path), case.architecture)


FAMILIES = {
    "flap": ("qwen3", "cohere2"),
    "flap-global": ("gemma3_text", "llama"),
    "corp": ("dinov2",),
    "corp-mlp": ("olmo2",),
    "low-rank": ("bloom",),
    "svd-llm-w": ("vit",),
    "values": ("cohere2",),
    "rotary": ("llama",),
    "slicegpt": ("llama",),
    "rotations": ("llama",),
}
"""Families by recipe: what no stock class has, a stream that turns, and what shipped recipes make."""
CELLS = [
    *((case, "biases") for case in unlike_cases()[::3]),  # without a slot
    *((case, name) for name, families in FAMILIES.items() for case in FIRST if case.model_type in families),
]


@pytest.mark.parametrize(("case", "name"), CELLS, ids=str)
def test_outputs_are_read_by_their_own_code_alone(
    dense: Dense, case: Case, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_rotations(monkeypatch)
    out = tmp_path / "out"
    report = run_job(dense.request(case, recipe_of(case, name), case.samples(16)), out).report
    stored = json.loads((out / "config.json").read_text())
    if not report.container.remote_code:
        assert (WEIGHTS_KEY in stored, load_reported(out)[1].fault) == (False, "")
        return
    config, (class_name,) = AutoConfig.from_pretrained(out), stored["architectures"]
    assert (stored[WEIGHTS_KEY], type(config).model_type) == (REFUSAL, report.container.model_type)
    assert_refused(out, config, class_name.removeprefix("Pruned"))
    (AutoTokenizer if case.family.modality == "text" else AutoImageProcessor).from_pretrained(out)
    assert type(ckpt_prune.load(out)).__name__ == class_name
