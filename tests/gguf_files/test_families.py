"""Every mapped family computes in llama.cpp what it computes in PyTorch."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.architectures import ARCHITECTURES
from ckpt_prune.gguf.export import export_gguf, validate_gguf
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.options.data import ProofOptions
from tests.gguf_files.tiny import (
    DELTA,
    FALCON_H1,
    GEMMA4,
    GRANITE,
    GRANITE_4,
    HYBRID,
    LONGROPE,
    MAMBA,
    MIXTURE,
    NEMOTRON_H,
    ROUTED,
    SIZES,
    STATES,
    STATES_2,
    WINDOWED,
    proving,
    save,
)
from tests.pairs import every
from tests.runner.frontiers import run

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PARTS = {
    "full_attention": YARN | {"attention_factor": 1.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}
OSS = {
    "num_local_experts": 5,
    "head_dim": 64,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "max_position_embeddings": 131072,
    "rope_parameters": YARN
    | {"rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
}
EXPERTS_4 = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
ATTENTION_4 = {"layer_types": ["full_attention"] * 6}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.7}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LLAMA_4 = {
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "head_dim": 16,
}
FEW = {"num_hidden_layers": 2}
INDEXED = ROUTED | LATENT | {"num_hidden_layers": 3, "index_topk": 64, "index_head_dim": 64, "index_n_heads": 4}
INDEXED |= {"n_group": 2, "topk_group": 1}
LAGUNA = MIXTURE | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 20,
    "shared_expert_intermediate_size": 40,
    "num_attention_heads_per_layer": [4, 6, 6, 6],
    "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
    "moe_routed_scaling_factor": 1.5,
    "rope_parameters": {
        "full_attention": YARN | {"partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
    },
}
MIMO = {
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "head_dim": 24,
    "v_head_dim": 8,
    "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
MINIMAX_3 = {
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "intermediate_size": 24,
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 24,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 16,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": HALF,
}
AFMOE = MIXTURE | {"head_dim": 16, "sliding_window": 20, "mup_enabled": True}
PARTLY = ["full_attention", "sliding_attention"] * 3
MIXED_KINDS = {"layers_block_type": ["full_attention", "moe", "linear_attention", "moe", "mlp", "linear_attention"]}
NEMOTRON_3 = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 20,
    "routed_scaling_factor": 2.5,
    "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
}
MULTIPLIERS = {
    **{"embedding_multiplier": 3.0, "lm_head_multiplier": 1.4, "key_multiplier": 1.6, "mlp_multipliers": [0.9, 0.5]},
    **{f"{kind}_multiplier": 0.7 for kind in ("attention_in", "ssm_out")},
    **{f"{kind}_multiplier": 1.2 for kind in ("attention_out", "ssm_in")},
    "ssm_multipliers": [0.5, 1.3, 0.8, 1.1, 2.0],
}
JAMBA = {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 12}
KIMI = (
    MIXTURE
    | LATENT
    | {
        "q_lora_rank": None,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 6,
        "n_shared_experts": 2,
        "n_group": 2,
        "linear_head_dim": 6,
        "linear_num_heads": 4,
    }
)
MINIMAX = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 5,
    "head_dim": 16,
    **{f"{part}_alpha_factor": 1.5 for part in ("full_attn", "linear_attn", "mlp")},
}
WINDOWS = ["sliding_attention", "full_attention"] * 3
NANO = WINDOWED | {"vocab_size_per_layer_input": 2000, "intermediate_size": 4096}
"""A Gemma 3n. llama.cpp divides by one column less where it looks for the largest, so that there must be many."""
NARROW = {"num_hidden_layers": 2, "intermediate_size": None, "num_key_value_heads": None}
EXACT_GELU = {"gpt_neox", "falcon", "falcon-groups", "mpt"}
LOOKED_UP = EXACT_GELU | {"starcoder2", "phi", "gpt2", "bloom", "gpt_bigcode"}
ALIBI = {"num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48}
"""Heads that are no power of two have slopes of two sequences."""
FAMILIES = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", WINDOWED),
    "gemma3_text": ("gemma3_text", WINDOWED),
    "gemma3n_text": ("gemma3n_text", NANO | {"num_hidden_layers": 22, "num_kv_shared_layers": 2}),
    "gemma4_text": ("gemma4_text", GEMMA4),
    # The last blocks read keys and values of the two before them, and are twice as wide.
    "gemma4-shared": (
        "gemma4_text",
        GEMMA4 | {"layer_types": WINDOWS, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4_unified_text": ("gemma4_unified_text", {key: GEMMA4[key] for key in GEMMA4 if "per_layer" not in key}),
    "gemma4-experts": (
        "gemma4_text",
        GEMMA4
        | MIXTURE
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "top_k_experts": 2},
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-longrope": ("phi3", LONGROPE),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 20, "rope_parameters": PARTS}),
    # Of windows and scales that the number of blocks does not tell.
    "gemma3-pattern": ("gemma3_text", WINDOWED | {"layer_types": ["full_attention"] + ["sliding_attention"] * 5}),
    "gemma2-scale": ("gemma2", WINDOWED | {"query_pre_attn_scalar": 40}),
    "gemma3-scale": ("gemma3_text", WINDOWED | {"query_pre_attn_scalar": 5, "final_logit_softcapping": 3.0}),
    "granite": ("granite", GRANITE),
    "granitemoe": ("granitemoe", MIXTURE | GRANITE | {"num_local_experts": 5}),
    "granitemoeshared": (
        "granitemoeshared",
        MIXTURE | GRANITE | {"num_local_experts": 5, "shared_intermediate_size": 40},
    ),
    "granitemoehybrid": ("granitemoehybrid", GRANITE_4),
    "granite-4": ("granitemoehybrid", GRANITE_4 | EXPERTS_4 | {"position_embedding_type": "rope"}),
    "granite-4-attention": ("granitemoehybrid", GRANITE_4 | ATTENTION_4 | {"attention_bias": True}),
    "granite-4-experts": (
        "granitemoehybrid",
        GRANITE_4 | EXPERTS_4 | ATTENTION_4 | {"position_embedding_type": "rope"},
    ),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1-factors": ("falcon_h1", FALCON_H1 | MULTIPLIERS | {"mamba_rms_norm": False}),
    "falcon_h1-tied": ("falcon_h1", FALCON_H1 | MULTIPLIERS | {"tie_word_embeddings": True}),
    "nemotron_h": ("nemotron_h", NEMOTRON_H | {"attention_bias": True, "mlp_bias": True}),
    "nemotron_3": ("nemotron_h", NEMOTRON_H | NEMOTRON_3),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "cohere": ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "arcee": ("arcee", {"hidden_act": "relu2"}),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.5, "tie_word_embeddings": True, "sliding_window": 20, "layer_norm_eps": 0.01},
    ),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 6}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan-dynamic": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": DYNAMIC}),
    "mixtral": ("mixtral", MIXTURE | {"num_local_experts": 5}),
    "qwen2_moe": ("qwen2_moe", MIXTURE | {"shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("qwen3_moe", MIXTURE | {"norm_topk_prob": True, "head_dim": 16}),
    "olmoe": ("olmoe", MIXTURE | {"num_key_value_heads": 4}),
    "gpt_oss": ("gpt_oss", MIXTURE | OSS),
    "lfm2": ("lfm2", HYBRID | {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", MIXTURE | HYBRID | {"num_dense_layers": 2}),
    "qwen3_next": ("qwen3_next", MIXTURE | DELTA | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True}),
    "qwen3_5_text": ("qwen3_5_text", DELTA | {"layer_types": ["full_attention", *["linear_attention"] * 5]}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", MIXTURE | DELTA | {"shared_expert_intermediate_size": 40}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "glm4_moe": (
        "glm4_moe",
        ROUTED | {"n_shared_experts": 1, "head_dim": 16, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    ),
    "dots1": ("dots1", ROUTED | {"num_key_value_heads": 4, "n_shared_experts": 2, "norm_topk_prob": True}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": YARN | SCALED}),
    "apertus": ("apertus", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "afmoe": ("afmoe", AFMOE | {"route_scale": 1.5}),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "rope_parameters": HALF},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 5, "moe_topk": [2] * 6, "head_dim": 16}),
    "exaone_moe": ("exaone_moe", MIXTURE | {"sliding_window": 20, "head_dim": 16}),
    "hunyuan-moe-dynamic": (
        "hunyuan_v1_moe",
        {"num_experts": 5, "moe_topk": 2, "head_dim": 16, "rope_parameters": DYNAMIC},
    ),
    "mellum": (
        "mellum",
        MIXTURE | {"head_dim": 16, "sliding_window": 20, "layer_types": PARTLY, "rope_parameters": PARTS},
    ),
    "hy_v3": ("hy_v3", MIXTURE | {"head_dim": 16, "num_shared_experts": 2}),
    "cohere2_moe": (
        "cohere2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 20,
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "num_shared_experts": 2,
            "logit_scale": 0.5,
            "prefix_dense_intermediate_size": 40,
        },
    ),
    "solar_open": ("solar_open", ROUTED | {"n_shared_experts": 1, "head_dim": 16}),
    "granite_swa": ("granite_swa", GRANITE | {"sliding_window": 20, "layer_rope_theta": [1e4, 0] * 3}),
    "iquestcoder": ("iquestcoder", {"head_dim": 16}),
    "internlm3": ("internlm3", {"head_dim": 16}),
    "jais2": ("jais2", {}),
    "olmo": ("olmo", {}),
    "deepseek_v2": ("deepseek_v2", ROUTED | LATENT | {"q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v3": ("deepseek_v3", ROUTED | LATENT | {"n_group": 2, "topk_group": 1, "rope_parameters": YARN | MSCALE}),
    "glm4_moe_lite": ("glm4_moe_lite", ROUTED | LATENT),
    "youtu": ("youtu", LATENT | {"tie_word_embeddings": True}),
    "phi": ("phi", {"rope_parameters": HALF}),
    "glm": ("glm", {"head_dim": 8, "rope_parameters": HALF}),
    "granitemoe_swa": ("granitemoe_swa", MIXTURE | GRANITE | {"num_local_experts": 5, "sliding_window": 20}),
    "exaone": ("exaone", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "llama4_text": ("llama4_text", LLAMA_4),
    "minicpm3": ("minicpm3", FEW | LATENT | {"scale_emb": 5, "scale_depth": 2.0, "dim_model_base": 16}),
    "minicpm3-longrope": ("minicpm3", FEW | LATENT | LONGROPE),
    "helium": ("helium", FEW | {"head_dim": 8}),
    "cwm": ("cwm", FEW | {"sliding_window": 20, "head_dim": 16}),
    "ministral": ("ministral", FEW | {"sliding_window": 20, "head_dim": 16}),
    "apertus1p5_text": ("apertus1p5_text", FEW),
    "sarvam_mla": ("sarvam_mla", FEW | ROUTED | LATENT),
    "deepseek_v32": ("deepseek_v32", INDEXED | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXED | {"indexer_types": ["full", "shared", "full"]}),
    "laguna": ("laguna", LAGUNA),
    "laguna-columns": (
        "laguna",
        LAGUNA | {"gating": "per-element", "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", MIMO),
    "sarvam_moe": (
        "sarvam_moe",
        FEW | ROUTED | {"head_dim": 8, "n_group": 2, "topk_group": 1, "rope_parameters": HALF},
    ),
    "minimax_m3_vl_text": ("minimax_m3_vl_text", MINIMAX_3),
    "aria_text": ("aria_text", FEW | {"moe_num_experts": 5, "moe_topk": 2}),
    "hyperclovax": ("hyperclovax", FEW | GRANITE | {"head_dim": 16, "tie_word_embeddings": True}),
    "jamba": ("jamba", JAMBA | {"num_experts": 4}),
    "jamba-dense": ("jamba", JAMBA | {"num_experts": 1, "mamba_dt_rank": 6, "tie_word_embeddings": True}),
    "kimi_linear": ("kimi_linear", KIMI),
    "mamba": ("mamba", STATES),
    "falcon_mamba": ("falcon_mamba", STATES | {"tie_word_embeddings": True}),
    "mamba2": ("mamba2", STATES_2),
    "bamba": ("bamba", MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1], "attention_bias": True}),
    "minimax": ("minimax", MINIMAX),
    "nemotron": ("nemotron", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 2, "use_parallel_residual": False}),
    "falcon": ("falcon", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "falcon-groups": ("falcon", {"num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("bloom", ALIBI | {"tie_word_embeddings": True}),
    "mpt": ("mpt", ALIBI | {"attn_config": {"clip_qkv": 2.0}}),
    "gpt_bigcode": ("gpt_bigcode", NARROW | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", NARROW | {"tie_word_embeddings": True, "n_inner": 48}),
}


@pytest.mark.parametrize("name", every(12, FAMILIES))
def test_a_file_computes_what_pytorch_does(name, tmp_path):
    model_type, changes = FAMILIES[name]
    folder = save(tmp_path / "model", model_type, **changes)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert exported.proof.kl < (1e-3 if name == "gemma3n_text" else 1e-5)
    assert exported.proof.top1 > (0.9 if name == "gemma3n_text" else 0.99)
    assert (tmp_path / "m.gguf").stat().st_size == exported.bytes
    exact = "truncate" in changes.get("rope_parameters", {})
    assert any("rounds the bounds of YaRN" in note for note in exported.notes) == exact
    assert (exported.proof.allowed == 1e-3) == (exact or "gemma" in name or name in LOOKED_UP)
    assert any("GELU by tanh" in note for note in exported.notes) == (name in EXACT_GELU)


@pytest.mark.parametrize(("model_type", "blocks"), [("gemma2", 46), ("gemma3_text", 62)])
def test_the_scale_of_the_largest_gemmas_goes_by_their_number_of_blocks(model_type, blocks, tmp_path):
    """By the root of hidden size / heads (8) in models of 27 B, and of the size of heads (16) in others."""
    sizes = {"num_hidden_layers": blocks, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save(tmp_path / "model", model_type, **WINDOWED | sizes | {"query_pre_attn_scalar": 8})
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert exported.proof.allowed == 1e-3  # it looks GELU up in a table of float16
    file, dense = open_gguf(tmp_path / "m.gguf"), load_file(folder / "model.safetensors")
    scaled = {"gemma2": ("attn_q", "q_proj", 0), "gemma3_text": ("attn_q_norm", "q_norm", 1)}[model_type]
    stored = file.read(f"blk.3.{scaled[0]}.weight") - scaled[2]
    torch.testing.assert_close(stored, dense[f"model.layers.3.self_attn.{scaled[1]}.weight"], rtol=0, atol=1e-6)
    made = ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", text=proving(folder).text, window=48)
    assert made.passed
    assert json.loads((tmp_path / "back" / "config.json").read_text())["query_pre_attn_scalar"] == 8


HYBRID_OLMO = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED = [
    ("gemma2", WINDOWED | {"attn_logit_softcapping": None}, "it always computes attn_logit_softcapping"),
    (
        "olmo3",
        {"rope_parameters": PARTS | {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
        "it scales no rotary positions in windows, and has others there in gemma3 alone",
    ),
    ("qwen2", {"rope_parameters": YARN | {"beta_fast": 16}}, "its YaRN has 32 and 1 turns as bounds"),
    (
        "dots1",
        ROUTED | {"norm_topk_prob": True, "n_shared_experts": 2},
        "each of its heads has keys and values of its own, and here",
    ),
    ("qwen3_5_text", DELTA | {"layer_types": ["full_attention"] * 6}, "some of its blocks have attention and some"),
    ("afmoe", AFMOE | {"layer_types": PARTLY}, "every 4th of its blocks sees all tokens, and here others do"),
    ("exaone_moe", MIXTURE | {"layer_types": PARTLY[:1] * 6}, "some of its blocks see a window of tokens only"),
    ("deepseek_v3", ROUTED | LATENT | {"rope_parameters": YARN | MSCALE | {"mscale": 1.0}}, "one mscale for all"),
    (
        "deepseek_v3",
        ROUTED | LATENT | {"num_hidden_layers": 26},
        "models of 26 blocks have queries without a latent",
    ),
    ("glm", {"head_dim": 16}, "its heads are together as wide as the model, and here they are wider"),
    (
        "llama4_text",
        LLAMA_4 | {"use_qk_norm": False},
        "it norms queries and keys of models without 128 experts alone",
    ),
    (
        "llama4_text",
        LLAMA_4 | {"moe_layers": [0, 3]},
        "blocks with experts are the last of every 1, as the first of",
    ),
    (
        "llama4_text",
        LLAMA_4 | {"layer_types": ["full_attention"] * 4},
        "without rotary positions see all tokens, and",
    ),
    ("deepseek_v32", INDEXED | {"index_head_dim": 16}, "heads of its indexer have a multiple of 64 rows"),
    ("glm_moe_dsa", INDEXED | {"rope_parameters": YARN | MSCALE}, "YaRN with an mscale of 1 in deepseek32 alone"),
    (
        "mimo_v2_flash",
        MIMO
        | {"rope_parameters": {"full_attention": HALF, "sliding_attention": HALF | {"partial_rotary_factor": 1.0}}},
        "all of its blocks rotate as many rows of a head, and here those with windows others",
    ),
    (
        "minimax_m3_vl_text",
        MINIMAX_3 | {"index_n_heads": 4},
        "its indexer has as many heads as keys and values have",
    ),
    (
        "minimax_m3_vl_text",
        MINIMAX_3 | {"layer_types": ["full_attention"] * 3},
        "its blocks with experts have an indexer, and no others have",
    ),
    ("phimoe", MIXTURE | {"num_local_experts": 5}, "phimoe is not written as GGUF: llama.cpp divides by the root"),
    ("granite_swa", {"layer_rope_theta": [1e4, 5e4] * 3}, "blocks with rotary positions have one base, and here"),
    (
        "ministral3",
        {"rope_parameters": YARN | SCALED | {"rope_type": "linear"}},
        "it takes llama_4_scaling_beta together with YaRN alone",
    ),
    (
        "hunyuan_v1_moe",
        {"num_experts": 5, "moe_topk": [1, 2] * 3, "head_dim": 8},
        "moe_topk .* is one whole number",
    ),
    (
        "gemma4_text",
        GEMMA4 | {"layer_types": [*WINDOWS[1:5], *WINDOWS[:2]], "num_kv_shared_layers": 2},
        "of which the first sees a window and the second all tokens, and here those are of full_attention and slid",
    ),
    (
        "gemma3n_text",
        NANO | {"num_hidden_layers": 20, "num_kv_shared_layers": 5},
        "20 of its blocks have keys and values of their own, and here 15 have",
    ),
    (
        "gemma3n_text",
        NANO | {"num_hidden_layers": 6, "num_kv_shared_layers": 0, "laurel_rank": 8},
        "it computes laurel_rank 64, and config.json has 8",
    ),
    (
        "gemma3n_text",
        NANO | {"num_hidden_layers": 6, "num_kv_shared_layers": 0},
        "its first 10 blocks keep 5 % of their columns, and no others do",
    ),
    ("qwen3_5_text", DELTA | {"linear_value_head_dim": 16}, "have as many rows of keys as of values"),
    ("granitemoehybrid", GRANITE_4 | {"mamba_expand": 1, "mamba_d_head": 4}, "it computes mamba_expand 2, and"),
    ("granitemoehybrid", GRANITE_4 | {"time_step_limit": (0.1, 1.0)}, "it does not limit time steps, and"),
    (
        "nemotron_h",
        NEMOTRON_H | NEMOTRON_3 | MIXED_KINDS,
        "all of its blocks with an MLP have experts, and here block 4 has none",
    ),
    (
        "nemotron_h",
        NEMOTRON_H | {"layers_block_type": ["full_attention", "mlp"]},
        "and some another mixer, and here",
    ),
    ("minimax", MINIMAX | {"mlp_alpha_factor": 2}, "mlp_alpha_factor is as full_attn_alpha_factor there, and conf"),
    ("mamba", STATES | {"intermediate_size": 80}, "its Mamba has 64 channels, and here it has 80"),
    ("kimi_linear", KIMI | {"linear_num_heads": 2}, "linear_num_heads is as num_attention_heads there, and conf"),
    ("falcon_h1", FALCON_H1 | {"mamba_norm_before_gate": True}, "its norm comes behind the gate, and config.json"),
    ("olmo_hybrid", FEW | HYBRID_OLMO, "olmo_hybrid is not written as GGUF: llama.cpp has no code that computes it"),
    ("gptj", NARROW | {"rotary_dim": 4}, "gptj is not written as GGUF: llama.cpp has its name, and no code that"),
    ("falcon", {"alibi": True, "multi_query": False}, "falcon: it computes alibi False, and config.json has True"),
    ("gpt2", NARROW | {"scale_attn_by_inverse_layer_idx": True}, "computes scale_attn_by_inverse_layer_idx False"),
    ("mpt", {"attn_config": {"softmax_scale": 0.5}}, "it computes attn_config.softmax_scale None, and config"),
]
"""Model type, changes of its config.json, and a part of the message that refuses it for llama.cpp."""


@pytest.mark.parametrize(("model_type", "changes", "says"), every(6, REFUSED))
def test_what_llama_cpp_computes_otherwise_is_refused(model_type, changes, says, tmp_path):
    folder = save(tmp_path / "model", model_type, **changes)
    with pytest.raises(UserError, match=says):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32", proof=False)


@pytest.mark.parametrize(("name", "dense", "shared"), [("qwen3_moe", 32, None), ("ernie4_5_moe", 64, 64)])
def test_experts_are_filled_up_to_whole_blocks_of_a_type(name, dense, shared, tmp_path):
    """24 columns of every expert become 32, 2 x 24 of shared ones 64, and what is added is zero."""
    model = open_model(str(save(tmp_path / "model", FAMILIES[name][0], **FAMILIES[name][1])))
    stored, filled = lay_out(model, "f32"), lay_out(model, "q4_0")
    widths = [("exps", 24, 32, 0), ("shexp", 48, shared, 1)]
    for kind, width, wide, axes in widths[: 1 if shared is None else 2]:
        for module, axis in (("gate", 1), ("up", 1), ("down", 2)):
            tensor = f"blk.2.ffn_{module}_{kind}.weight"
            before, after = (layout.tensors[tensor].read().movedim(axis - axes, 0) for layout in (stored, filled))
            assert (len(before), len(after)) == (width, wide)
            assert torch.equal(after[:width], before)
            assert not after[width:].any()
    assert filled.values["expert_feed_forward_length"] == 32
    assert filled.values["feed_forward_length"] == dense
    assert filled.values.get("expert_shared_feed_forward_length") == shared


def test_names_of_the_base_model_are_those_of_a_gpt2(tmp_path):
    """As it is published, with the masks that transformers no longer saves. Its matrices are (inputs, outputs)."""
    folder = save(tmp_path / "model", "gpt2", **FAMILIES["gpt2"][1])
    dense = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in dense.items()}
    masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 128, 128) for block in range(2)}
    save_file(bare | masks, folder / "model.safetensors", metadata={"format": "pt"})
    data = ["--text", proving(folder).text[0], "--samples", 4, "--window", 32, "--evaluate-samples", 0]
    code, output = run("quantize", folder, "--format", "gguf", "--type", "q8_0", *data, "-o", tmp_path / "q.gguf")
    assert code == 0, output
    assert re.search(r"matrices are rounded by what reaches them .*: (9|\d+ by error feedback, \d+) by ", output), (
        output
    )
    stored = open_gguf(tmp_path / "q.gguf").read("blk.1.attn_qkv.weight")
    torch.testing.assert_close(stored, dense["transformer.h.1.attn.c_attn.weight"].T, rtol=0.02, atol=0.01)


def test_blocks_that_llama_cpp_reads_otherwise_are_refused(tmp_path):
    folder = save(tmp_path / "olmoe", "olmoe", **MIXTURE)
    with pytest.raises(UserError, match="its heads are together as wide as the model, and here some are not"):
        lay_out(open_model(str(folder)))
    folder = save(tmp_path / "qwen3", "qwen3_moe", **MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": [1]})
    with pytest.raises(UserError, match="it computes mlp_only_layers"):
        lay_out(open_model(str(folder)))


def test_of_a_model_that_also_sees_the_part_that_generates_text_is_written(tmp_path):
    """What PyTorch computes is the whole model's."""
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = sees | {"image_size": 8, "patch_size": 4}
    changes = {"text_config": SIZES | WINDOWED, "vision_config": vision, "mm_tokens_per_image": 1}
    folder = save(tmp_path / "model", "gemma3", **changes, tie_word_embeddings=True)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Gemma3ForConditionalGeneration"]
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.architecture == "gemma3"
    assert exported.passed, exported.proof
    assert exported.notes[0].startswith("the file holds the part that generates text; for images")
    # Of several texts with the same beginning the later ones need what its windows have left behind.
    several = ProofOptions(text=proving(folder).text, samples=8, window=48)
    assert validate_gguf(exported.path, str(folder), several).passed


