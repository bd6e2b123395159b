"""What is said of widths that are the same in every block, and of units too coarse for a ratio."""

from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_prune.job.decisions import Losses
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.runner.messages import coarse_lines, wider_choice

DEFAULT = load_recipe("best-uniform", ratio=0.3)


def settled(losses: Losses | None, *, by_default: bool = True) -> Any:
    return SimpleNamespace(
        recipe=DEFAULT, job=SimpleNamespace(by_default=by_default), decisions=SimpleNamespace(losses=losses)
    )


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (None, "less, and need remote code"),
        (Losses(2.0, 2.0), "as much, as predicted"),
        (
            Losses(2.0, 1.0),
            "less (predicted: 50% less), and need remote code",
        ),
    ],
)
def test_what_widths_per_block_would_lose(losses, said):
    assert wider_choice(settled(losses)) == f"widths per block (--recipe best) would lose {said}"


def test_who_named_a_recipe_is_told_of_no_other():
    assert wider_choice(settled(Losses(2.0, 1.0), by_default=False)) is None


def test_weights_are_never_too_coarse():
    model: Any = None
    assert list(coarse_lines(model, load_recipe("wanda-50"))) == []
