"""Text as calibration and evaluation data: files to one token stream, the stream to windows of equal length."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import NoneLeftError, UserError
from ckpt_prune.common.text_encoding import check_unicode, decode_text, has_row_suffix, parse_json_rows
from ckpt_prune.datasets.texts import parse_text_name
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.samples.text_pieces import split_text

Bos = Literal["auto", "always", "never"]
Choose = Literal["random", "first"]

_MOST_GROWTH = 100
"""Published normalizers replace a space by one character, or a quote by two."""
SEPARATOR = "\n\n"
"""What stands between two documents; the published WikiText-2 test protocol joins with the same."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder, from local files only and never running code from the folder.

    Raises:
        UserError: The folder has no tokenizer, or transformers cannot load it.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise UserError(
            f"{folder}: no tokenizer (tokenizer.json, tokenizer.model or tokenizer_config.json); "
            "copy the model's tokenizer files into the folder"
        )
    try:
        with _foreign(f"{folder}: the tokenizer does not load"):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            growth = _growth(tokenizer)
    except UserError:
        for name in ("tokenizer_config.json", "tokenizer.json"):  # whose fault it is, if it is no JSON
            if (folder / name).is_file():
                read_json_object(folder / name)
        raise
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if growth > _MOST_GROWTH:
        raise UserError(
            f"{folder}: the tokenizer's normalizer may make any text {growth} times as long; it is not used"
        )
    return tokenizer


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """Turn whatever a tokenizer raises, from KeyError to a panic of its library, which is no Exception, into a line."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{what}: {reason[:300]}") from error


def _growth(tokenizer: Any) -> int:
    """How many times as long a tokenizer's normalizer may make a text: a character for each is the least."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return 1 if normalizer is None else _growth_of(json.loads(normalizer.__getstate__()))


def _growth_of(step: dict[str, Any]) -> int:
    inner = math.prod(_growth_of(each) for each in step.get("normalizers") or [])
    return inner * max(1, len(step.get("content") or ""), len(step.get("prepend") or ""))


def read_text(files: Sequence[Path]) -> str:
    r"""Read UTF-8 text files as one string, in the order given, joined by a blank line.

    A file of rows (`text_encoding.ROWS`) counts as the `text` fields of its lines, joined by a blank line too; an array
    may also hold strings. A byte order mark says how a file is encoded, and is no text. A name that papers use is its
    text as their code joins it (`text_names`).

    Raises:
        UserError: No file was given, or one is missing, empty, a table, no text, or has a bad row.
    """
    if not files:
        raise UserError("no text file given: name at least one UTF-8 .txt or .jsonl file")
    return SEPARATOR.join(_read_file(file) for file in files)


