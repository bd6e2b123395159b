"""Rules of a stock config class beyond shapes: they are checked before anything is planned."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from ckpt_prune.api.load import load
from ckpt_prune.evaluation.whole_model import quiet_transformers
from tests.cli.running import TEXT, enter_copy, ok, read_json, read_refusal
from tests.evaluation.tiny import VOCAB, tiny_tokenizer

RULE = (
    "this phi3 with longrope keeps all its heads: Phi3Config of transformers refuses num_attention_heads 2 and "
    "num_key_value_heads 1 (`rope_parameters`'s short_factor field must have length 8, got 4)"
)
"""Its factors are as many as half of hidden_size / num_attention_heads, also where head_dim says otherwise."""
WINDOWS = (8, 24)
"""Shorter and longer than the length that the model was first trained at: short factors and long ones."""


@pytest.fixture(scope="module")
def written(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longrope")
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 12,
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 4.0, 7.0, 10.0],
    }
    config = Phi3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, original_max_position_embeddings=12, rope_parameters=rope,
        initializer_range=0.3, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with quiet_transformers():
        Phi3ForCausalLM(config).save_pretrained(folder / "phi3")
    tiny_tokenizer("<s> $A").save_pretrained(folder / "phi3")
    shutil.copy(made / "calib.txt", folder)
    return folder


@pytest.fixture
def here(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_copy(written, tmp_path, monkeypatch)


def test_a_recipe_that_insists_is_told_the_rule_and_what_to_do(here):
    assert read_refusal("prune", "phi3", "--recipe", "magnitude", "--ratio", "0.5", "-o", "out") == (
        f"no stock class fits: {RULE}. Say --container any to store it with code of its own beside the weights, or "
        "--container padded for a stock class that is filled up with zeros, which saves nothing there; --set "
        "spaces.heads.ratio=0 leaves all heads in "
        "place, and the source is fine as it is"
    )


def test_the_default_recipe_takes_columns_alone(here):
    output = ok("prune", "phi3", "--target-params", "80%", *TEXT, "-o", "out")
    assert RULE in output.splitlines()
    config = read_json("out/config.json")
    assert (config["model_type"], config["num_attention_heads"], "auto_map" in config) == ("phi3", 4, False)
    assert config["intermediate_size"] < 24


def test_padded_and_own_code_compute_the_same_under_short_and_long_factors(here):
    for container in ("padded", "any"):
        ok("prune", "phi3", "--recipe", "magnitude", "--ratio", "0.5", "--container", container, "-o", container)
    with quiet_transformers():
        padded, dense = (AutoModelForCausalLM.from_pretrained(name).eval() for name in ("padded", "phi3"))
        own_code = load("any")
    assert own_code.config.per_layer_config[0].num_attention_heads == 2
    for window in WINDOWS:
        ids = torch.randint(3, VOCAB, (2, window), generator=torch.Generator().manual_seed(window))
        with torch.no_grad():
            logits = [model(ids).logits for model in (padded, own_code, dense)]
        assert torch.allclose(logits[0], logits[1], atol=1e-5)
        assert not torch.allclose(logits[0], logits[2], atol=1e-2)


def test_a_narrower_stream_is_told_the_same(here):
    message = read_refusal("prune", "phi3", "--recipe", "slicegpt-shared", "--set", "hidden.drop=8", *TEXT, "-o", "out")
    assert message.startswith("no stock class fits: Phi3Config of transformers refuses a narrower stream (")
    assert message.endswith("say --set hidden.kind=per-block, which needs remote code")
