"""A family that the package has no description of: inspect drafts one, --family takes it, and outputs carry it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import ArceeConfig, ArceeForCausalLM

import ckpt_prune
from ckpt_prune.model.descriptions import OUTSIDE_KEY
from ckpt_prune.model.skeleton import quiet_transformers
from tests.cli.running import TEXT, ok, read_json, read_refusal, set_config
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
    """`arcee`: llama's blocks with an MLP of two projections; and `arcee.json`, as inspect prints it."""
    torch.manual_seed(0)
    with quiet_transformers():
        ArceeForCausalLM(ArceeConfig(**SIZES)).save_pretrained("arcee")
    tiny_tokenizer("<s> $A").save_pretrained("arcee")
    draft = json.loads(ok("inspect", "arcee", "--json"))["draft"]
    Path("arcee.json").write_text(json.dumps(draft))
    return place


def test_inspect_says_what_it_is_like_and_prints_the_description(arcee):
    summary, printed = ok("inspect", "arcee").split("{\n", 1)
    assert summary == (
        "model       arcee\n"
        "family      arcee (ArceeForCausalLM), which this version has no description of\n"
        "like        llama\n"
        "tensors that only llama has: model.layers.{block}.mlp.gate_proj.weight\n"
        "tensors that llama has not: none\n"
        "config keys that llama has not: none\n"
        "code of transformers that differs: MLP\n"
        "read that code before you trust the spaces\n"
        "\n"
        "a description to start from, for --family arcee.json:\n"
    )
    draft = json.loads("{" + printed)
    assert draft == read_json("arcee.json")
    assert (draft["extends"], draft["inherits"], draft["stand_ins"]) == ("llama", ["rope"], [])
    assert draft["spaces"]["mlp"]["rows"] == [{"module": "mlp.up_proj"}]
    assert draft["residual"]["reads"]["post_attention_layernorm"] == ["mlp.up_proj"]
    assert draft["bias_slots"]["mlp.down_proj"] == "mlp_bias"
    assert "mlp.gate_proj" not in draft["bias_slots"]
    assert "mlp                 22 x column" in ok("inspect", "arcee", *FAMILY)


def test_a_config_alone_is_enough(arcee):
    Path("arcee/model.safetensors").unlink()
    assert ok("inspect", "arcee").splitlines()[2] == "like        llama"
    assert "arcee (config only)" in ok("inspect", "arcee", *FAMILY)


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
        (
            {"inherits": []},
            "arcee.json extends llama and does not say whether rope is the same: compare the two modeling files of "
            'transformers, then write "inherits": ["rope"], or state those that differ',
        ),
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
    shutil.copytree("arcee", "other")
    set_config("other", model_type="helium")
    unknown = "model_type 'helium' is not one of the "
    assert read_refusal("plan", "other", *FAMILY, "--recipe", "magnitude", "-o", "p.json").startswith(unknown)
    assert "made from" not in ok("inspect", "dense", *FAMILY)  # llama, which needs none


def test_a_family_like_none(arcee):
    set_config("arcee", model_type="rwkv", architectures=["RwkvForCausalLM"])
    root = Path(__file__).parents[2]
    families, guide = root / "ckpt_prune" / "model" / "FAMILIES.md", root / "recipes" / "guides" / "add-a-family.md"
    assert families.is_file()
    assert guide.is_file()
    pages = f"{families} lists those that can be pruned, and {guide} says how to describe another"
    message = read_refusal("inspect", "arcee")
    assert message.startswith("model_type 'rwkv' is unlike every family that this version knows: ")
    assert message.endswith(pages)
    set_config("arcee", model_type="arce")
    assert read_refusal("inspect", "arcee") == (
        f"model_type 'arce' is known neither here nor to transformers {transformers.__version__}; a newer transformers "
        f"may have it; {pages}"
    )
    set_config("arcee", model_type="lama")
    assert " (did you mean 'llama'?); a newer " in read_refusal("inspect", "arcee")
