"""Tiny random models of stock classes, most of which no family describes, many with blocks of several kinds."""

from typing import Any

import torch
import transformers

HIDDEN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 64, "max_position_embeddings": 64}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DENSE: dict[str, Any] = {**HIDDEN, **HEADS, "intermediate_size": 40, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {**DENSE, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_experts": 4}
MAMBA: dict[str, Any] = {**DENSE, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
LINEAR: dict[str, Any] = {
    **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GATED = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, **LINEAR, "layer_types": GATED, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**DENSE, **LINEAR, "layer_types": GATED},
    "nemotron_h": {
        **{**DENSE, "num_hidden_layers": None, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "ssm_state_size": 8,
    },
    "gpt_oss": {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": SLIDING, "sliding_window": 4},
    "lfm2": {**DENSE, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "jamba": {**DENSE, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8},
    "minimax": {**DENSE, "num_local_experts": 4, "layer_types": GATED, "block_size": 16},
    "gemma3_text": {**DENSE, "layer_types": SLIDING, "sliding_window": 4},
    "cohere2": {**DENSE, "layer_types": SLIDING, "sliding_window": 4},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_layer_start_index": 1},
    "mamba": {**HIDDEN, "state_size": 8},
    "granitemoehybrid": {**MAMBA, "num_local_experts": 4, "layer_types": ["mamba", "attention"] * 2},
    "gemma3n_text": {
        **{**DENSE, "layer_types": SLIDING, "sliding_window": 4, "num_kv_shared_layers": 0, "laurel_rank": 8},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "intermediate_size": [40] * 4},
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **{**DENSE, "layer_types": SLIDING, "sliding_window": 4, "num_kv_shared_layers": 2, "global_head_dim": 16},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "use_double_wide_mlp": True},
    },
    "deepseek_v3": {
        **{**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"q_lora_rank": 16, "kv_lora_rank": 16},
    },
    "kimi_linear": {
        **{**EXPERTS, "num_local_experts": 4, "n_group": 1, "num_key_value_heads": 4, "kv_lora_rank": 16},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 2},
        **{"layer_types": GATED, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    },
}
"""Type of a causal model → keys of its config."""


def make_model(model_type: str, **more: Any) -> Any:
    """Return a random causal language model of a class, in float32; `more` are further keys of its config."""
    keys = {key: value for key, value in (CONFIGS.get(model_type, {}) | more).items() if value is not None}
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, initializer_range=0.2, **keys)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def blocks_of(model: Any) -> Any:
    """Return the list of a model's blocks."""
    return model.base_model.layers
