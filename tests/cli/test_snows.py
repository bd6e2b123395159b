"""`recovery: {method: snows}` and `recover --method snows`: what is written, said and kept."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import TEXT, ok, read_json
from tests.images import write_images, write_vit

QUICK = ("recovery.batch=4", "recovery.iterations=10", "recovery.held_out=0.25")
RECIPE = ("--recipe", "magnitude-2-4", "--set", "recovery.method=snows", *(w for q in QUICK for w in ("--set", q)))
SAME = ("--method", "snows", "--batch", "4", "--iterations", "10", "--held-out", "0.25")


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `dense`, a vision transformer `vit`, text and images of its own."""
    shutil.copytree(made / "dense", tmp_path / "dense")
    shutil.copy(made / "calib.txt", tmp_path)
    with quiet_transformers():
        write_vit(tmp_path / "vit")
    write_images(tmp_path / "images", [f"{i:02}.png" for i in range(12)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("model", "data"), [("dense", TEXT), ("vit", ("--images", "images", "--samples", "12"))])
def test_masked_blocks_come_nearer_and_a_later_run_gives_the_same(here, model, data):
    """Magnitudes look at no data: a mask at once is that of an earlier run."""
    told = ok("prune", model, *RECIPE, *data, "--evaluate-samples", "0", "-o", "out")
    assert f"fitted to what the weights of {model} make of the same states; zeros stay zero." in told
    layers = read_json("out/ckpt_prune.json")["layers"]
    assert all(
        layer["recovered"] and layer["curve"][1] < layer["curve"][0] and layer["rate"] is None for layer in layers
    )
    checked = ok("verify", "out", "--against", model)
    assert "2:4 holds in every group" in checked
    ok("prune", model, "--recipe", "magnitude-2-4", *data, "--evaluate-samples", "0", "-o", "masked")
    ok("recover", "masked", "--dense", model, *SAME, *data, "--evaluate-samples", "0", "-o", "later")
    assert Path("later/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()
    settings = read_json("later/ckpt_prune.json")["recovery"]["settings"]
    assert {key: settings[key] for key in ("method", "operations", "iterations", "batch")} == {
        "method": "snows",
        "operations": 3,
        "iterations": 10,
        "batch": 4,
    }
    assert not {"lr", "schedule", "teacher"} & settings.keys()


def test_what_no_mask_touched_stays_bit_for_bit(here):
    """With a mask of the mlp alone, attention is the dense model's; and where nothing is masked, nothing is fitted."""
    args = ("prune", "dense", *RECIPE, "--set", "mask.only=mlp", *TEXT, "--evaluate-samples", "0")
    ok(*args, "-o", "out")
    before, after = load_file("dense/model.safetensors"), load_file("out/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before if "mlp" not in name)
    assert not any(torch.equal(before[name], after[name]) for name in before if "mlp" in name)
    assert "to be recovered by snows: 2 of 2 blocks" in ok(*args, "--dry-run")
    ok("recover", "dense", "--dense", "dense", *SAME, *TEXT, "--evaluate-samples", "0", "-o", "same")
    assert Path("same/model.safetensors").read_bytes() == Path("dense/model.safetensors").read_bytes()
    assert not any(layer["recovered"] for layer in read_json("same/ckpt_prune.json")["layers"])