STATED, TURNED = [1, 1, 2, 0], [2, 1, 1, 0]
GLM_MOE = ROUTED | {"n_shared_experts": 1, "routed_scaling_factor": 1.5, "num_hidden_layers": 2}
SEEING = [
    ("qwen3_vl_moe", "qwen3vlmoe", "qwen3_moe", TURNED, MIXTURE | {"num_hidden_layers": 3}),
    ("qwen3_vl", "qwen3vl", "qwen3", TURNED, {}),
    ("glm4v_moe", "glm4moe", "glm4_moe", STATED, GLM_MOE),
    ("glm4v", "glm4", "glm4", STATED, FEW),
    ("qwen2_5_vl", "qwen2vl", "qwen2", STATED, {}),
]
"""Model, architecture of its file, what `convert` makes of that, rotary pairs for time, height and width, and sizes."""


@pytest.mark.parametrize(("model_type", "architecture", "alone", "pairs", "sizes"), every(3, SEEING))
def test_parts_of_models_whose_positions_are_of_images_too_keep_them(
    model_type, architecture, alone, pairs, sizes, tmp_path
):
    """In files of Qwen3-VL pairs are counted so that llama.cpp rotates them all, in others as config.json says.

    Some parts have no class that predicts tokens: the head is the whole's.
    """
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = SIZES | {"rope_parameters": rope, "head_dim": 8} | sizes
    if "glm" in model_type:  # rotates half of each head
        rope["partial_rotary_factor"] = 0.5
        text |= {"hidden_size": 64, "head_dim": 16}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
    vision |= {"deepstack_visual_indexes": [0, 1]} if "qwen3" in model_type else {"image_size": 8}
    parts = {"text_config": text, "vision_config": vision | {"out_hidden_size": text["hidden_size"]}}
    folder = save(tmp_path / "model", model_type, AutoModelForImageTextToText, **parts, tie_word_embeddings=False)
    if model_type == "qwen3_vl_moe":  # as it is published
        stored = load_file(folder / "model.safetensors")
        turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in stored.items()}
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.architecture == architecture
    assert exported.proof.kl < 1e-6
    values = open_gguf(tmp_path / "m.gguf").values
    assert values[f"{architecture}.rope.dimension_sections"] == pairs
    assert values.get(f"{architecture}.n_deepstack_layers", 0) == len(vision.get("deepstack_visual_indexes", ()))
    made = ckpt_prune.convert(tmp_path / "m.gguf", output=tmp_path / "back", text=proving(folder).text, window=48)
    assert (made.passed, made.model_type) == (True, alone)
    if model_type == "qwen3_vl_moe":
        data = ["--text", proving(folder).text[0], "--samples", 4, "--window", 32, "--evaluate-samples", 0]
        sizes = ["--part", "text", "--recipe", "reap", "--ratio", 0.4, "--set", "export.format=gguf"]
        sizes += ["--set", "export.dtype=q4_0", "--set", "export.rounding=gptq"]
        code, output = run("prune", folder, *sizes, *data, "-o", tmp_path / "out")
        assert code == 0, output
        assert "matrices are rounded by what reaches them behind the rounded blocks" in output
        down = load_file(tmp_path / "out" / "model.safetensors")["model.language_model.layers.1.mlp.experts.down_proj"]
        assert down.shape == (3, 24, 32)


