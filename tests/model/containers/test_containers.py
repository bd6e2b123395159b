"""Which stock type an output is stored as, and that relabelling alone changes no logit."""

import json
from functools import partial

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.containers.choosing import choose_container
from ckpt_prune.model.skeleton import parse_config
from tests import refusals
from tests.families import BLOCKS, SIZES, VARIANTS, job_on, logits, make, model_of, prune, recipe, stock, windows
from tests.pairs import every

RELABELLED = [
    ("llama", "mistral"),
    ("llama-gqa-tied", "mistral"),
    ("llama", "seed_oss"),
    ("llama-biases", "seed_oss"),
    ("mistral", "seed_oss"),
    ("mistral-mha", "seed_oss"),
    ("qwen2", "seed_oss"),
    ("qwen2-mha", "seed_oss"),
]


@pytest.mark.parametrize(("variant", "container"), every(4, RELABELLED))
def test_a_stand_in_computes_the_same(sources, variant, container, tmp_path):
    folder = sources.folder(variant)
    stand_in_recipe = recipe("none", "magnitude", heads=0, mlp=0, container=container)
    report = prune(job_on(folder, stand_in_recipe), tmp_path / "out")
    model = stock(tmp_path / "out")
    assert (model.config.model_type, report["container"]["model_type"]) == (container, container)
    ids = windows(3, 20, seed=9)
    assert torch.equal(logits(model, ids), logits(stock(folder), ids))


@pytest.mark.parametrize(("variant", "container"), RELABELLED)
def test_a_stand_in_keeps_what_the_config_says(sources, variant, container):
    """Values unlike every default, so that one left behind shows."""
    raw = json.loads((sources.folder(variant) / "config.json").read_text())
    values = {"rms_norm_eps": 3e-4, "rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}
    values |= {"hidden_act": "gelu", "attention_dropout": 0.0, "dtype": "bfloat16", "bos_token_id": 7}
    chosen = choose(VARIANTS[variant].model_type, raw | values, requested=container).config
    assert {key: chosen[key] for key in values} == values
    kept = ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings", "eos_token_id")
    assert {key: chosen[key] for key in kept} == {key: raw[key] for key in kept}


LEGACY_ROPES = {
    "base": {"rope_theta": 500.0},
    "linear": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


@pytest.mark.parametrize("container", ["mistral", "seed_oss"])
@pytest.mark.parametrize("rope", LEGACY_ROPES.values(), ids=LEGACY_ROPES)
def test_a_stand_in_rotates_as_an_old_config_says(tmp_path, rope, container):
    """Configs of before transformers 5, which also left out what was the default."""
    folder, ids = make(tmp_path / "dense", "llama"), windows(3, 20, seed=9)
    plain = logits(stock(folder), ids)
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "head_dim", "num_key_value_heads", "tie_word_embeddings", "dtype"):
        config.pop(key)
    (folder / "config.json").write_text(json.dumps(config | rope))
    prune(job_on(folder, recipe("none", "magnitude", heads=0, mlp=0, container=container)), tmp_path / "out")
    dense = logits(stock(folder), ids)
    assert not torch.allclose(dense, plain, atol=1e-3)
    assert torch.equal(logits(stock(tmp_path / "out"), ids), dense)


def choose(model_type, raw, biases=frozenset(), widths=None, **options):
    same = [{"heads": raw["num_key_value_heads"], "mlp": raw["intermediate_size"]}] * BLOCKS
    return choose_container(model_of(raw), widths or same, biases, **options)


def config_of(model_type, **changes):
    return {"model_type": model_type, **SIZES, **changes}


refusal = partial(refusals.refusal, choose)


@pytest.mark.parametrize(
    ("model_type", "window"),
    [("mistral", {"sliding_window": 8}), ("qwen2", {"use_sliding_window": True, "sliding_window": 8})],
)
def test_sliding_windows_have_no_stand_in(model_type, window):
    raw = config_of(model_type, **window)
    assert choose(model_type, raw).model_type == model_type
    reason = "seed_oss is not offered for a model with sliding-window attention"
    message = refusal(model_type, raw, requested="seed_oss")
    assert message.startswith(f"no stock class fits: {reason}. ")
    both = f"{model_type} has no slot for a bias on mlp.down_proj; {reason}"
    assert refusal(model_type, raw, {"mlp.down_proj"}).startswith(f"no stock class fits: {both}. ")


def test_qwen2_with_a_window_that_is_off_may_be_relabelled():
    raw = config_of("qwen2", use_sliding_window=False, sliding_window=8)
    assert choose("qwen2", raw, {"mlp.down_proj"}).model_type == "seed_oss"


def test_the_note_says_why_the_type_changed():
    container = choose("llama", config_of("llama"), {"mlp.down_proj"}, [{"heads": 2, "mlp": 22}] * BLOCKS)
    assert (container.model_type, container.note) == ("llama", None)
    three = [{"heads": 3}] * BLOCKS
    container = choose("llama", config_of("llama", num_key_value_heads=4), frozenset(), three)
    assert container.note == "stored as mistral: llama refuses 3 heads, which do not divide its hidden size of 16"
    container = choose("llama", config_of("llama", num_key_value_heads=4), {"self_attn.o_proj"}, three)
    assert container.note == (
        "stored as seed_oss: llama refuses 3 heads, which do not divide its hidden size of 16; "
        "mistral has no slot for a bias on self_attn.o_proj"
    )


def test_a_slot_opens_with_its_siblings():
    container = choose("llama", config_of("llama"), {"mlp.down_proj"})
    assert (container.config["mlp_bias"], container.config.get("attention_bias")) == (True, None)
    assert container.biases == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    container = choose("qwen2", config_of("qwen2"), {f"self_attn.{m}_proj" for m in "qkvo"})
    assert (container.config["attention_bias"], container.config["attention_out_bias"]) == (True, True)
    assert container.config["mlp_bias"] is False


def test_an_impossible_container_is_refused():
    assert refusal("qwen3", config_of("qwen3"), requested="seed_oss") == (
        "container 'seed_oss' cannot hold a qwen3: qwen3, remote, any or padded can"
    )
    assert refusal("llama", config_of("llama"), requested="lama") == (
        "container 'lama' cannot hold a llama: llama, mistral, seed_oss, remote, any or padded can"
    )


UNEVEN = [{"heads": 2, "mlp": 22}, {"heads": 1, "mlp": 20}, {"heads": 2, "mlp": 22}]


def test_uneven_widths_need_consent_and_remote_code():
    raw = config_of("mistral")
    assert refusal("mistral", raw, widths=UNEVEN) == (
        "blocks would differ in width, which no stock model can load: say widths: per_layer in the recipe "
        "to accept remote code"
    )
    assert refusal("mistral", raw, widths=UNEVEN, per_layer=True, requested="mistral") == (
        "container mistral cannot hold blocks of different widths: only remote can"
    )
    container = choose("mistral", raw, widths=UNEVEN, per_layer=True)
    assert container.remote_class == "PrunedMistralForCausalLM"
    assert container.config["architectures"] == ["PrunedMistralForCausalLM"]
    assert container.config["auto_map"] == {
        "AutoModelForCausalLM": "modeling_pruned.PrunedMistralForCausalLM",
        "AutoModel": "modeling_pruned.PrunedMistralModel",
    }
    assert container.config["per_layer_config"] == {
        "1": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 20}
    }


