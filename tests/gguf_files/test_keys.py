"""Every key of a file is taken, changes nothing, or is refused; an absent one is what llama.cpp takes it for.

llama.cpp runs each changed file here, and `convert` compares with it what it made.
"""

import json
import math
from pathlib import Path

import pytest

import ckpt_prune
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.reading import open_gguf
from tests.gguf_files.test_families import FAMILIES
from tests.gguf_files.test_source import edit_file
from tests.gguf_files.tiny import proving, save
from tests.pairs import every
from tests.refusals import refusal

HEADS = {"attention.key_length": None, "attention.value_length": None, "rope.dimension_count": None}
"""Sizes of heads that follow from the number of heads."""
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
SINGLE = {"num_key_value_heads": 4}
CHANGED = {
    "sizes of heads": ("llama", SINGLE, HEADS | {"attention.head_count_kv": None, "rope.freq_base": None}),
    "scaled without a type": ("llama", {}, {"rope.scaling.factor": 3.0}),
    "scaled by the older key": ("qwen2", {}, {"rope.scale_linear": 3.0}),
    "scaled by nothing": ("llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 3.0}),
    "yarn": ("qwen3", {}, YARN | {"rope.scaling.yarn_attn_factor": 1 + 0.1 * math.log(4)}),
    "yarn with a scale": ("llama", {}, YARN | {"rope.scaling.attn_factor": 1.5}),
    "yarn by a logarithm": ("ministral3", {}, {"rope.scaling.yarn_log_multiplier": 0.7}),
    "yarn of the context": ("qwen2", {}, YARN | {"rope.scaling.original_context_length": None}),
    "yarn beside windows": ("olmo2", {}, YARN | {"attention.sliding_window": 12}),
    "windows of another period": ("olmo2", {}, {"attention.sliding_window": 12, "attention.sliding_window_pattern": 3}),
    "listed windows": ("gemma3_text", {}, {"attention.sliding_window_pattern": [False, True, True]}),
    "windows everywhere": ("gemma2", {}, {"attention.sliding_window_pattern": 0}),
    "no window": ("gemma3_text", {}, {"attention.sliding_window": None, "rope.freq_base": 3e5}),
    "a window of 4096": ("gemma2", {}, {"attention.sliding_window": None, "rope.freq_base_swa": None}),
    "soft caps": ("gemma2", {}, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "a soft cap": ("gemma3_text", {}, {"final_logit_softcapping": 2.0, "rope.freq_base_swa": None}),
    "a soft cap of 0": ("gemma3_text", {}, {"final_logit_softcapping": 0.0}),
    "no factors": ("granite", {}, {"residual_scale": None, "embedding_scale": None, "attention.scale": None}),
    "factors of 0": ("granite", {}, {"residual_scale": 0.0, "embedding_scale": 0.0, "attention.scale": 0.0}),
    "no positions": ("granite", {}, {"rope.scaling.finetuned": False}),
    "no scale": ("cohere", {}, {"logit_scale": None}),
    "whole heads": ("stablelm", {}, {"rope.dimension_count": None}),
    "whole heads of nemotron": ("nemotron", {}, {"rope.dimension_count": None}),
    "keys without effect": (
        "llama",
        {},
        {"attention.sliding_window": 7, "expert_count": 0, "expert_used_count": 0, "rope.scaling.yarn_beta_fast": 32.0},
    ),
    "experts": (
        "qwen3_moe",
        {},
        {"expert_gating_func": 1, "expert_weights_norm": True, "expert_group_count": 1, "expert_weights_scale": 0.0},
    ),
    "shared experts": ("glm4_moe", {"n_shared_experts": 2}, {}),
    "factors in weights": ("minicpm3", {}, {"attention.head_count_kv": None}),
    "no sinks": ("cwm", {}, {}),
    "halves": ("hyperclovax", {}, {}),
    "other names": ("aria_text", {}, {}),
}
"""Name → a family, changes to its config, and keys of its file: a value, or None for one that is taken away."""


def make(folder: Path, name: str, changes: dict, keys: dict) -> Path:
    """A file of a tiny random model with other keys."""
    model_type, settings = FAMILIES[name]
    model = save(folder / "model", model_type, **settings | changes)
    export_gguf(str(model), folder / "plain.gguf", proving(model), kind="f32", proof=False)
    architecture = open_gguf(folder / "plain.gguf").values["general.architecture"]
    named = {key if key.startswith("tokenizer") else f"{architecture}.{key}": value for key, value in keys.items()}
    return edit_file(folder / "plain.gguf", folder / "m.gguf", **named)


@pytest.mark.parametrize("name", every(4, CHANGED))
def test_what_is_made_of_changed_keys_is_what_llama_cpp_computes(name, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    file = make(tmp_path, *CHANGED[name])
    text = proving(tmp_path / "model").text
    made = ckpt_prune.convert(file, output=tmp_path / "out", text=text, window=48)
    assert made.passed
    assert made.proof.kl < 1e-5
    assert made.proof.top1 == 1
    json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=pytest.fail)


REFUSED = {
    "an unknown key": ("llama", {}, {"foo": 1.0}, "llama.foo is '1.0', a key that ckpt-prune does not know"),
    "an unknown key of tokens": ("llama", {}, {"tokenizer.ggml.foo": True}, "tokenizer.ggml.foo is 'True', a key"),
    "both ways": ("llama", {}, {"attention.causal": False}, "attention.causal is 'False', and no class"),
    "experts": ("llama", {}, {"expert_count": 4}, "llama.expert_count is '4', and no class of"),
    "another gate": ("qwen3_moe", {}, {"expert_gating_func": 2}, "expert_gating_func is '2', and no class"),
    "another router": ("glm4_moe", {}, {"expert_gating_func": 1}, "is '1', and glm4_moe computes 2"),
    "many experts": ("qwen3_moe", {}, {"expert_count": 2**20}, "and llama.cpp takes 512 at most"),
    "other experts": ("qwen3_moe", {}, {"expert_count": 4}, "exps.weight has 5 experts, and others have not"),
    "no attention": ("lfm2", {}, {"attention.head_count_kv": [0] * 6}, "attention.head_count_kv has other blocks"),
    "no chunks": ("llama4_text", {}, {"attention.sliding_window": 0}, "sliding_window is '0', and no class"),
    "a scale of long texts": (
        "phi3-longrope",
        {},
        {"rope.scaling.attn_factor": 2.0},
        "such positions are scaled by 1.06066",
    ),
    "another scale": ("llama", {}, {"attention.scale": 0.5}, "attention.scale is '0.5', and no class"),
    "a scaled table": ("llama-llama3", {}, {"rope.scaling.factor": 2.0}, "is missing, a way to scale rotary"),
    "a part of a head": ("llama", {}, {"rope.dimension_count": 4}, "rope.dimension_count is '4', and llama rotates"),
    "narrower values": ("qwen3", {}, {"attention.value_length": 8}, "attention.value_length is '8', and heads of keys"),
    "other widths": (
        "nemotron_h",
        {},
        {"feed_forward_length": [0, 48, 0, 24, 0, 48]},
        "its blocks differ (feed_forward",
    ),
    "no widths": ("nemotron_3", {}, {"feed_forward_length": [0] * 4}, "feed_forward_length has other blocks"),
    "heads in groups": (
        "granitemoehybrid",
        {},
        {"ssm.group_count": 3},
        "ssm.inner_size is '64', and 8 heads in groups",
    ),
    "another base": ("olmo2", {}, {"attention.sliding_window": 9, "rope.freq_base_swa": 5.0}, "freq_base_swa is '5.0'"),
    "no window": ("gemma2", {}, {"attention.sliding_window": 0}, "with which no token sees another"),
    "no soft cap": ("gemma2", {}, {"attn_logit_softcapping": 0.0}, "nothing is divided by it"),
    "turns of yarn": ("llama", {}, YARN | {"rope.scaling.yarn_beta_fast": 8.0}, "yarn_beta_fast is '8.0', and no"),
    "a scale of yarn": ("llama", {}, YARN | {"rope.scaling.yarn_attn_factor": 2.0}, "and llama.cpp computes 1.13863"),
    "NaN": ("llama", {}, {"attention.layer_norm_rms_epsilon": math.nan}, "is 'nan', not a finite number"),
    "no base": ("llama", {}, {"rope.freq_base": 0.0}, "rope.freq_base is '0.0', and positions are divided"),
    "no base of windows": (
        "gemma3_text",
        {},
        {"rope.freq_base_swa": 0.0},
        "rope.freq_base_swa is '0.0', and positions",
    ),
    "no name": ("llama", {}, {"tokenizer.chat_template.../x": "a"}, "a chat template has the name '../x'"),
    "a number": ("llama", {}, {"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is '1', not true or false"),
    "unknown types": ("llama", {}, {"tokenizer.ggml.token_type": [77] * 2048}, "tokens have a type 77"),
}


@pytest.mark.parametrize("name", every(3, REFUSED))
def test_a_key_that_changes_what_is_computed_is_refused_by_its_name(name, tmp_path):
    *case, says = REFUSED[name]
    file = make(tmp_path, *case)
    line = refusal(ckpt_prune.convert, file, output=tmp_path / "out")
    assert line.startswith(f"{file}: ")
    assert says in line
    assert not (tmp_path / "out").exists()
