"""Ranges of blocks, in numbers and in shares of the depth."""

import pytest

from ckpt_prune.common.block_range import blocks_of
from ckpt_prune.common.errors import UserError
from ckpt_prune.stages.recipe_files import load_recipe
from tests.recipe.recipes import refusal, write

PUBLISHED = "12.5%:93.75%"
"""LLM-Pruner's blocks of LLaMA-7B, 4 to 29 of 32."""


@pytest.mark.parametrize(
    ("text", "count", "blocks"),
    [
        (None, 3, range(3)),
        (":", 3, range(3)),
        ("4:30", 32, range(4, 30)),
        (PUBLISHED, 32, range(4, 30)),
        (PUBLISHED, 30, range(4, 28)),
        (PUBLISHED, 6, range(1, 5)),
        (PUBLISHED, 3, range(1, 2)),
        # A block counts that is within the range as a whole: 10 % of 30 is 3, though not in binary.
        ("10%:90%", 30, range(3, 27)),
        ("50%:", 5, range(3, 5)),
        (" 1 : 100% ", 5, range(1, 5)),
    ],
)
def test_what_it_names(text, count, blocks):
    assert blocks_of(text, count) == blocks


@pytest.mark.parametrize(("text", "count"), [(PUBLISHED, 2), ("0:3", 2), ("60%:40%", 10), ("100%:", 4)])
def test_blocks_that_are_not_there(text, count):
    with pytest.raises(UserError) as caught:
        blocks_of(text, count)
    assert str(caught.value) == f"layers {text}: the model has blocks 0 to {count - 1}, say 0:{count} for all"


# ---- in a recipe -------------------------------------------------------------------------------------------------

OF_SPACES = "version: 1\nname: mine\nlayers: 1:2\nwidths: per_layer\nspaces: {mlp: {score: rcpu}}\n"


def test_a_recipe_that_prunes_some_blocks_is_another(tmp_path):
    recipe = load_recipe(str(write(tmp_path, OF_SPACES)))
    assert recipe.blocks(4) == range(1, 2)
    every = load_recipe(str(write(tmp_path, OF_SPACES.replace("layers: 1:2\n", ""))))
    assert every.blocks(4) == range(4)
    assert recipe.digest != every.digest
    assert '"layers"' not in every.canonical_json()
    assert recipe.with_ratio(0.5).layers == recipe.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("widths=uniform",),
            "layers leaves other blocks whole, so that blocks differ in width, which no stock model can load: say "
            "widths: per_layer to accept remote code",
        ),
        (("allocation=least-error",), "allocation least-error chooses among all blocks: leave out layers"),
        (
            ("spaces.mlp.score=flap", "allocation=across-layers"),
            "allocation across-layers chooses among all blocks: leave out layers",
        ),
    ],
)
def test_contradictions(tmp_path, changes, message):
    path = write(tmp_path, OF_SPACES)
    assert refusal(path, changes) == f"{path}, with --set: {message}"
