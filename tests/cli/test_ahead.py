"""A block behind the last one, which predicts further tokens: transformers does not load it, and outputs lack it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_prune
from tests.cli.running import edit_weights, ok, run
from tests.contract.models import LED

AHEAD = {
    "eh_proj.weight": (22, 44),
    "embed_tokens.weight": (40, 22),
    "enorm.weight": (22,),
    "hnorm.weight": (22,),
    "shared_head.head.weight": (40, 22),
    "mlp.experts.0.down_proj.weight": (22, 10),
}
"""Of block 61: some of what published checkpoints of DeepSeek V3 have there."""
NAMES = sorted(f"model.layers.61.{name}" for name in AHEAD)
SAID = (
    "transformers' DeepseekV3ForCausalLM does not load 6 tensors (2.99K numbers; model.layers.61.eh_proj.weight, "
    "model.layers.61.embed_tokens.weight, model.layers.61.enorm.weight and 3 more)"
)
PRUNE = ("prune", "dense", "--recipe", "magnitude", "--set", "spaces={mlp: {score: magnitude}}", "--ratio", "0.25")


@pytest.fixture(autouse=True)
def dense() -> None:
    LED.write(Path("dense"))
    config = json.loads(Path("dense/config.json").read_text())
    Path("dense/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    more = {f"model.layers.61.{name}": torch.ones(shape) for name, shape in AHEAD.items()}
    edit_weights("dense", lambda tensors: tensors.update(more))


def test_it_is_counted_and_named() -> None:
    assert f"not loaded  {SAID}; outputs lack them\n" in ok("inspect", "dense")
    assert json.loads(ok("inspect", "dense", "--json"))["ignored"] == NAMES


def test_outputs_lack_it() -> None:
    result = run(*PRUNE, "-o", "out")
    assert result.exit_code == 0, result.output
    assert f"{SAID}: they are left out, and the output's config.json no longer speaks of them\n" in result.output
    written = load_file("out/model.safetensors").keys()
    assert written == load_file("dense/model.safetensors").keys() - set(NAMES)
    assert json.loads(Path("out/ckpt_prune.json").read_text())["ignored"] == NAMES
    assert json.loads(Path("out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "FAILED" not in ok("verify", "out", "--against", "dense")
    assert "tensors   FAILED" not in ok("verify", "dense")
    assert ckpt_prune.load("out") is not None
