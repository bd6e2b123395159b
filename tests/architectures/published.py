"""What published checkpoints say in their config.json, and how many parameters the Hub counts in their files."""

from typing import Any

Published = tuple[dict[str, Any], int]


def _of(model_type: str, architecture: str, parameters: int, **own: Any) -> Published:
    values = {"model_type": model_type, "architectures": [architecture], "torch_dtype": "bfloat16"}
    return values | own, parameters


def _sizes(vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PUBLISHED: dict[str, Published] = {
    "google/gemma-2b": _of(
        "gemma",
        "GemmaForCausalLM",
        2_506_172_416,
        **_sizes(256000, 2048, 16384, 18, 8, 1),
        head_dim=256,
        hidden_act="gelu",
        rope_theta=10000.0,
    ),
    "google/gemma-2-2b": _of(
        "gemma2",
        "Gemma2ForCausalLM",
        2_614_341_888,
        **_sizes(256000, 2304, 9216, 26, 8, 4),
        head_dim=256,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
        cache_implementation="hybrid",
    ),
    "google/gemma-3-1b-pt": _of(
        "gemma3_text",
        "Gemma3ForCausalLM",
        999_885_952,
        **_sizes(262144, 1152, 6912, 26, 4, 1),
        head_dim=256,
        query_pre_attn_scalar=256,
        rope_local_base_freq=10000,
        rope_theta=1000000,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "stabilityai/stablelm-2-1_6b": _of(
        "stablelm",
        "StableLmForCausalLM",
        1_644_515_328,
        **_sizes(100352, 2048, 5632, 24, 32, 32),
        partial_rotary_factor=0.25,
        rope_theta=10000,
        tie_word_embeddings=False,
        use_qkv_bias=True,
    ),
    "bigcode/starcoder2-3b": _of(
        "starcoder2",
        "Starcoder2ForCausalLM",
        3_030_371_328,
        **_sizes(49152, 3072, 12288, 30, 24, 2),
        mlp_type="default",
        norm_type="layer_norm",
        rope_theta=999999.4420358813,
        sliding_window=4096,
        use_bias=True,
    ),
    "allenai/OLMo-2-0425-1B": _of(
        "olmo2",
        "Olmo2ForCausalLM",
        1_484_916_736,
        **_sizes(100352, 2048, 8192, 16, 16, 16),
        rope_theta=500000,
        tie_word_embeddings=False,
    ),
    "ibm-granite/granite-3.0-2b-base": _of(
        "granite",
        "GraniteForCausalLM",
        2_533_531_648,
        **_sizes(49155, 2048, 8192, 40, 32, 8),
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        tie_word_embeddings=True,
    ),
    "HuggingFaceTB/SmolLM3-3B": _of(
        "smollm3",
        "SmolLM3ForCausalLM",
        3_075_098_624,
        **_sizes(128256, 2048, 11008, 36, 16, 4),
        no_rope_layer_interval=4,
        use_sliding_window=False,
        rope_theta=5000000.0,
    ),
    "CohereLabs/c4ai-command-r-v01": _of(
        "cohere",
        "CohereForCausalLM",
        34_980_831_232,
        **_sizes(256000, 8192, 22528, 40, 64, 64),
        logit_scale=0.0625,
        use_qk_norm=False,
        rope_theta=8000000.0,
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": _of(
        "cohere2",
        "Cohere2ForCausalLM",
        8_028_033_024,
        **_sizes(256000, 4096, 14336, 32, 32, 8),
        logit_scale=0.25,
        sliding_window=4096,
        sliding_window_pattern=4,
        rope_theta=50000,
    ),
    "baidu/ERNIE-4.5-0.3B-PT": _of(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        360_748_032,
        **_sizes(103424, 1024, 3072, 18, 16, 2),
        head_dim=128,
        use_bias=False,
        rope_theta=500000,
        tie_word_embeddings=True,
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": _of(
        "exaone4",
        "Exaone4ForCausalLM",
        1_279_391_488,
        **_sizes(102400, 2048, 4096, 30, 32, 8),
        head_dim=64,
        sliding_window=None,
        sliding_window_pattern=None,
        layer_types=["full_attention"] * 30,
        tie_word_embeddings=True,
    ),
    "nvidia/Minitron-4B-Base": _of(
        "nemotron",
        "NemotronForCausalLM",
        4_190_509_056,
        **_sizes(256000, 3072, 9216, 32, 24, 8),
        head_dim=128,
        hidden_act="relu2",
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
    ),
}
"""Hub id → config.json as published, as far as it says what is computed, and how many parameters its page counts."""
