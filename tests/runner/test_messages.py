"""Messages about widths that are the same in every block, units too coarse for a ratio, and work that is done."""

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.job.decisions import Losses
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.runner.messages import wider_choice
from ckpt_prune.runner.open_run import summary
from ckpt_prune.stages.recipe_files import load_recipe
from tests.families import SIZES, model_of

DEFAULT = load_recipe("best-uniform", ratio=0.3)


def settle(losses: Losses | None, *, by_default: bool = True, recipe: Recipe = DEFAULT, code: str | None = None) -> Any:
    return SimpleNamespace(
        container_known=True,
        output=SimpleNamespace(container=SimpleNamespace(remote_class=code)),
        recipe=recipe,
        whole=SimpleNamespace(recipe=recipe),
        model=model_of({"model_type": "llama", **SIZES}),
        job=SimpleNamespace(by_default=by_default),
        decisions=SimpleNamespace(losses=losses),
    )


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize(
    ("losses", "loss_text"),
    [
        (None, "less, and need remote code"),
        (Losses(2.0, 2.0), "as much, as predicted"),
        (
            Losses(2.0, 1.0),
            "less (predicted: 50% less), and need remote code",
        ),
    ],
)
def test_what_widths_per_block_would_lose(losses, loss_text):
    assert wider_choice(settle(losses)) == f"widths per block (--recipe best) would lose {loss_text}"
    exported = settle(losses, recipe=load_recipe("best-uniform", ("runs_on=[llama.cpp]",), ratio=0.3))
    for without in (exported, settle(losses, code="PrunedBertModel")):
        words = loss_text.removesuffix(", and need remote code")
        assert wider_choice(without) == f"widths per block (--recipe best) would lose {words}"


@pytest.mark.parametrize("changes", [("quantize.format=int8", "quantize.rounding=nearest"), ("runs_on=[sglang]",)])
def test_nobody_is_told_of_widths_per_block_where_something_else_rules_them_out(changes):
    assert wider_choice(settle(None, recipe=load_recipe("best-uniform", changes, ratio=0.3))) is None


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (["statistics", "effects 0"], "statistics, effects (1)"),
        (["dimensions tried 0", "dimensions tried 8", "hidden"], "hidden, dimensions tried (2)"),
        (["basis 0", "basis", "block 0"], "basis, 1 of 4 blocks done"),
    ],
)
def test_what_a_resumed_run_says_is_done(tmp_path, units, expected):
    journal = Journal(tmp_path, "job")
    for unit in units:
        journal.record(unit)
    assert summary(journal, 4, "done") == expected
