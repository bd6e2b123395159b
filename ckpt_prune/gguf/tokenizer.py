"""The tokenizer of a checkpoint as GGUF keeps it: tokens, types, scores or merges, and what is added to a text.

llama.cpp has its own tokenizers. One that it does not have is refused, by name: a file must not read text differently.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.text import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""
_ADDED_SCORE = -1000.0
_CONFIGS = ("config.json", "generation_config.json")
_SPACE = "▁"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    ("digits", _GPT2): "smollm",
    (r"\p{N}", _GPT2): "smollm",
    (_LLAMA3,): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""),): "qwen2",
    (_GPT4O,): "gpt-4o",
    (_TEKKEN,): "tekken",
}
"""Expressions that split a text, in their order → the name under which llama.cpp has them."""
_IGNORING_MERGES = ("llama-bpe", "tekken")
"""Pre-tokenizers with which llama.cpp looks up a whole word before it merges. dbrx is llama-bpe without that."""


def tokenizer_values(folder: Path, rows: int) -> dict[str, Any]:
    """Keys of GGUF that hold the tokenizer of a checkpoint folder.

    Args:
        folder: of the checkpoint.
        rows: of the embedding. Added tokens beyond them are left out, and rows without a token are named [PADn].

    Raises:
        UserError: llama.cpp has no such tokenizer; what it lacks is named.
    """
    tokenizer: Any = load_tokenizer(folder)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UserError(f"{folder}: llama.cpp has no tokenizer like {type(tokenizer).__name__}")
    values = _content(json.loads(tokenizer.backend_tokenizer.to_str()), rows, folder)
    config, generation = (read_json_object(file) if file.is_file() else {} for file in map(folder.joinpath, _CONFIGS))
    ids = {
        "bos": _first(tokenizer.bos_token_id, config.get("bos_token_id")),
        "eos": _first(tokenizer.eos_token_id, config.get("eos_token_id")),
        "unknown": tokenizer.unk_token_id,
        "padding": _first(tokenizer.pad_token_id, config.get("pad_token_id")),
    }
    ends = generation.get("eos_token_id")
    ids["eot"] = next((end for end in ends if end != ids["eos"]), None) if isinstance(ends, list) else None
    for key, index in ids.items():
        if index is not None and 0 <= index < rows:
            values[f"tokenizer.ggml.{key}_token_id"] = int(index)
        elif index is not None and key in ("bos", "eos"):
            raise UserError(f"{folder}: {key}_token_id is {index}, and the embedding has {rows} rows")
    plain, framed = (list(tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (False, True))
    start, end = (
        framed[:1] == [tokenizer.bos_token_id] != plain[:1],
        framed[-1:] == [tokenizer.eos_token_id] != plain[-1:],
    )
    if framed[start : len(framed) - end] != plain:
        raise UserError(f"{folder}: llama.cpp puts no tokens around a text other than the first and last of a sequence")
    values |= {"tokenizer.ggml.add_bos_token": start, "tokenizer.ggml.add_eos_token": end}
    template = tokenizer.chat_template
    if isinstance(template, dict) and "default" not in template:
        raise UserError(f"{folder}: none of the chat templates is named default: {', '.join(template)}")
    for name, text in (template if isinstance(template, dict) else {"default": template} if template else {}).items():
        values["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    return values


def _first(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int)), None)


def _content(tokenizer: Mapping[str, Any], rows: int, where: Path) -> dict[str, Any]:
    """Keys that hold the content of a tokenizer.json."""
    model, added = tokenizer["model"], {each["id"]: each for each in tokenizer["added_tokens"] if each["id"] < rows}
    if model["type"] != "BPE":
        raise UserError(f"{where}: llama.cpp has no {model['type']} tokenizer for models that generate text")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"{where}: llama.cpp has no tokenizer with {key} ({model[key]!r})")
    vocabulary = {index: token for token, index in model["vocab"].items()}
    if max(vocabulary) >= rows:
        raise UserError(f"{where}: the tokenizer has {max(vocabulary) + 1} tokens, and the embedding {rows} rows")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    has_pieces = model.get("byte_fallback")
    types = {index: _piece_type(token, model) if has_pieces else NORMAL for index, token in vocabulary.items()}
    for index, each in added.items():
        special = each["special"] or _looks_special(each["content"])
        types[index] = CONTROL if special else USER_DEFINED
    tokens = [
        added[index]["content"] if index in added else vocabulary.get(index, f"[PAD{index}]") for index in range(rows)
    ]
    if has_pieces:
        tokens = [
            token.replace(_SPACE, " ") if types.get(i) == USER_DEFINED else token for i, token in enumerate(tokens)
        ]
        own_text = {vocabulary[index] for index, kind in types.items() if kind == NORMAL}
        scores = _scores(sorted(own_text, key=model["vocab"].__getitem__), merges)
        content = {
            "model": "llama",
            "pre": "default",
            "add_space_prefix": _puts_space_first(tokenizer, where),
            "scores": [_score(types.get(i), scores.get(token, 0.0)) for i, token in enumerate(tokens)],
        }
    else:
        content = {
            "model": "gpt2",
            "pre": _pre_tokenizer(tokenizer, where),
            "add_space_prefix": False,
            "merges": merges,
        }
    content |= {"tokens": tokens, "token_type": [types.get(index, UNUSED) for index in range(rows)]}
    return {f"tokenizer.ggml.{key}": value for key, value in content.items()}


def _steps(step: Mapping[str, Any] | None, many: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [inner for each in step[many] for inner in _steps(each, many)] if step["type"] == "Sequence" else [step]


def _pre_tokenizer(tokenizer: Mapping[str, Any], where: Path) -> str:
    """The name of the expressions that split a text into words."""
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] != "NFC":  # llama.cpp leaves it out of all tokenizers, as of those of Qwen
            raise UserError(f"{where}: llama.cpp has no normalizer {step['type']} for this kind of tokenizer")
    expressions: list[str] = []
    bytes_last = False
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        bytes_last = step["type"] == "ByteLevel"
        if bytes_last:
            if step.get("add_prefix_space"):
                raise UserError(f"{where}: llama.cpp puts no space before a text (ByteLevel with add_prefix_space)")
            expressions += [_GPT2] if step.get("use_regex", True) else []
        elif step["type"] == "Digits" and step.get("individual_digits"):
            expressions.append("digits")
        elif step["type"] == "Split" and step["behavior"] in ("Isolated", "Removed"):
            expressions.append(step["pattern"].get("Regex") or step["pattern"]["String"])
        else:
            raise UserError(f"{where}: llama.cpp has no pre-tokenizer {step['type']}")
    name = PRE_TOKENIZERS.get(tuple(expressions))
    if name is None or not bytes_last:
        raise UserError(f"{where}: llama.cpp's pre-tokenizer for these expressions is not known: {expressions}")
    return "dbrx" if name == "llama-bpe" and not tokenizer["model"].get("ignore_merges") else name


def _puts_space_first(tokenizer: Mapping[str, Any], where: Path) -> bool:
    """Whether a tokenizer of pieces puts a space before a text."""
    prefix = False
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif step["type"] != "Replace" or step["pattern"].get("String") != " " or step["content"] != _SPACE:
            raise UserError(f"{where}: llama.cpp has no normalizer {step['type']} for this kind of tokenizer")
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("replacement") == _SPACE:
            prefix = step.get("prepend_scheme", "always") in ("first", "always")
        elif step["type"] != "Split" or step["pattern"].get("String") != " ":
            raise UserError(f"{where}: llama.cpp has no pre-tokenizer {step['type']} for this kind of tokenizer")
    return prefix


def _piece_type(token: str, model: Mapping[str, Any]) -> int:
    if token == model.get("unk_token"):
        return UNKNOWN
    return BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else NORMAL


def _score(kind: int | None, own: float) -> float:
    return own if kind in (NORMAL, UNKNOWN, BYTE) else _ADDED_SCORE


def _scores(pieces: list[str], merges: Iterable[str]) -> dict[str, float]:
    """Scores with which llama.cpp merges in the order of `merges`: minus the place of each piece.

    SentencePiece numbers pieces in the order in which it made them, and scores them by that. Where the pieces stand in
    the order of their merges, those are the scores; else pieces that no merge makes come last.
    """
    first: dict[str, int] = {}
    for merge in merges:
        first.setdefault("".join(_cut(merge)), len(first))
    places = [first[piece] for piece in pieces if piece in first]
    if places != sorted(places):
        pieces = sorted(pieces, key=lambda piece: first.get(piece, len(first)))
    return {piece: -float(place) for place, piece in enumerate(pieces)}


def _cut(merge: str) -> tuple[str, str]:
    middle = merge.find(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def _looks_special(token: str) -> bool:
    """Whether llama.cpp's own converter takes a token for a control token, whatever tokenizer.json says."""
    named = token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or token.startswith("<unused")
    return named or any(
        token.startswith(start) and token.endswith(start[::-1].replace("<", ">")) for start in ("<|", "<｜")
    )


