"""Tokenizers of every kind, trained on a page of English, a line of Russian and a little code, and tiny models."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import ckpt_prune
from ckpt_prune.stages.vocabulary.pieces import byte_letters

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 4
BYTES = [f"<0x{value:02X}>" for value in range(256)]


@cache
def page() -> str:
    """Text: a licence in English, Russian sentences, and a module of code."""
    root = Path(ckpt_prune.__file__).parent
    code = (root.parent / "tests" / "oracles" / "bpe.py").read_text(encoding="utf-8")
    return (root.parent / "LICENSE").read_text(encoding="utf-8")[:8000] + RUSSIAN + code[:4000] + RUSSIAN


def byte_level(size: int = 500) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [page()],
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=[*byte_letters()], show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_fallback(size: int = 600) -> Tokenizer:
    """SentencePiece's BPE as transformers writes it: every way to join two pieces is a merge."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(
        [page()], trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    )
    content = json.loads(trained.to_str())
    vocabulary = content["model"]["vocab"]
    order = {token: at for at, token in enumerate(left + right for left, right in content["model"]["merges"])}
    merges = sorted(
        (order[token], token[:at], token[at:])
        for token in order
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    )
    content["model"] |= {
        "merges": [[left, right] for _, left, right in merges],
        "byte_fallback": True,
        "fuse_unk": True,
    }
    content["pre_tokenizer"] = None
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram(size: int = 500) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        [page()],
        trainers.UnigramTrainer(
            vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, shrinking_factor=0.9
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def wordpiece(size: int = 500) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        [page()], trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


KINDS = {"byte-level BPE": byte_level, "BPE": byte_fallback, "Unigram": unigram, "WordPiece": wordpiece}


def content_of(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())  # type: ignore[no-any-return]


def save_llama(folder: Path, tokenizer: Tokenizer, *, tied: bool = True, extra: int = 0, **options: Any) -> Path:
    """Write a tiny Llama with a tokenizer; the embedding has `extra` rows without a token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + extra,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder
