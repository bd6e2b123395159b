"""The tokenizer of a checkpoint as GGUF keeps it: tokens, types, scores or merges, and what is added to a text.

llama.cpp has its own tokenizers. One that it does not have is refused, by name: a file must not read text differently.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.text import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""
_ADDED_SCORE = -1000.0
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
_WITHOUT_IGNORED_MERGES = {"llama-bpe": "dbrx"}
_IGNORING_MERGES = ("llama-bpe", "tekken")


def tokenizer_values(folder: Path, rows: int) -> dict[str, Any]:
    """Keys of GGUF that hold the tokenizer of a checkpoint folder.

    Args:
        folder: of the checkpoint.
        rows: of the embedding. Tokens beyond them are left out, and rows without a token are named [PADn].

    Raises:
        UserError: llama.cpp has no such tokenizer; what it lacks is named.
    """
    tokenizer = load_tokenizer(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{folder}: llama.cpp has no tokenizer like {type(tokenizer).__name__}")
    values = values_of(json.loads(backend.to_str()), rows, str(folder))
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
        "padding_token_id": tokenizer.pad_token_id,
    }
    config = _read_json(folder / "config.json")
    for name in ("bos", "eos", "pad"):
        key = f"{'padding' if name == 'pad' else name}_token_id"
        if ids[key] is None and isinstance(config.get(f"{name}_token_id"), int):
            ids[key] = config[f"{name}_token_id"]
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    others = [end for end in ends if end != ids["eos_token_id"]] if isinstance(ends, list) else []
    if others:
        ids["eot_token_id"] = others[0]
    for key, value in ids.items():
        inside = value is not None and 0 <= value < rows
        if value is not None and not inside and key in ("bos_token_id", "eos_token_id"):
            raise UserError(f"{folder}: {key} is {value}, and the embedding has {rows} rows")
        if inside:
            values[f"tokenizer.ggml.{key}"] = int(value)
    start, end = _frame(tokenizer, folder)
    values |= {"tokenizer.ggml.add_bos_token": start, "tokenizer.ggml.add_eos_token": end}
    values |= _templates(tokenizer.chat_template, folder)
    return values


def values_of(tokenizer: Mapping[str, Any], rows: int, where: str) -> dict[str, Any]:
    """Keys that hold the content of a tokenizer.json."""
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        raise UserError(f"{where}: llama.cpp has no {model.get('type')} tokenizer for models that generate text")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise UserError(f"{where}: llama.cpp has no tokenizer with {key} ({model[key]!r})")
    vocabulary = {index: token for token, index in model["vocab"].items()}
    if vocabulary and max(vocabulary) >= rows:
        raise UserError(f"{where}: the tokenizer has {max(vocabulary) + 1} tokens, and the embedding {rows} rows")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    added = {each["id"]: each for each in tokenizer.get("added_tokens") or [] if each["id"] < rows}
    if model.get("byte_fallback"):
        space = _prefix_of_pieces(tokenizer, where)
        scores = _scores(model["vocab"], merges)
        unknown = model.get("unk_token")
        types = {index: _piece_type(token, unknown) for index, token in vocabulary.items()}
    else:
        pre = _pre_tokenizer(tokenizer, where)
        types = dict.fromkeys(vocabulary, NORMAL)
    for index, each in added.items():
        special = each.get("special") or _looks_special(each["content"])
        types[index] = CONTROL if special and types.get(index) != UNKNOWN else types.get(index, NORMAL)
        if not special:
            types[index] = USER_DEFINED
    tokens = []
    for index in range(rows):
        token = added[index]["content"] if index in added else vocabulary.get(index, f"[PAD{index}]")
        tokens.append(token.replace(_SPACE, " ") if types.get(index) == USER_DEFINED else token)
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    values["tokenizer.ggml.token_type"] = [types.get(index, UNUSED) for index in range(rows)]
    if model.get("byte_fallback"):
        values |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        values["tokenizer.ggml.add_space_prefix"] = space
        given = [scores.get(vocabulary.get(index, ""), 0.0) for index in range(rows)]
        values["tokenizer.ggml.scores"] = [
            _ADDED_SCORE if index in added or index not in types else score for index, score in enumerate(given)
        ]
    else:
        values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
        values["tokenizer.ggml.add_space_prefix"] = False
    return values


def _steps(step: Mapping[str, Any] | None, many: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [inner for each in step[many] for inner in _steps(each, many)] if step["type"] == "Sequence" else [step]


def _pre_tokenizer(tokenizer: Mapping[str, Any], where: str) -> str:
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
    ignoring = bool(tokenizer["model"].get("ignore_merges"))
    if name in _IGNORING_MERGES and not ignoring:
        name = _WITHOUT_IGNORED_MERGES.get(name, name)
    return name


def _prefix_of_pieces(tokenizer: Mapping[str, Any], where: str) -> bool:
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


def _piece_type(token: str, unknown: str | None) -> int:
    if token == unknown:
        return UNKNOWN
    return BYTE if len(token) == 6 and token.startswith("<0x") and token.endswith(">") else NORMAL


def _scores(vocabulary: Iterable[str], merges: Iterable[str]) -> dict[str, float]:
    """Scores that merge pieces in the order of `merges`: a piece has that of the first merge that makes it."""
    scores: dict[str, float] = {}
    for merge in merges:
        left, right = merge.split(" ") if merge.count(" ") == 1 else _cut(merge)
        scores.setdefault(left + right, -float(len(scores)))
    for token in vocabulary:
        if token not in scores and _piece_type(token, None) == NORMAL:
            scores[token] = -float(len(scores))
    return scores


def _cut(merge: str) -> tuple[str, str]:
    middle = merge.index(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def _looks_special(token: str) -> bool:
    """Whether llama.cpp's own converter takes a token for a control token, whatever tokenizer.json says."""
    named = token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or token.startswith("<unused")
    return (
        named
        or (token.startswith("<|") and token.endswith("|>"))
        or (token.startswith("<｜") and token.endswith("｜>"))
    )


