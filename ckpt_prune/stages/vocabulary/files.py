"""The files beside the weights that speak of tokens by number, and what they become with fewer tokens."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.stages.vocabulary.pieces import Pieces, map_processor, rebuild
from ckpt_prune.stages.vocabulary.sentencepiece_file import filter_model

TOKENIZER = "tokenizer.json"
_TOKEN_KEYS = re.compile(
    r"(?:.*_)?tokens?_(?:ids?|index|indices)|(?:begin_)?suppress_tokens|(?:bad|force)_words_ids|forced_decoder_ids"
    r"|(?:bos|eos|pad|unk|mask|sep|cls)_(?:index|id)|lang_to_id|task_to_id"
)
"""Keys of config files whose numbers are tokens."""
_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "sentencepiece.model")
_OTHER_FORMATS = (".tiktoken", ".spm", ".model", ".vocab", ".bpe")
_OTHER_NAMES = ("tekken.json",)
_OWN = {TOKENIZER, "vocab.json", "added_tokens.json"}


def read_pieces(folder: Path, files: Mapping[str, Path]) -> Pieces:
    """Read the tokenizer.json among the side files of a folder. UserError if there is none, or it is not known."""
    if TOKENIZER not in files:
        raise UserError(
            f'{folder} has no {TOKENIZER}, which a smaller vocabulary is made from; write one: python -c "from '
            f"transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return Pieces.of(read_json_object(files[TOKENIZER]), files[TOKENIZER])


def is_token_key(key: str) -> bool:
    """Return whether the numbers under a key of a config are tokens."""
    return _TOKEN_KEYS.fullmatch(key) is not None


def map_tokens(values: Any, change: Callable[[int], int], *, named: bool = False) -> Any:
    """Return a config with every token that it names changed: whole numbers under keys of `_TOKEN_KEYS`, at any depth.

    Args:
        change: takes the number of a token, and returns its new one.
        named: the values stand under such a key.
    """
    if isinstance(values, Mapping):
        changed = {}
        for key, value in values.items():
            if key == "forced_decoder_ids" and isinstance(value, list):  # pairs of a position and a token
                changed[key] = [[place, map_tokens(token, change, named=True)] for place, token in value]
            else:
                is_named = named or is_token_key(str(key))
                changed[key] = map_tokens(value, change, named=is_named)
        return changed
    if isinstance(values, list):
        return [map_tokens(value, change, named=named) for value in values]
    is_token = named and isinstance(values, int) and not isinstance(values, bool) and values >= 0
    return change(values) if is_token else values


def renumber(values: Any, numbers: Mapping[int, int]) -> Any:
    """Return a config with the new numbers of the tokens that it names."""
    return map_tokens(values, lambda token: numbers.get(token, token))


def read_configs(files: Mapping[str, Path]) -> dict[str, Any]:
    """Read the JSON objects among side files that may name tokens, by name."""
    names = [name for name in files if name.endswith(".json") and name not in {*_OWN, *_OTHER_NAMES}]
    return {name: values for name in names if isinstance(values := _json(files[name]), dict)}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None


def named_tokens(
    pieces: Pieces, configs: Iterable[Mapping[str, Any]], files: Mapping[str, Path], rows: int
) -> set[int]:
    """Return the rows of the embedding that configs and the post-processor name.

    By number, or by the text of a token: each special token and each further one that tokenizer_config.json names.
    """
    named: set[int] = set()

    def note(token: int) -> int:
        named.add(token)
        return token

    map_processor(pieces.content.get("post_processor"), note)
    for config in configs:
        map_tokens(config, note)
    for values in read_configs(files).values():
        map_tokens(values, note)
        named |= {pieces.added[each] for each in walk_texts(values) if each in pieces.added}
    return {index for index in named if index < rows}


def walk_texts(values: Any) -> Iterator[str]:
    """Yield all texts of a config that may name a token, but those of the list of added tokens itself."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key != "added_tokens_decoder":
                yield from walk_texts(value)
    elif isinstance(values, list):
        for value in values:
            yield from walk_texts(value)
    elif isinstance(values, str):
        yield values


def rewrite_files(pieces: Pieces, numbers: Mapping[int, int], files: Mapping[str, Path]) -> dict[str, bytes | None]:
    """Return the side files that fewer tokens change: name → new content, or None of a file that is left out.

    Left out are vocabularies in forms that are not written here. transformers reads tokenizer.json first.

    Args:
        numbers: old id of every token that stays → its new one.
    """
    content = rebuild(pieces, numbers)
    kept = {token for token, index in pieces.ids.items() if index in numbers}
    writers: dict[str, Callable[[Path], bytes]] = {
        TOKENIZER: lambda _: _text(content),
        "vocab.json": lambda path: _text(_renumber_names(_json(path), pieces, numbers)),
        "added_tokens.json": lambda path: _text(_renumber_names(_json(path), pieces, numbers)),
        "vocab.txt": lambda path: _filter_lines(path, kept),
        "merges.txt": lambda path: _merges(path, content["model"].get("merges") or ()),
        **dict.fromkeys(_MODELS, lambda path: filter_model(path, kept)),
    }
    rewritten: dict[str, bytes | None] = {}
    for name, path in files.items():
        if name in writers:
            rewritten[name] = writers[name](path)
        elif name in _OTHER_NAMES or (name.endswith(_OTHER_FORMATS) and "/" not in name):
            rewritten[name] = None
        elif name.rpartition("/")[2] == TOKENIZER:
            raise UserError(f"{path}: a second tokenizer, which a smaller vocabulary would not reach")
    for name, values in read_configs(files).items():
        changed = renumber(values, numbers)
        if isinstance(values.get("added_tokens_decoder"), dict):
            added = {int(index): each for index, each in values["added_tokens_decoder"].items()}
            stay = [index for index in sorted(added) if index in numbers]
            changed["added_tokens_decoder"] = {str(numbers[index]): added[index] for index in stay}
        if changed != values:
            rewritten[name] = _text(changed)
    return rewritten


def _text(values: Any) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=2) + "\n").encode()


def _renumber_names(values: Any, pieces: Pieces, numbers: Mapping[int, int]) -> dict[str, int]:
    named = {token: numbers[index] for token, index in values.items() if index in numbers and token in pieces.ids}
    return dict(sorted(named.items(), key=lambda item: item[1]))


def _filter_lines(path: Path, kept: set[str]) -> bytes:
    lines = path.read_text(encoding="utf-8").split("\n")
    return "".join(f"{line}\n" for line in lines if line.rstrip("\r") in kept).encode()


def _merges(path: Path, merges: Any) -> bytes:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    header = f"{first}\n" if first.startswith("#version") else ""
    lines = (merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    return (header + "".join(f"{line}\n" for line in lines)).encode()