def _read_file(file: Path) -> str:
    if (named := parse_text_name(file)) is not None:
        return named.read()
    check_texts([file])
    if file.suffix.lower() in (".csv", ".tsv"):
        raise UserError(f'{file}: a table, and no text; write its texts as .jsonl, one {{"text": "…"}} a line')
    try:
        text = decode_text(file, file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    if has_row_suffix(file):
        text = SEPARATOR.join(_row_text(*row) for row in parse_json_rows(file, text))
    if not text.strip():
        raise UserError(f"{file}: the file holds no text")
    return text


def _row_text(where: str, row: Any) -> str:
    in_array = ", row " in where
    text = row.get("text") if isinstance(row, dict) else row if in_array else None
    if not isinstance(text, str):
        form = 'each row must be a string or {"text": "…"}' if in_array else 'each line must be {"text": "…"}'
        raise UserError(f'{where}: no string under "text"; {form}')
    check_unicode(where, text)
    return text


def tokenise_text(tokenizer: PreTrainedTokenizerBase, text: str, bos: Bos = "auto") -> Tensor:
    """Tokenise a text once, as one stream.

    Special tokens written out in the text are read as such; none is added but the one beginning-of-sequence token
    that `bos` asks for, and never an end-of-sequence token. A stream that already begins with it gets no second one.

    Args:
        tokenizer: The model's tokenizer.
        text: The whole text.
        bos: "auto" puts one before the whole stream if the tokenizer itself adds one, "always" in any case,
            "never" not.

    Returns:
        int64 token ids, shape (tokens,).

    Raises:
        UserError: "always" with a tokenizer that has no beginning-of-sequence token.
    """
    if bos == "always" and tokenizer.bos_token_id is None:
        raise UserError("this tokenizer has no beginning-of-sequence token; use bos=auto or bos=never")
    found = [
        torch.tensor(_encode(tokenizer, part), dtype=torch.int64)
        for part in split_text(getattr(tokenizer, "backend_tokenizer", None), text)
    ]
    wanted = bos == "always" or (bos == "auto" and _adds_bos(tokenizer))
    if wanted and found[0][:1].tolist() != [tokenizer.bos_token_id]:
        found.insert(0, torch.tensor([tokenizer.bos_token_id]))
    return torch.cat(found)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    check_unicode("the text", text)
    # verbose=False: the stream is meant to be longer than the model's context, so no warning about its length
    with _foreign(f"{tokenizer.name_or_path}: the tokenizer fails"):
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Ask the tokenizer by using it: its `add_bos_token` flag and what its post-processor does may disagree."""
    return tokenizer.bos_token_id is not None and _encode(tokenizer, "a", special=True)[:1] == [tokenizer.bos_token_id]


def choose_windows(
    stream: Tensor, *, samples: int, window: int, seed: int, choose: Choose = "random", frame: int = 0, skip: int = 0
) -> Tensor:
    """Choose `samples` non-overlapping windows of the stream without replacement, kept in stream order.

    Args:
        stream: int64, shape (tokens,).
        samples: Windows to choose; all, where there are fewer.
        window: Tokens in a window, the frame included.
        seed: Of a random choice; the same seed, stream and window choose the same windows on every machine.
        choose: "random" spreads them over the whole stream, "first" takes those at its start.
        frame: Tokens of a window that `framed` will add.
        skip: Pass over the windows that so many samples would be, and choose others.

    Returns:
        int64 token ids, shape (at most samples, window - frame).

    Raises:
        UserError: The text is too short for one window.
        NoneLeftError: All windows are passed over.
    """
    if samples < 1:
        raise UserError(f"samples must be at least 1, not {samples}")
    windows = _all_windows(stream, window, frame)
    if skip >= len(windows):
        raise NoneLeftError(f"the text has {len(windows)} windows, and {skip} of them are taken; give more text")
    own = slice(skip, skip + samples)
    if choose == "first":
        return windows[own]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(windows), generator=generator)[own]
    return windows[chosen.sort().values]


def cut_windows(stream: Tensor, *, window: int, limit: int | None = None, frame: int = 0) -> Tensor:
    """Cut the stream into non-overlapping windows from its start, the tail dropped.

    Args:
        stream: int64, shape (tokens,).
        window: Tokens in a window, the frame included.
        limit: Keep the first so many windows; None keeps all. More than there are is no error.
        frame: Tokens of a window that `framed` will add.

    Returns:
        int64 token ids, shape (windows, window - frame).

    Raises:
        UserError: The text is too short for one window.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of windows must be at least 1, not {limit}")
    return _all_windows(stream, window, frame)[:limit]


def _all_windows(stream: Tensor, whole: int, frame: int) -> Tensor:
    window = whole - frame
    if window < 2:  # the first token of a window is never predicted: one of one token says nothing
        raise UserError(f"window must be at least 2 tokens, not {window}")
    count = len(stream) // window
    if count == 0:
        shorter = f"say --window {len(stream) + frame}, or " if len(stream) > 1 else ""
        raise UserError(
            f"the text is too short for one window: it has {len(stream)} tokens, a window takes {window}; "
            f"{shorter}give more text"
        )
    return stream[: count * window].view(count, window)


def add_frame(windows: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Windows as an encoder was trained on them: between the tokenizer's opening and closing tokens, if it adds any.

    Args:
        windows: int64 token ids, shape (windows, window).
        tokenizer: The model's tokenizer.

    Returns:
        int64 token ids, shape (windows, window + `frame_length`).
    """
    before, after = _frame(tokenizer)
    rows = len(windows)
    ends = [torch.tensor(ids, dtype=torch.int64).expand(rows, len(ids)) for ids in (before, after)]
    return torch.cat([ends[0], windows, ends[1]], 1)


def count_frame_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that `framed` adds to a window."""
    return sum(map(len, _frame(tokenizer)))


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text, found by using it."""
    plain, special = _encode(tokenizer, "a"), _encode(tokenizer, "a", special=True)
    starts = [i for i in range(len(special)) if special[i : i + len(plain)] == plain]
    if not plain or not starts:
        return [], []
    return special[: starts[0]], special[starts[0] + len(plain) :]


def check_vocabulary(ids: Tensor, config: PreTrainedConfig) -> None:
    """Refuse token ids, int64 of any shape, that a model has no row of its embedding for.

    Args:
        ids: the ids.
        config: the model's.

    Raises:
        UserError: one is outside its vocabulary.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and ids.numel() and (largest := int(ids.max())) >= size:
        raise UserError(
            f"token id {largest} is outside the model's vocabulary of {size}; the tokenizer belongs to another model"
        )


def fingerprint_windows(windows: Tensor) -> str:
    """Hash the shape and the token ids (little-endian int64) of windows, shape (windows, window): sha256 in hex."""
    ids = windows.detach().to("cpu", torch.int64).contiguous().numpy().astype("<i8", copy=False)
    digest = hashlib.sha256(json.dumps(list(windows.shape)).encode())
    digest.update(ids.tobytes())
    return digest.hexdigest()
