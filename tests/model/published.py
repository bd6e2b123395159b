"""What published checkpoints say in their config.json, and how many parameters the Hub counts in their files."""

from typing import Any

Published = tuple[dict[str, Any], int]


def _of(model_type: str, architecture: str, parameters: int, **own: Any) -> Published:
    values = {"model_type": model_type, "architectures": [architecture], "torch_dtype": "bfloat16"}
    return values | own, parameters


def _only(model_type: str, parameters: int, **own: Any) -> Published:
    """Whatever it does not say is as in the config class."""
    return {"model_type": model_type, **own}, parameters


def _sizes(vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _masked(model_type: str, architecture: str, parameters: int, **own: Any) -> Published:
    """An encoder; whatever it does not say is as in the config class."""
    return {"model_type": model_type, "architectures": [architecture], **own}, parameters


def _rotary(*sections: int) -> dict[str, Any]:
    """Of text with images in it: how many pairs time, height and width turn."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}}


def _eyes(hidden: int, mlp: int, layers: int, image: int, **own: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": 16}
    return sizes | {"image_size": image, "patch_size": 14} | own


_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}

PUBLISHED: dict[str, Published] = {
    "meta-llama/Llama-2-7b-hf": _of(
        "llama", "LlamaForCausalLM", 6_738_415_616, **_sizes(32000, 4096, 11008, 32, 32, 32)
    ),
    "meta-llama/Llama-3.2-1B": _of(
        "llama",
        "LlamaForCausalLM",
        1_235_814_400,
        **_sizes(128256, 2048, 8192, 16, 32, 8),
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "mistralai/Mistral-7B-v0.1": _of(
        "mistral", "MistralForCausalLM", 7_241_732_096, **_sizes(32000, 4096, 14336, 32, 32, 8)
    ),
    "Qwen/Qwen2.5-0.5B": _of(
        "qwen2", "Qwen2ForCausalLM", 494_032_768, **_sizes(151936, 896, 4864, 24, 14, 2), tie_word_embeddings=True
    ),
    "Qwen/Qwen3-8B": _of(
        "qwen3",
        "Qwen3ForCausalLM",
        8_190_735_360,
        **_sizes(151936, 4096, 12288, 36, 32, 8),
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "ByteDance-Seed/Seed-OSS-36B-Base": _of(
        "seed_oss",
        "SeedOssForCausalLM",
        36_151_104_512,
        **_sizes(155136, 5120, 27648, 64, 80, 8),
        head_dim=128,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    ),
    "facebook/opt-125m": _only("opt", 125_239_296, architectures=["OPTForCausalLM"]),
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
    "allenai/Olmo-3-1025-7B": _of(
        "olmo3",
        "Olmo3ForCausalLM",
        7_298_011_136,
        **_sizes(100278, 4096, 11008, 32, 32, 32),
        sliding_window=4096,
        rope_theta=500000,
        tie_word_embeddings=False,
    ),
    "zai-org/glm-4-9b-hf": _of(
        "glm",
        "GlmForCausalLM",
        9_399_951_360,
        **_sizes(151552, 4096, 13696, 40, 32, 2),
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
    ),
    "zai-org/GLM-4-9B-0414": _of(
        "glm4",
        "Glm4ForCausalLM",
        9_400_279_040,
        **_sizes(151552, 4096, 13696, 40, 32, 2),
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
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
    "gpt2": _only("gpt2", 124_439_808),
    "gpt2-medium": _only("gpt2", 354_823_168, n_embd=1024, n_head=16, n_layer=24),
    "gpt2-xl": _only("gpt2", 1_557_611_200, n_embd=1600, n_head=25, n_layer=48),
    "Phi-3-mini-4k-instruct": _only("phi3", 3_821_079_552, pad_token_id=None),
    "Phi-3-medium-4k-instruct": _only(
        "phi3",
        13_960_238_080,
        hidden_size=5120,
        intermediate_size=17920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        pad_token_id=None,
    ),
    "pythia-70m": _only(
        "gpt_neox",
        70_426_624,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        vocab_size=50304,
        num_attention_heads=8,
    ),
    "pythia-1.4b": _only(
        "gpt_neox",
        1_414_647_808,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        vocab_size=50304,
        num_attention_heads=16,
    ),
    "gpt-neox-20b": _only("gpt_neox", 20_554_567_680, vocab_size=50432),
    "phi-1_5": _only("phi", 1_418_270_720, vocab_size=51200, num_attention_heads=32),
    "phi-2": _only(
        "phi",
        2_779_683_840,
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=32,
        vocab_size=51200,
        num_attention_heads=32,
    ),
    "mistralai/Mixtral-8x7B-v0.1": _of(
        "mixtral",
        "MixtralForCausalLM",
        46_702_792_704,
        **_sizes(32000, 4096, 14336, 32, 32, 8),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "Qwen/Qwen3-30B-A3B": _of(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        30_532_122_624,
        **_sizes(151936, 2048, 6144, 48, 32, 4),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _of(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        14_315_784_192,
        **_sizes(151936, 2048, 5632, 24, 16, 16),
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
    ),
    "ibm-granite/granite-3.0-1b-a400m-base": _of(
        "granitemoe",
        "GraniteMoeForCausalLM",
        1_334_628_352,
        **_sizes(49155, 1024, 512, 24, 16, 8),
        num_local_experts=32,
        num_experts_per_tok=8,
        tie_word_embeddings=True,
    ),
    "allenai/OLMoE-1B-7B-0924": _of(
        "olmoe",
        "OlmoeForCausalLM",
        6_919_161_856,
        **_sizes(50304, 2048, 1024, 16, 16, 16),
        num_experts=64,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "deepseek-ai/DeepSeek-V3": _of(
        "deepseek_v3", "DeepseekV3ForCausalLM", 671_026_419_200, **_sizes(129280, 7168, 18432, 61, 128, 128)
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _of(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        15_706_484_224,
        **_sizes(102400, 2048, 10944, 27, 16, 16),
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        q_lora_rank=None,
        num_experts_per_tok=6,
    ),
    "gpt-j-6b": _only("gptj", 6_050_882_784, tie_word_embeddings=False),
    "bloom-560m": _only("bloom", 559_214_592, n_embed=1024, n_layer=24, n_head=16),
    "bloom-7b1": _only("bloom", 7_069_016_064, n_embed=4096, n_layer=30, n_head=32),
    "falcon-7b": _only("falcon", 6_921_720_704, multi_query=True, parallel_attn=True),
    "falcon-40b": _only(
        "falcon",
        41_303_293_952,
        hidden_size=8192,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_kv_heads=8,
        new_decoder_architecture=True,
    ),
    "falcon-rw-1b": _only(
        "falcon",
        1_311_625_216,
        vocab_size=50304,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=32,
        alibi=True,
        bias=True,
        multi_query=False,
        parallel_attn=False,
    ),
    "mpt-7b": _only("mpt", 6_649_286_656, d_model=4096, n_heads=32, n_layers=32, vocab_size=50432),
    "bert-base-uncased": _masked("bert", "BertForPreTraining", 110_106_428),
    "roberta-base": _masked("roberta", "RobertaForMaskedLM", 124_697_433, vocab_size=50265, **_ROBERTA),
    "xlm-roberta-base": _masked("xlm-roberta", "XLMRobertaForMaskedLM", 278_295_186, vocab_size=250002, **_ROBERTA),
    "camembert-base": _masked("camembert", "CamembertForMaskedLM", 110_655_493, vocab_size=32005, **_ROBERTA),
    "distilbert-base-uncased": _masked("distilbert", "DistilBertForMaskedLM", 66_985_530),
    "distilbert-base-uncased-finetuned-sst-2-english": _masked(
        "distilbert", "DistilBertForSequenceClassification", 66_955_010
    ),
    "electra-small-discriminator": _masked(
        "electra",
        "ElectraForPreTraining",
        13_549_057,
        embedding_size=128,
        hidden_size=256,
        intermediate_size=1024,
        num_attention_heads=4,
    ),
    "ModernBERT-base": _masked("modernbert", "ModernBertForMaskedLM", 149_655_232),
    "deberta-v3-base": _masked(
        "deberta-v2",
        "DebertaV2Model",
        183_831_552,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        max_relative_positions=-1,
        position_biased_input=False,
    ),
    "all-mpnet-base-v2": _masked("mpnet", "MPNetModel", 109_486_464, vocab_size=30527, max_position_embeddings=514),
    "google/vit-base-patch16-224": _masked("vit", "ViTForImageClassification", 86_567_656, num_labels=1000),
    "facebook/deit-base-distilled-patch16-224": _masked(
        "deit", "DeiTForImageClassificationWithTeacher", 87_338_192, num_labels=1000
    ),
    "facebook/dinov2-base": _only("dinov2", 86_580_480, image_size=518, patch_size=14),
    "facebook/dinov2-with-registers-giant": _only(
        "dinov2_with_registers",
        1_136_486_912,
        hidden_size=1536,
        num_hidden_layers=40,
        num_attention_heads=24,
        use_swiglu_ffn=True,
        image_size=518,
        patch_size=14,
    ),
    "facebook/dinov3-vit7b16-pretrain-lvd1689m": _only(
        "dinov3_vit",
        6_716_035_072,
        hidden_size=4096,
        intermediate_size=8192,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_register_tokens=4,
        use_gated_mlp=True,
        query_bias=False,
        value_bias=False,
    ),
    "microsoft/beit-base-patch16-224": _of(
        "beit",
        "BeitForImageClassification",
        86_530_984,
        layer_scale_init_value=0.1,
        use_relative_position_bias=True,
        num_labels=1000,
    ),
    "openai/clip-vit-large-patch14-336, images": _only(
        "clip_vision_model",
        303_507_456,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
    ),
    "stable-diffusion-v1-5, text_encoder": _only(
        "clip_text_model", 123_060_480, hidden_size=768, intermediate_size=3072, num_attention_heads=12
    ),
    "google/siglip-so400m-patch14-384, images": _only(
        "siglip_vision_model",
        428_225_600,
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
    ),
}
"""Model on the Hub → config.json as published, as far as it says what is computed, and parameters by its page."""

COMPOSITES: dict[str, Published] = {
    "openai/whisper-tiny": _only("whisper", 37_760_640),
    "Qwen/Qwen2.5-VL-7B-Instruct": _only(
        "qwen2_5_vl",
        8_292_166_656,
        text_config=_sizes(152064, 3584, 18944, 28, 28, 4) | _rotary(16, 24, 24),
        vision_config={"hidden_size": 1280, "out_hidden_size": 3584},
    ),
    "Qwen/Qwen2-VL-2B-Instruct": _only(
        "qwen2_vl",
        2_208_985_600,
        text_config=_sizes(151936, 1536, 8960, 28, 12, 2) | _rotary(16, 24, 24),
        vision_config={"hidden_size": 1536},
        tie_word_embeddings=True,
    ),
    "google/gemma-3-4b-pt": _only(
        "gemma3",
        4_300_079_472,
        text_config=_sizes(262208, 2560, 10240, 34, 8, 4) | {"head_dim": 256},
        vision_config=_eyes(1152, 4304, 27, 896, vision_use_head=False),
    ),
    "llava-hf/llava-1.5-7b-hf": _only(
        "llava",
        7_063_427_072,
        text_config={"model_type": "llama"} | _sizes(32064, 4096, 11008, 32, 32, 32),
        vision_config={"model_type": "clip_vision_model"} | _eyes(1024, 4096, 24, 336),
        tie_word_embeddings=False,
    ),
    "openai/clip-vit-large-patch14": _only(
        "clip",
        427_616_513,
        text_config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "projection_dim": 768,
        },
        vision_config=_eyes(1024, 4096, 24, 224, projection_dim=768),
        projection_dim=768,
    ),
    "google/siglip-base-patch16-224": _only("siglip", 203_155_970),
}
"""The same of models that are made of several."""
