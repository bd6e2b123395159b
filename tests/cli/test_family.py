"""A family that the package has no description of: it is found, outputs carry it, and --family takes it."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import ArceeConfig, ArceeForCausalLM

import ckpt_prune
from ckpt_prune.model.descriptions import OUTSIDE_KEY
from ckpt_prune.model.skeleton import quiet_transformers
from tests.cli.running import TEXT, ok, read_json, read_refusal, run, set_config
from tests.evaluation.tiny import VOCAB, tiny_tokenizer

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILY = ("--family", "arcee.json")
PRUNE = ["prune", "arcee", *FAMILY, "--recipe", "flap", "--ratio", "0.5", *TEXT]


@pytest.fixture
def arcee(place: Path) -> Path:
    """`arcee`: llama's blocks with an MLP of two projections; and `arcee.json`, as `inspect --json` gives it."""
    torch.manual_seed(0)
    with quiet_transformers():
        ArceeForCausalLM(ArceeConfig(**SIZES)).save_pretrained("arcee")
    tiny_tokenizer("<s> $A").save_pretrained("arcee")
    draft = json.loads(ok("inspect", "arcee", "--json"))["description"]
    Path("arcee.json").write_text(json.dumps(draft))
    return place


def test_inspect_shows_spaces_and_proofs(arcee):
    shown = run("inspect", "arcee")
    assert shown.stderr == (
        "spaces of arcee are found and proven on a small random model of its class, ArceeForCausalLM: queries, heads, "
        "mlp\n"
    )
    assert "mlp                 22 x column" in shown.stdout
    assert (
        "outputs of a small random model, transformers 5.24.0:\n"
        "proven   units reordered together  in one tensor alone  fewer, and the same zeroed\n"
        "queries                      same              differs                        same\n"
    ) in shown.stdout.replace(transformers.__version__, "5.24.0")
    found = read_json("arcee.json")
    assert found["spaces"]["mlp"]["rows"] == ["mlp.up_proj"]
    assert found["bias_slots"]["mlp.down_proj"] == "mlp_bias"
    assert "mlp.gate_proj" not in found["bias_slots"]
    assert found["heads_divide_hidden"]


def test_a_config_alone_is_enough(arcee):
    Path("arcee/model.safetensors").unlink()
    assert "arcee (config only)" in ok("inspect", "arcee")
    assert "arcee (config only)" in ok("inspect", "arcee", *FAMILY)


@pytest.mark.parametrize("recipe", ["ridge", "magnitude"])
def test_it_is_pruned_as_if_it_were_described(arcee, recipe):
    data = TEXT if recipe == "ridge" else ()
    prune = ("prune", "arcee", "--recipe", recipe, "--ratio", "0.5", *data)
    assert "2.83K  65.8%" in ok(*prune, "--dry-run")
    ok(*prune, "--evaluate-samples", "0", "-o", "out")
    assert read_json("out/config.json")[OUTSIDE_KEY] == read_json("arcee.json")
    assert "bit for bit" in ok("verify", "out", "--against", "arcee")
    ok("calibrate", "arcee", *TEXT, "-o", "measured")
    ok(*prune, "--family", "arcee.json", "--evaluate-samples", "0", "-o", "given")
    assert Path("given/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


def test_outputs_carry_the_description(arcee):
    """With it, the commands that open them need no --family; stock transformers still loads them."""
    ok(*PRUNE, "-o", "out")
    assert read_json("out/config.json")[OUTSIDE_KEY] == read_json("arcee.json")
    assert "kept units: producers of 4 pruned spaces hold the dense rows, bit for bit\n" in ok(
        "verify", "out", "--against", "arcee"
    )
    assert "made from   arcee by recipe flap" in ok("inspect", "out")
    loaded = ckpt_prune.load("out")
    assert type(loaded) is ArceeForCausalLM
    assert loaded.config.intermediate_size == 11
    ok("recover", "out", "--dense", "arcee", *FAMILY, *TEXT, "--epochs", "1", "-o", "recovered")
    assert read_json("recovered/config.json")[OUTSIDE_KEY] == read_json("arcee.json")


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimensions": 5}, "arcee.json: dimensions: input should be a valid dictionary"),
        ({"bias_slots": {}, "model_type": "llama"}, None),
        ({"layers": "model.blocks"}, "layers: ArceeForCausalLM has no list model.blocks of 2 blocks"),
    ],
)
def test_descriptions_that_are_not_so(arcee, change, message):
    Path("arcee.json").write_text(json.dumps(read_json("arcee.json") | change))
    reason = message or (
        "describes llama, a family that this version knows: leave --family out, or give its model_type another name "
        "if the model is another"
    )
    join = ": " if message else " "
    for command in (["inspect", "arcee"], [*PRUNE[:2], "--recipe", "magnitude", "-o", "out"]):
        assert read_refusal(*command, *FAMILY) == f"--family arcee.json{join}{reason}"


def test_a_description_that_is_no_file_or_for_another_model(arcee):
    assert read_refusal("inspect", "arcee", "--family", "absent.json").startswith(
        "--family absent.json: there is no such file or folder"
    )
    assert "made from" not in ok("inspect", "dense", *FAMILY)  # llama, which needs none


def test_a_class_that_transformers_has_not(arcee):
    set_config("arcee", model_type="arce")
    assert read_refusal("inspect", "arcee") == (
        f"model_type 'arce' is known neither here nor to transformers {transformers.__version__}; a newer transformers "
        "may have it"
    )
    set_config("arcee", model_type="lama")
    assert " (did you mean 'llama'?); a newer " in read_refusal("inspect", "arcee")
