"""Whole blocks and units of the others under one size, from the command line."""

from pathlib import Path

import pytest
import torch

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.joint_axes import divergence
from tests.cli.running import TEXT, ok, read_json, read_refusal, run
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.stages.depth.test_commands import windows

RECIPE = """\
version: 1
name: mine
allocation: least-error
container: any
depth: {choose: divergence, drop: auto}
spaces:
  heads: {score: rcpu, compensation: {method: ridge}}
  mlp: {score: rcpu, compensation: {method: ridge}}
"""
WIDTHS = RECIPE.replace("depth: {choose: divergence, drop: auto}\n", "")
JOB = ("--recipe", "mine.yaml", *TEXT, "--folds", "2")


@pytest.fixture
def here(place: Path) -> Path:
    """A llama of four blocks, of which the middle two do little, and a recipe for blocks and spaces."""
    Path("mine.yaml").write_text(RECIPE)
    Path("widths.yaml").write_text(WIDTHS)
    torch.manual_seed(3)
    with quiet_transformers():
        model = tiny_llama(max_position_embeddings=32, num_hidden_layers=4)
        for block in (1, 2):
            for weight in (model.model.layers[block].self_attn.o_proj, model.model.layers[block].mlp.down_proj):
                weight.weight.data *= 0.02
        model.save_pretrained("deep")
    tiny_tokenizer("<s> $A").save_pretrained("deep")
    return place


@pytest.mark.thorough
def test_blocks_that_do_little_go_first(here) -> None:
    """Blocks that do little go, and the divergence measured with only blocks gone is that of stock transformers."""
    lines = ok("prune", "deep", *JOB, "--target-params", "70%", "-o", "out").splitlines()
    report = read_json("out/ckpt_prune.json")
    depth, tried = report["depth"], report["depth"]["tried"]
    gone = 4 - len(depth["kept"])
    measured = {trial["blocks"]: trial["measured"] for trial in tried}
    assert measured[gone] == min(measured.values())
    assert gone >= 1
    assert set(depth["kept"]) >= {0, 3}
    assert report["after"]["parameters"] <= 0.7 * report["before"]["parameters"]
    start = lines.index("  blocks gone  divergence")
    assert lines[start - 1] == "Amounts that were tried"
    assert lines[start + 1 : start + 1 + len(tried)] == [
        f"  {count:<11}  {one:>10.4f}{'  taken' if count == gone else ''}" for count, one in measured.items()
    ]
    most = tried[-1]["blocks"]
    alone = ("--recipe", "depth", "--set", f"depth={{choose: divergence, drop: {most}}}")
    ok("prune", "deep", *JOB[2:6], *alone, "-o", "d")
    expected = divergence("deep", "d", windows()[4:])
    assert read_json("d/ckpt_prune.json")["depth"]["gaps"][0].get("blocks") == most
    assert tried[-1]["measured"] == pytest.approx(expected, rel=1e-4)
    assert run("verify", "out", "--against", "deep").exit_code == 0


@pytest.mark.thorough
def test_a_ratio_is_the_size_that_it_leaves(here) -> None:
    ok("prune", "deep", *JOB, "--ratio", "0.5", "-o", "out")
    ok("prune", "deep", "--recipe", "widths.yaml", *JOB[2:], "--ratio", "0.5", "-o", "plain")
    after = [read_json(f"{folder}/ckpt_prune.json")["after"]["parameters"] for folder in ("out", "plain")]
    dense = read_json("out/ckpt_prune.json")["before"]["parameters"]
    assert after[0] < dense
    assert abs(after[0] - after[1]) < 0.1 * dense


def test_one_block_stays_however_small_the_size(here) -> None:
    ok("prune", "deep", *JOB, "--target-params", "20%", "-o", "out")
    assert [trial["blocks"] for trial in read_json("out/ckpt_prune.json")["depth"]["tried"]] == [3]


def test_what_cannot_be(here) -> None:
    message = read_refusal("plan", "deep", "--recipe", "mine.yaml", "--statistics", "stats", "--target-params", "70%")
    assert "and then prunes spaces of what is left" in message
    assert "`ckpt-prune prune --recipe depth --set depth.drop=N` first, then calibrate and plan" in message
    message = read_refusal("prune", "deep", *JOB, "--target-params", "1", "-o", "out")
    assert message.startswith("1 parameters: out of reach of recipe mine, whose blocks and spaces leave "), message
    ok("calibrate", "deep", *TEXT, "--folds", "2", "-o", "deep-stats")
    bare = ("prune", "deep", "--recipe", "mine.yaml", "--statistics", "deep-stats", "--target-params", "70%")
    message = read_refusal(*bare, "-o", "out")
    assert message == "recipe mine compares numbers of blocks by running the model itself: give --text as well"
    ok(*bare, *TEXT, "--folds", "2", "-o", "both")