def _frame(tokenizer: Any, folder: Path) -> tuple[bool, bool]:
    """Whether a text gets a token before it, and one behind it."""
    text = "a"
    plain, framed = (list(tokenizer(text, add_special_tokens=each)["input_ids"]) for each in (False, True))
    for start in (False, True):
        for end in (False, True):
            if framed == [tokenizer.bos_token_id] * start + plain + [tokenizer.eos_token_id] * end:
                return start, end
    raise UserError(f"{folder}: llama.cpp puts no tokens around a text other than the first and the last of a sequence")


def _templates(template: Any, folder: Path) -> dict[str, Any]:
    """The chat template; of several the one named default, and the others by their names."""
    if not template:
        return {}
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = template if isinstance(template, dict) else {each["name"]: each["template"] for each in template}
    if "default" not in named:
        raise UserError(f"{folder}: none of the chat templates is named default: {', '.join(named)}")
    others = {name: text for name, text in named.items() if name != "default"}
    values: dict[str, Any] = {"tokenizer.chat_template": named["default"]}
    values |= {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
    return values | ({"tokenizer.chat_templates": sorted(others)} if others else {})


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# ---- back to files of transformers -----------------------------------------------------------------------------------


def tokenizer_files(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and generation_config.json by the keys of a GGUF file.

    Raises:
        UserError: the keys contradict each other, or the pre-tokenizer is not known.
    """

    def listed(key: str, kind: type) -> list[Any]:
        found = values.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
            raise UserError(f"{where}: tokenizer.ggml.{key} is no list of {kind.__name__}; download it again")
        return found

    model = values.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UserError(f"{where}: a tokenizer {str(model)[:40]!r} is not converted (gpt2 and llama are)")
    tokens, types = listed("tokens", str), listed("token_type", int)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(
            f"{where}: the tokenizer has {len(tokens)} tokens, some twice or without a type; download it again"
        )
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    added = [
        {"id": index, "content": token, "special": types[index] == CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token, index in vocabulary.items()
        if types[index] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    unknown = next((token for token, index in vocabulary.items() if types[index] == UNKNOWN), None)
    bpe = {"type": "BPE", "vocab": vocabulary, "unk_token": unknown, "fuse_unk": model == "llama"}
    if model == "gpt2":
        pre = values.get("tokenizer.ggml.pre")
        expressions = next((steps for steps, name in PRE_TOKENIZERS.items() if name == pre), None)
        if expressions is None:
            raise UserError(f"{where}: the pre-tokenizer {str(pre)[:40]!r} is not converted")
        merges = listed("merges", str)
        wrong = next((merge for merge in merges if not set(_cut(merge)) <= vocabulary.keys()), None)
        if wrong is not None:
            raise UserError(f"{where}: the merge {wrong[:40]!r} joins what are no tokens; download it again")
        splits = [
            {"type": "Digits", "individual_digits": True}
            if step == "digits"
            else {"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False}
            for step in expressions
        ]
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        bpe |= {
            "merges": [list(_cut(merge)) for merge in merges],
            "ignore_merges": pre in _IGNORING_MERGES,
            "unk_token": None,
        }
        steps: dict[str, Any] = {
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_]},
            "decoder": bytes_ | {"use_regex": True},
        }
    else:
        prefix = values.get("tokenizer.ggml.add_space_prefix", True)
        bpe |= {"merges": _merges(vocabulary, listed("scores", float)), "byte_fallback": True}
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        start = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        back = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}]
        steps = {
            "normalizer": {"type": "Sequence", "normalizers": [*start, replaced]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": [*back, {"type": "Fuse"}, *strip]},
        }
    ids: dict[str, Any] = {
        key: values.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "unknown", "padding", "eot")
    }
    wrong_id = next((each for each in ids.values() if each is not None and not 0 <= each < len(tokens)), None)
    if wrong_id is not None:
        raise UserError(f"{where}: a special token has the id {wrong_id}, of {len(tokens)} tokens; download it again")
    frame = [
        values.get("tokenizer.ggml.add_bos_token", model == "llama"),
        values.get("tokenizer.ggml.add_eos_token", False),
    ]
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **steps}
    content |= {"post_processor": _post_processor(tokens, ids, frame), "model": bpe}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        settings[f"{name}_token"] = None if ids[key] is None else tokens[ids[key]]
    if isinstance(template := values.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    ends = [each for each in (ids["eos"], ids["eot"]) if each is not None]
    generation = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends if len(ends) > 1 else ids["eos"],
        "pad_token_id": ids["padding"],
    }
    return {"tokenizer.json": content, "tokenizer_config.json": settings, "generation_config.json": generation}


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[list[str]]:
    """Every way to make a piece of two others, the pieces of the highest score first."""
    pairs = []
    for token, index in vocabulary.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    return [[left, right] for *_, left, right in sorted(pairs)]


def _post_processor(tokens: list[str], ids: Mapping[str, int | None], frame: list[bool]) -> dict[str, Any] | None:
    around = {
        key: ids[key] for key, wanted in zip(("bos", "eos"), frame, strict=True) if wanted and ids[key] is not None
    }
    if not around:
        return None
    parts = {key: {"SpecialToken": {"id": tokens[index or 0], "type_id": 0}} for key, index in around.items()}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [part for part in (parts.get("bos"), text, parts.get("eos")) if part is not None]
    other = {"Sequence": {"id": "B", "type_id": 1}}
    special = {tokens[i or 0]: {"id": tokens[i or 0], "ids": [i], "tokens": [tokens[i or 0]]} for i in around.values()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, other], "special_tokens": special}
