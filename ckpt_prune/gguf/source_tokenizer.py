"""The tokenizer that a GGUF file holds, as transformers' own: it splits text as llama.cpp does with the file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.encoders import is_encoder
from ckpt_prune.gguf.keys import TOKENIZER_WITHOUT_EFFECT, Keys
from ckpt_prune.gguf.pieces import SPACE, unmark_pieces
from ckpt_prune.gguf.special_tokens import (
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    OTHER_ENDS,
    PHI,
    PHI_KEEPS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    find_stops,
)
from ckpt_prune.gguf.tokenizer import PRE_TOKENIZERS, cut_merge
from ckpt_prune.gguf.unigram import read_unigram

_WHOLE_WORDS = frozenset(
    (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        "tekken",
    )
)
"""Pre-tokenizers with which llama.cpp looks up a whole word before it merges, and puts a first token before a text."""
_LIKE = {
    **dict.fromkeys(_WHOLE_WORDS - {"tekken"} | {"dbrx", "smaug-bpe"}, "llama-bpe"),
    **dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais"), "gpt-2"),
    **dict.fromkeys(("trillion", "granite-docling"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "smollm"),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "kormo", "megrez"), "qwen2"),
    **dict.fromkeys(("llama4", "kanana2"), "gpt-4o"),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), "bloom"),
}
"""Pre-tokenizer → the one with the same expressions, under whose name they are known here."""
_IDS = {
    "gpt2": {"bos": 11, "eos": 11},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "gemma4": {},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
"""Model of a tokenizer → the tokens that llama.cpp takes where a file names none."""
_WHOLE = ENDS | {
    *("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|prefix|>", "<|suffix|>", "<|middle|>"),
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
}
"""Tokens that llama.cpp cuts out of a text by their text, whatever type a file gives them."""
_CUT = (CONTROL, USER_DEFINED, UNKNOWN)
"""Types of tokens that are cut out of a text before it is split."""
_TEMPLATE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class StoredTokenizer:
    """The tokenizer of a file, and what else the file says of tokens.

    Attributes:
        count: of its tokens.
        ids: of config.json: first, last and padding token.
        generation: content of generation_config.json.
    """

    tokenizer: PreTrainedTokenizerFast
    count: int
    ids: Mapping[str, int | None]
    generation: Mapping[str, Any]


def tokenizer_of(values: Mapping[str, Any], where: Path) -> StoredTokenizer:
    """Read the tokenizer from a file's keys.

    Raises:
        UserError: the keys contradict each other, the pre-tokenizer is not known, or a key may change what is read.
    """
    keys = Keys(values, where, "tokenizer")
    model, pre = keys.take("ggml.model"), keys.take("ggml.pre")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(keys.entries("ggml.tokens", str))]
    types = _types(keys, tokens)
    encodes = is_encoder(values)
    if model not in _IDS or (model == "bert" and not encodes):
        raise UserError(f"{where}: a tokenizer {str(model)[:40]!r} is not converted (gpt2, llama and gemma4 are)")
    if model == "bert":
        tokens = unmark_pieces(tokens, types)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    named_ids = ("bos", "eos", "unknown", "padding", *(("cls", "seperator", "mask") if encodes else ()))
    ids = {key: _id(keys, key, tokens, _IDS[model].get(key)) for key in named_ids}
    if model == "bert":  # llama.cpp puts these two around every text
        ids |= {"cls": ids["bos"], "eos": ids["seperator"]}
    names = {key: None if index is None else tokens[index] for key, index in ids.items()}
    if wrong := [name for name in names.values() if name is not None and name not in vocabulary]:
        raise UserError(f"{where}: the special token {wrong[0][:40]!r} is one that the file marks as unused")
    if model == "gpt2":
        tokenizer = _of_words(keys, vocabulary, pre)
    elif model == "t5":
        tokenizer = read_unigram(keys, tokens, ids["unknown"])
    elif model == "gemma4":
        tokenizer = _of_listed_pieces(keys, vocabulary, names["unknown"])
    elif model == "bert":
        tokenizer = _of_word_pieces(keys, vocabulary, names["unknown"])
    else:
        tokenizer = _of_pieces(keys, vocabulary, types, names["unknown"])
    never_split = {token for token, index in vocabulary.items() if types[index] in _CUT}
    strips = isinstance(name := values.get("general.name"), str) and PHI.search(name) is not None
    for token in sorted(never_split, key=vocabulary.__getitem__):
        rstrip, is_text = strips and token not in PHI_KEEPS, types[vocabulary[token]] == USER_DEFINED
        added = AddedToken(token, normalized=False, special=not is_text, rstrip=rstrip)
        (tokenizer.add_tokens if is_text else tokenizer.add_special_tokens)([added])
    flags = {
        "bos": keys.flag("ggml.add_bos_token", model == "llama" or pre in _WHOLE_WORDS) or model in ("bert", "gemma4"),
        "eos": keys.flag("ggml.add_eos_token", False) or model == "bert",
    }
    if around := {key: names[key] for key, wanted in flags.items() if wanted and names[key] is not None}:
        single = [*([around["bos"]] if "bos" in around else []), "$A", *([around["eos"]] if "eos" in around else [])]
        framed = [(name, vocabulary[name]) for name in around.values() if name is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=framed)
    short = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    if encodes:
        short |= {"cls": "cls", "seperator": "sep", "mask": "mask"}
        short = {key: name for key, name in short.items() if model != "bert" or key not in ("bos", "eos")}
    # transformers cuts every token that has a name out of a text, which llama.cpp does not do with ordinary ones.
    named = {f"{short[key]}_token": names[key] for key in short if names[key] in never_split}
    generation = {} if encodes else _generation(keys, values, tokens, ids)
    templates = _templates(keys)
    keys.check_others(TOKENIZER_WITHOUT_EFFECT, {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=templates or None, **named)
    told = {"bos": "bos", "eos": "eos", "padding": "pad"}
    return StoredTokenizer(fast, len(tokens), {told[key]: ids[key] for key in told}, generation)


def _types(keys: Keys, tokens: list[str]) -> list[int]:
    """Types of the tokens. llama.cpp takes some for control tokens by their text."""
    types = keys.entries("ggml.token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"{keys.where}: {len(tokens)} tokens are there twice or without a type; download it again")
    if unknown := {*types} - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise UserError(f"{keys.where}: tokens have a type {min(unknown)}, which llama.cpp does not know")
    return [
        CONTROL if token in _WHOLE and kind not in _CUT else kind for token, kind in zip(tokens, types, strict=True)
    ]


def _id(keys: Keys, name: str, tokens: list[str], absent: int | None) -> int | None:
    """The id of a special token; None if there is none."""
    key = f"ggml.{name}_token_id"
    index = keys.take(key)
    if index is None:
        return absent if absent is not None and absent < len(tokens) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tokens):
        raise keys.refuse(key, f"and there are {len(tokens)} tokens; download it again")
    return index


def _generation(
    keys: Keys, values: Mapping[str, Any], tokens: list[str], ids: Mapping[str, int | None]
) -> dict[str, Any]:
    """generation_config.json: all ends of a text stand only there, first those that the file names."""
    named = [ids["eos"], *(_id(keys, key, tokens, None) for key in OTHER_ENDS)]
    stops = find_stops(values)
    ends = [*dict.fromkeys(index for index in (*named, *sorted(stops)) if index in stops)]
    suppressed = keys.entries("ggml.suppress_tokens", int, [])
    settings = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": ids["padding"],
        "suppress_tokens": [index for index in suppressed if 0 <= index < len(tokens)],
    }
    return {key: value for key, value in settings.items() if key != "suppress_tokens" or value}


def _templates(keys: Keys) -> dict[str, str]:
    """Chat templates by name. The one without a name is the default."""
    stored = {"default": keys.take("chat_template"), **keys.others("chat_template.")}
    templates = {name: text for name, text in stored.items() if text is not None}
    for name, text in templates.items():
        if _TEMPLATE.fullmatch(name) is None or not isinstance(text, str):
            raise UserError(
                f"{keys.where}: a chat template has the name {name[:70]!r}, or is no text; download it again"
            )
    return templates


def _of_words(keys: Keys, vocabulary: Mapping[str, int], pre: Any) -> Tokenizer:
    """A tokenizer that merges the bytes of words by a list."""
    merges = _listed_merges(keys, vocabulary)
    keys.take("ggml.scores"), keys.take("ggml.add_space_prefix")  # of the other model of tokenizers
    name = _LIKE.get(pre, pre) if isinstance(pre, str) else pre
    expressions = next((steps for steps, names in PRE_TOKENIZERS.items() if names == name), None)
    if expressions is None:
        raise UserError(f"{keys.where}: the pre-tokenizer {str(pre)[:40]!r} is not converted")
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), merges, ignore_merges=pre in _WHOLE_WORDS))
    tokenizer.normalizer = normalizers.NFC() if pre in ("qwen2", "qwen35") else None
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [digits if step == "digits" else pre_tokenizers.Split(Regex(step), "isolated") for step in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_word_pieces(keys: Keys, vocabulary: Mapping[str, int], unknown: str | None) -> Tokenizer:
    """A tokenizer that looks up the longest pieces of words."""
    tokenizer = Tokenizer(models.WordPiece(dict(vocabulary), unk_token=str(unknown)))
    lowercase, strips = (keys.flag(f"ggml.normalizer.{each}", True) for each in ("lowercase", "strip_accents"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _listed_merges(keys: Keys, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = [cut_merge(merge) for merge in keys.entries("ggml.merges", str)]
    if wrong := [merge for merge in merges if not {*merge, "".join(merge)} <= vocabulary.keys()]:
        raise UserError(f"{keys.where}: the merge {str(wrong[0])[:60]} is not of tokens; download it again")
    return merges


def _of_listed_pieces(keys: Keys, vocabulary: Mapping[str, int], unknown: str | None) -> Tokenizer:
    """A tokenizer that merges pieces by a list, lines and the ends between them each by itself."""
    merges = _listed_merges(keys, vocabulary)
    keys.take("ggml.scores"), keys.take("ggml.add_space_prefix")  # of the other model of pieces
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _of_pieces(keys: Keys, vocabulary: Mapping[str, int], types: list[int], unknown: str | None) -> Tokenizer:
    """A tokenizer that merges pieces by their scores."""
    scores = keys.entries("ggml.scores", float, [0.0] * len(types))
    if len(scores) != len(types):
        raise UserError(f"{keys.where}: {len(types)} tokens have {len(scores)} scores; download it again")
    keys.take("ggml.merges")  # of the other model of tokenizers
    merges = _merges(vocabulary, types, scores, keys.where)
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = keys.flag("ggml.add_space_prefix", True)
    start, strip = ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *strip])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], types: list[int], scores: list[float], where: Path) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the pieces of the highest score first.

    Only of pieces of text: other tokens are cut out of a text before it is merged.
    """
    pieces = {token: index for token, index in vocabulary.items() if types[index] == NORMAL}
    pairs = []
    made: dict[float, str] = {}
    for token, index in pieces.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in pieces and right in pieces:
                pairs.append((-scores[index], pieces[left], pieces[right], left, right))
                if made.setdefault(scores[index], token) != token:
                    raise UserError(
                        f"{where}: {made[scores[index]][:40]!r} and {token[:40]!r} have the same score; llama.cpp then "
                        "merges from the left, which tokenizers of transformers do not: convert the model's checkpoint"
                    )
            for one, other in ((left, right), (right, left)):
                if len(one) == 1 and one not in vocabulary and (other in pieces or len(other) == 1):
                    raise UserError(
                        f"{where}: {token[:40]!r} has a character that is no token; llama.cpp makes it all the same, "
                        "which tokenizers of transformers do not: convert the model's checkpoint"
                    )
    return [(left, right) for *_, left, right in sorted(pairs)]
