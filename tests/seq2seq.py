"""Tiny random encoder-decoders with their tokenizers, and pairs of a source and its target."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ckpt_prune.model.skeleton import quiet_transformers
from tests.encoders import randomise

WORDS = [f"w{number}" for number in range(90)]
TOKENS: dict[str, Any] = {
    "vocab_size": 99,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
STACKS: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
LED = STACKS | {"attention_window": 8}  # texts are padded to windows, of 512 tokens by default
TYPES = ("bart", "marian", "m2m_100", "t5", "mt5")
_SPECIAL = {key: TOKENS[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
_GEMMA: dict[str, Any] = {
    **_SPECIAL,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
ENCODER = _GEMMA | {"num_hidden_layers": 2, "intermediate_size": 48}
DECODER = _GEMMA | {"num_hidden_layers": 3, "intermediate_size": 56, "layer_types": ["sliding_attention"] * 3}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
}
NESTED: dict[str, dict[str, Any]] = {
    "t5gemma": {"encoder": ENCODER, "decoder": DECODER, "vocab_size": 99},
    "t5gemma2": {
        "encoder": {
            "text_config": ENCODER,
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 8, **VISION},
            "mm_tokens_per_image": 4,
            "eoi_token_index": 97,
            "boi_token_index": 96,
        },
        "decoder": DECODER,
        "image_token_index": 98,
    },
}
"""Configs of the stacks in that of the whole."""


WHISPER: dict[str, Any] = {
    **{key: value for key, value in STACKS.items() if key != "max_position_embeddings"},
    "num_mel_bins": 5,
    "max_source_positions": 7,
    "max_target_positions": 16,
    "begin_suppress_tokens": None,
}


def write_model(folder: Path, model_type: str, **others: Any) -> PreTrainedModel:
    """Save an encoder-decoder with a tokenizer of one token a word, and return it; `others`: keys of its config."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    sizes = {"whisper": WHISPER, "led": LED, **NESTED}.get(model_type, T5 if "t5" in model_type else STACKS)
    named = {} if model_type in NESTED else TOKENS
    config = AutoConfig.for_model(model_type, **(named | sizes | others))
    auto = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    model: PreTrainedModel = auto.from_config(config).eval()
    randomise(model, 7)
    for name, weight in model.named_parameters():
        if "Attention.q" in name:  # T5 does not divide by the root of the heads' width
            weight.data *= 0.2
    with quiet_transformers():
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        stored: PreTrainedModel = auto.from_pretrained(folder)  # Marian's positions are not stored
    return stored.eval()


def write_sounds(folder: Path, count: int = 24) -> Path:
    """Write features of sounds with what is said; return the file of rows."""
    draw = random.Random(2)
    features = np.random.default_rng(2).standard_normal((count, 5, 14), dtype=np.float32)
    rows = []
    for number, values in enumerate(features):
        np.save(folder / f"{number}.npy", values)
        rows.append({"audio": f"{number}.npy", "text": " ".join(draw.choices(WORDS, k=draw.randint(3, 9)))})
    file = folder / "sounds.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_pairs(file: Path, count: int = 40) -> Path:
    """Write pairs of 3 to 12 words, no two texts of one length at all places; return the file."""
    draw = random.Random(1)
    rows = [
        {key: " ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for key in ("source", "target")}
        for _ in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