# ---- back to transformers --------------------------------------------------------------------------------------------


def tokenizer_of(values: Mapping[str, Any], where: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file holds.

    Args:
        values: keys of the file.

    Raises:
        UserError: the keys contradict each other, or the pre-tokenizer is not known.
    """
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}

    def read_list(key: str, kind: type) -> list[Any]:
        entries = given.get(key)
        if not isinstance(entries, list) or not all(isinstance(each, kind) for each in entries):
            raise UserError(f"{where}: tokenizer.ggml.{key} is no list of {kind.__name__}; download it again")
        return entries

    model, pre = given.get("model"), given.get("pre")
    tokens, types = read_list("tokens", str), read_list("token_type", int)
    if model not in ("gpt2", "llama"):
        raise UserError(f"{where}: a tokenizer {str(model)[:40]!r} is not converted (gpt2 and llama are)")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"{where}: {len(tokens)} tokens are there twice or without a type; download it again")
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    special = {key: given.get(f"{key}_token_id") for key in ("bos", "eos", "unknown", "padding")}
    if wrong := [each for each in special.values() if each is not None and not 0 <= each < len(tokens)]:
        raise UserError(f"{where}: a special token has the id {wrong[0]}, of {len(tokens)} tokens; download it again")
    names = {key: None if index is None else tokens[index] for key, index in special.items()}
    if model == "gpt2":
        merges = [_cut(merge) for merge in read_list("merges", str)]
        if wrong := [merge for merge in merges if not {*merge, "".join(merge)} <= vocabulary.keys()]:
            raise UserError(f"{where}: the merge {wrong[0]} is of what are no tokens; download it again")
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _IGNORING_MERGES))
        tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
        tokenizer.pre_tokenizer = _splitting(pre, where)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        scores = read_list("scores", float)
        if len(scores) != len(tokens):
            raise UserError(f"{where}: {len(tokens)} tokens have {len(scores)} scores; download it again")
        merges, unknown = _merges(vocabulary, types, scores, where), names["unknown"]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = given.get("add_space_prefix", True)
        start, strip = ([normalizers.Prepend(_SPACE)], [decoders.Strip(" ", 1, 0)]) if prefix else ([], [])
        tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", _SPACE)])
        back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*back, *strip])
    for token, index in vocabulary.items():
        if types[index] in (CONTROL, USER_DEFINED, UNKNOWN):
            added = AddedToken(token, normalized=False, special=types[index] != USER_DEFINED)
            (tokenizer.add_tokens if types[index] == USER_DEFINED else tokenizer.add_special_tokens)([added])
    flags = ("bos", given.get("add_bos_token", model == "llama")), ("eos", given.get("add_eos_token", False))
    if around := {key: names[key] for key, wanted in flags if wanted and names[key] is not None}:
        single = [*([around["bos"]] if "bos" in around else []), "$A", *([around["eos"]] if "eos" in around else [])]
        ids = [(name, vocabulary[name]) for name in around.values() if name is not None]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    template = values.get("tokenizer.chat_template")
    short = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    named = {f"{short[key]}_token": name for key, name in names.items() if name is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)


def _splitting(pre: Any, where: Path) -> pre_tokenizers.PreTokenizer:
    expressions = next(
        (steps for steps, name in PRE_TOKENIZERS.items() if name == {"dbrx": "llama-bpe"}.get(pre, pre)), None
    )
    if expressions is None:
        raise UserError(f"{where}: the pre-tokenizer {str(pre)[:40]!r} is not converted")
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [digits if step == "digits" else pre_tokenizers.Split(Regex(step), "isolated") for step in expressions]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


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
