"""The MLP of a head that pools tokens behind the blocks (SigLIP) goes with those of the blocks."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import SiglipConfig, SiglipForImageClassification, SiglipVisionConfig, SiglipVisionModel

import ckpt_prune
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.skeleton import quiet_transformers
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver
from ckpt_prune.stages.spaces.solvers.pooling import PoolingSolver
from tests.cli.running import ok, run
from tests.encoders import randomise
from tests.families import contents
from tests.images import SIZE, write_images, write_processor
from tests.interrupting import stop_before

BLOCKS, WIDTH = 3, 24
CONFIG = {
    "image_size": SIZE,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
}
BARE = ("--evaluate-samples", "0")
RIDGE = ("--recipe", "ridge", "--ratio", "0.5", "--set", "spaces.heads.ratio=0", *BARE)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", [f"{number}.png" for number in range(24)])
    return tmp_path


def write(model: Any, folder: Path) -> None:
    randomise(model, 3)
    with quiet_transformers():
        model.eval().save_pretrained(folder)
    write_processor(folder)


def write_tower(folder: Path, **changes: Any) -> None:
    write(SiglipVisionModel(SiglipVisionConfig(**CONFIG, **changes)), folder)


def kept(folder: str) -> dict[str, list[int]]:
    """Columns that stay of each space, site by site."""
    widths: dict[str, list[int]] = {}
    for site in json.loads(Path(folder, "ckpt_prune.json").read_text())["sites"]:
        widths.setdefault(site["space"], []).append(len(site["kept"]))
    return widths


def config(folder: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return values


def test_a_killed_run_goes_on_and_its_output_is_stock(place):
    write_tower(place / "dense")
    job = ("prune", "dense", *RIDGE, "--images", "images")
    ok(*job, "-o", "whole")
    assert kept("whole") == {"heads": [2] * BLOCKS, "mlp": [WIDTH // 2] * BLOCKS, "pooling": [WIDTH // 2]}
    for entry in (f"block {BLOCKS - 1}", "rest"):
        with pytest.MonkeyPatch.context() as patch:
            stop_before(patch, entry)
            with pytest.raises(AssertionError, match="keeps what is done"):
                ok(*job, "-o", "out")
        ok(*job, "-o", "out", "--resume")
        assert contents(place / "out") == contents(place / "whole")
        shutil.rmtree("out")
    assert "no key missing, unexpected or mismatched" in ok("verify", "whole", "--against", "dense")
    assert config("whole")["intermediate_size"] == WIDTH // 2
    ok("calibrate", "dense", "--images", "images", "--folds", "2", "-o", "stats")
    ok("plan", "dense", *RIDGE[:6], "--set", "target=dense", "--statistics", "stats", "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "--statistics", "stats", *BARE, "-o", "planned")
    assert kept("planned") == kept("whole")


def test_widths_by_effect_are_those_of_the_blocks(place):
    """It has no effect on the last hidden states. Its columns count in the size."""
    write_tower(place / "dense")
    ok("prune", "dense", "--recipe", "best-uniform", *RIDGE[2:], "--images", "images", "-o", "out")
    assert kept("out") == {"mlp": [WIDTH // 2] * BLOCKS, "pooling": [WIDTH // 2]}
    assert "auto_map" not in config("out")


def test_it_stays_whole_where_blocks_have_widths_of_their_own(place):
    write_tower(place / "dense")
    ok("prune", "dense", "--recipe", "best", "--ratio", "0.4", *BARE, "--images", "images", "-o", "out")
    widths = kept("out")
    assert "pooling" not in widths
    stated = config("out")
    assert stated["intermediate_size"] == WIDTH
    overrides = [stated["per_layer_config"].get(str(block), {}) for block in range(BLOCKS)]
    assert [each.get("intermediate_size", WIDTH) for each in overrides] == widths["mlp"]
    assert len({*widths["mlp"]}) > 1
    model: Any = ckpt_prune.load("out")
    stock = SiglipVisionModel.from_pretrained("dense")
    torch.testing.assert_close(model.head.mlp.fc2.weight, stock.head.mlp.fc2.weight)
    assert "FAILED" not in ok("verify", "out", "--against", "dense")


def test_few_images_are_told_where_all_their_tokens_would_do(place):
    """24 images are 96 tokens, of which the head sees 24: a fit of 12 inputs there is one of 48."""
    write_tower(place / "dense")
    job = ("prune", "dense", "--recipe", "corp-mlp", "--ratio", "0.5", "--images", "images", "--dry-run")
    output = run(*job).output
    assert "few calibration tokens: 96, which fits memorise with lambda 0.001 of mlp" not in output
    assert "which fits memorise with lambda 0.001 of pooling" in output


def test_a_tower_without_a_head_is_pruned_by_itself(place):
    write_tower(place / "dense", vision_use_head=False)
    ok("prune", "dense", *RIDGE, "--images", "images", "-o", "out")
    assert kept("out") == {"heads": [2] * BLOCKS, "mlp": [WIDTH // 2] * BLOCKS}
    assert "no key missing, unexpected or mismatched" in ok("verify", "out", "--against", "dense")


def test_a_classifier_on_a_tower(place):
    """Its class runs the head, and reads the tokens: `verify` loads it, and `export` proves its graph."""
    assert [*load_composite({"model_type": "clip", "architectures": ["CLIPForImageClassification"]}).parts] == [
        "vision"
    ]
    whole = SiglipConfig(vision_config=CONFIG, num_labels=3)
    write(SiglipForImageClassification(whole), place / "dense")
    job = ("prune", "dense", "--part", "vision", "--recipe", "corp-mlp", "--ratio", "0.5", "--images", "images")
    ok(*job, "-o", "out")
    assert kept("out") == {"mlp": [WIDTH // 2] * BLOCKS, "pooling": [WIDTH // 2]}
    assert "SiglipForImageClassification by stock transformers" in ok("verify", "out", "--against", "dense")
    assert "the graph agrees with out" in ok("export", "out", "-o", "graph")


@pytest.mark.parametrize("units", ["mlp", "pooling"])
def test_beside_effects_columns_cost_nothing_only_where_their_number_is_that_of_the_mlps(units, monkeypatch):
    monkeypatch.setattr(ColumnSolver, "errors", lambda *_arguments: torch.ones(4))
    solver: Any = SimpleNamespace(
        recipe=SimpleNamespace(weighed_by_effect=True),
        description=SimpleNamespace(units=units),
        model=SimpleNamespace(family=SimpleNamespace(together=["mlp"])),
    )
    asked = type("Asked", (PoolingSolver,), vars(solver) | {"__init__": lambda _self: None})()
    assert bool(asked.errors(0, {}, (), torch.zeros(3)).any()) == (units == "pooling")