def test_a_class_that_checks_its_heads_is_shown_the_dense_number_where_blocks_differ():
    raw = config_of("gemma2", head_dim=4)
    container = choose("gemma2", raw, widths=UNEVEN, per_layer=True)
    assert container.remote_class == "PrunedGemma2ForCausalLM"
    numbers = ("num_attention_heads", "num_key_value_heads")
    assert [container.config[key] for key in numbers] == [raw[key] for key in numbers]
    overrides = container.config["per_layer_config"]
    heads = [overrides.get(str(index), {}).get(numbers[0], raw[numbers[0]]) for index in range(len(UNEVEN))]
    group = raw[numbers[0]] // raw[numbers[1]]
    assert heads == [widths["heads"] * group for widths in UNEVEN]
    assert parse_config(container.config).is_heterogeneous


def test_as_many_heads_everywhere_as_the_class_refuses_are_each_block_s_own():
    raw = config_of("gemma2", head_dim=4, num_attention_heads=8, num_key_value_heads=8, hidden_size=32)
    widths = [{"heads": 3}] * raw["num_hidden_layers"]
    assert refusal("gemma2", raw, widths=widths).startswith("no stock class fits: gemma2 refuses 3 heads")
    container = choose("gemma2", raw, widths=widths, requested="any")
    assert container.config["num_attention_heads"] == 8
    assert [values["num_attention_heads"] for values in container.config["per_layer_config"].values()] == [3] * len(
        widths
    )


ODD_GEMMA = {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 32}
THREE, BIASED = [{"heads": 3}] * BLOCKS, {"mlp.down_proj"}


@pytest.mark.parametrize(
    ("model_type", "config", "given", "requested", "reason"),
    [
        (
            "gemma2",
            ODD_GEMMA,
            (set(), THREE),
            "remote",
            "gemma2 refuses 3 heads, which do not divide its hidden size of 32",
        ),
        (
            "gemma2",
            ODD_GEMMA,
            (set(), THREE),
            "any",
            "gemma2 refuses 3 heads, which do not divide its hidden size of 32",
        ),
        ("qwen3", {}, (BIASED,), "remote", "qwen3 has no slot for a bias on mlp.down_proj"),
        ("mistral", {}, (BIASED, UNEVEN), "remote", "blocks differ in width"),
        ("mistral", {}, (set(), UNEVEN), "auto", "blocks differ in width"),
        ("llama", {}, (BIASED,), "remote", "on request"),
        ("gemma2", {"head_dim": 4}, (set(), [{"heads": 1}] * BLOCKS), "remote", "on request"),
    ],
)
def test_the_note_says_why_code_is_carried(model_type, config, given, requested, reason):
    container = choose(model_type, config_of(model_type, **config), *given, requested=requested, per_layer=True)
    assert container.remote_class is not None
    assert container.note == (
        f"stored as {container.model_type} with remote code ({reason}): load with ckpt_prune.load or trust_remote_code"
    )
    assert container.instead == ("Take another --ratio" if requested == "any" else "")


def test_even_widths_stay_stock_though_uneven_ones_were_allowed():
    container = choose("mistral", config_of("mistral"), per_layer=True)
    assert (container.remote_class, "auto_map" in container.config) == (None, False)


def test_any_takes_uneven_blocks_where_they_are_allowed():
    raw = config_of("llama")
    widths = [{"mlp": 16}, {"mlp": 12}, {"mlp": 16}]
    assert choose("llama", raw, widths=widths, requested="any", per_layer=True).remote_class is not None
    with pytest.raises(UserError, match="blocks would differ in width"):
        choose("llama", raw, widths=widths, requested="any")
