"""A block behind the last one, which predicts further tokens: transformers does not load it, and outputs lack it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_prune
from tests.cli.running import edit_weights, ok, read_json, run
from tests.contract.models import LED
from tests.contract.test_parts import PartCase
from tests.evaluation.tiny import tiny_tokenizer
from tests.undescribed import make_model

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


def test_the_config_says_so_for_other_depths() -> None:
    """The class names block 61 alone, which published checkpoints have."""
    blocks = json.loads(Path("dense/config.json").read_text())["num_hidden_layers"]
    edit_weights("dense", lambda tensors: tensors.update({
        name.replace(".61.", f".{blocks}."): tensors.pop(name) for name in NAMES
    }))  # fmt: skip
    assert SAID.replace(".61.", f".{blocks}.") in ok("inspect", "dense")
    edit_weights("dense", lambda tensors: tensors.update({f"model.layers.{blocks + 1}.enorm.weight": torch.ones(22)}))
    assert (
        f"model.layers.{blocks + 1}.enorm.weight (1 such), which config.json has no place for"
        in run("inspect", "dense").stderr
    )


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


CASES = {
    "qwen3_next": ((), "mtp.fc.weight", "num_nextn_predict_layers"),
    "qwen3_5": (("--part", "text"), "mtp.fc.weight", "mtp_num_hidden_layers"),
}
"""Classes that no description is of → options, a tensor that they do not load, and the key that counts such blocks."""


@pytest.mark.parametrize("model_type", CASES)
def test_found_classes_and_parts_lack_it_too(model_type: str) -> None:
    part, tensor, key = CASES[model_type]
    model = PartCase(model_type, "text", ()).model if part else make_model(model_type)
    model.save_pretrained(model_type)
    tiny_tokenizer("<s> $A").save_pretrained(model_type)
    config = read_json(f"{model_type}/config.json")
    (config["text_config"] if part else config)[key] = 1
    Path(model_type, "config.json").write_text(json.dumps(config))
    edit_weights(model_type, lambda tensors: tensors.update({tensor: torch.ones(4, 4)}))
    output = ok("prune", model_type, *part, *PRUNE[2:-1], "0.5", "-o", "out")
    assert f"does not load 1 tensor (16 numbers; {tensor}): they are left out" in output
    config = read_json("out/config.json")
    assert (config["text_config"] if part else config)[key] == 0
    assert tensor not in load_file("out/model.safetensors")
    assert "| left out of it | 1 tensor that the stock class does not load |" in Path("out/README.md").read_text()
    assert "FAILED" not in ok("verify", "out", "--against", model_type)
