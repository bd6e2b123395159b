"""Numbers of units that a recipe says, one for each block, in place of a ratio."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckpt_prune
from ckpt_prune.stages.recipe_files import load_recipe
from tests.encoders import job_on
from tests.stages.whole import make_wide

BLOCKS = 2


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("keep") / "dense"
    return make_wide(place, "llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=BLOCKS)


def test_every_block_keeps_its_own_number(dense):
    changes = ("widths=per_layer", "spaces.heads.ratio=0", "spaces.mlp.keep=[24,9]")
    assert list(job_on(dense, load_recipe("magnitude", changes)).widths) == [
        {"heads": 2, "mlp": 24},
        {"heads": 2, "mlp": 9},
    ]


def test_numbers_of_a_ratio_give_the_same_tensors(dense, tmp_path):
    """A ratio of a quarter drops 6 of 24 columns."""
    for name, change in (("by_ratio", "spaces.mlp.ratio=0.25"), ("by_number", "spaces.mlp.keep=[18,18]")):
        changes = ("spaces.heads.ratio=0", change)
        ckpt_prune.prune(dense, output=tmp_path / name, recipe="magnitude", overrides=changes, progress=False)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("by_ratio", "by_number"))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert one["model.layers.0.mlp.down_proj.weight"].shape[1] == 18