SEES = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8}
SEES |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16) | {"patch_size": 4}
DRAWS = {"codebook_size": 16, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1], "hidden_size": 32}
DRAWS |= {"num_res_blocks": 1, "attn_resolutions": []}
TOWERS = {
    "llama4": ("llama4", {"text_config": SIZES | LLAMA_4, "vision_config": SEES}),
    "minimax_m3_vl": ("minimax-m3", {"text_config": SIZES | MINIMAX_3, "vision_config": SEES}),
    "emu3": (
        "llama",
        {
            "text_config": SIZES | FEW | {"pad_token_id": 2},
            "vq_config": DRAWS,
            "vocabulary_map": {"<image>": 5},
        },
    ),
}


@pytest.mark.parametrize("model_type", TOWERS)
def test_text_parts_of_classes_of_their_own_compute_what_the_whole_does(model_type, tmp_path):
    """Of a Llama 4 the part is run: transformers 5.24 cannot put together what the whole returns."""
    architecture, parts = TOWERS[model_type]
    folder = save(tmp_path / "model", model_type, AutoModelForImageTextToText, **parts, tie_word_embeddings=False)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.architecture == architecture
    assert exported.proof.kl < 1e-5


def test_all_architectures_are_run():
    assert {each.model_type for each in ARCHITECTURES if not each.encodes and not each.stacked} == {
        *(model_type for model_type, _ in FAMILIES.values()),
        *("emu3_text_model", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text"),
    }
