"""Text as calibration and evaluation data: files to one token stream, the stream to windows of equal length."""

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import CONFIG, Checkpoint
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.checkpoint.side_files import reader_files
from ckpt_prune.common.errors import NoneLeftError, UserError, one_line
from ckpt_prune.common.text_encoding import (
    ENCODINGS,
    REWRITE,
    TEXT_FILE,
    check_unicode,
    decode_text,
    has_row_suffix,
    parse_json_rows,
)
from ckpt_prune.datasets.texts import parse_text_name
from ckpt_prune.measure.samples.conversations import is_conversation, write_conversation
from ckpt_prune.measure.samples.mixing import deal_shares, mix_evenly
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.measure.samples.text_pieces import split_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Bos = Literal["auto", "always", "never"]

_MOST_GROWTH = 100
"""Published normalizers replace a space by one character, or a quote by two."""
SHORTEST_OFFERED = 64
"""Tokens of a window that is offered where the text is too short: figures of shorter ones say little."""
SEPARATOR = "\n\n"
"""Stands between two documents; the published WikiText-2 test protocol joins with it too."""


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a checkpoint folder, from local files only. Code in the folder is never run."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise UserError(
            f"{folder}: no tokenizer (tokenizer.json, tokenizer.model or tokenizer_config.json); "
            "copy the model's tokenizer files into the folder"
        )
    try:
        with _report_as_user_error(f"{folder}: the tokenizer does not load"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            growth = _find_growth(tokenizer)
    except UserError:
        for name in ("tokenizer_config.json", "tokenizer.json"):  # a file that is no JSON is named
            if (folder / name).is_file():
                read_json_object(folder / name)
        raise
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
    if growth > _MOST_GROWTH:
        raise UserError(
            f"{folder}: the tokenizer's normalizer may make any text {growth} times as long; it is not used"
        )
    return tokenizer


def tokenizer_of(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a checkpoint: with an adapter or fewer tokens, the one that its output will have."""
    if checkpoint.adapter is None and not checkpoint.rewritten:
        return load_tokenizer(checkpoint.path)
    with scratch_folder() as folder:
        for name, path in {CONFIG: checkpoint.path / CONFIG, **reader_files(checkpoint)}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name not in checkpoint.rewritten:
                shutil.copyfile(path, folder / name)
            elif (content := checkpoint.rewritten[name]) is not None:
                (folder / name).write_bytes(content)
        tokenizer = load_tokenizer(folder)
    tokenizer.name_or_path = str(checkpoint.adapter or checkpoint.path)
    return tokenizer


@contextmanager
def _report_as_user_error(start: str) -> Iterator[None]:
    """Turn whatever a tokenizer raises into one line; a panic of its library is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{start}: {one_line(error)}") from error


def _find_growth(tokenizer: Any) -> int:
    """Return how many times as long a tokenizer's normalizer may make a text."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    return 1 if normalizer is None else _growth_of_step(json.loads(normalizer.__getstate__()))


def _growth_of_step(step: dict[str, Any]) -> int:
    inner = math.prod(_growth_of_step(each) for each in step.get("normalizers") or [])
    return inner * max(1, len(step.get("content") or ""), len(step.get("prepend") or ""))


def read_text(files: Sequence[Path], tokenizer: "PreTrainedTokenizerBase | None" = None) -> str:
    """Read text files as one string, in the order given, joined by a blank line.

    The texts of a file of rows (`text_encoding.ROW_SUFFIXES`) are joined by a blank line too. Conversations among them
    are written out by the chat template of `tokenizer`, and follow each other directly. A name that papers use is read
    and joined as their code does it (`datasets.texts`).
    """
    if not files:
        raise UserError(f"no text file given: name at least one {TEXT_FILE} in {ENCODINGS}")
    return SEPARATOR.join(read_file(file, tokenizer)[0] for file in files)


def read_file(file: Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> tuple[str, int]:
    """Read one text file as `read_text` does. Return its text, and how many conversations are in it."""
    if (named := parse_text_name(file)) is not None:
        return named.read(), 0
    check_texts([file])
    if file.suffix.lower() in (".csv", ".tsv"):
        raise UserError(f"{file}: a table, and no text; {REWRITE}")
    text = read_content(file)
    conversations = 0
    if has_row_suffix(file):
        pieces: list[str] = []
        after_conversation = False
        for where, row in parse_json_rows(file, text):
            talks = is_conversation(row)
            if pieces and not (talks and after_conversation):
                pieces.append(SEPARATOR)
            pieces.append(write_conversation(where, row, tokenizer) if talks else _read_row(where, row))
            conversations, after_conversation = conversations + talks, talks
        text = "".join(pieces)
    if not text.strip():
        raise UserError(f"{file}: the file holds no text")
    return text, conversations


def read_content(file: Path) -> str:
    """Return what stands in a text file; UserError if it cannot be read."""
    try:
        return decode_text(file, file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error


def read_documents(file: Path, tokenizer: "PreTrainedTokenizerBase | None" = None) -> list[str]:
    """Read the rows of a file of rows or of a named text, each as a document; any other file is one."""
    if (named := parse_text_name(file)) is not None:
        return named.documents()
    if not has_row_suffix(file):
        return [read_file(file, tokenizer)[0]]
    check_texts([file])
    rows = parse_json_rows(file, read_content(file))
    return [write_conversation(w, row, tokenizer) if is_conversation(row) else _read_row(w, row) for w, row in rows]


def _read_row(where: str, row: Any) -> str:
    """Return the text of a line, which is an object, or of a value of an array, which may be a string too."""
    in_array = ", row " in where
    text = row.get("text") if isinstance(row, dict) else row if in_array else None
    if not isinstance(text, str):
        forms = '{"text": "…"} or {"messages": […]}'
        expected = f"row must be a string, {forms}" if in_array else f"line must be {forms}"
        problem = "a string without a key" if isinstance(row, str) else 'no string under "text"'
        raise UserError(f"{where}: {problem}; each {expected}")
    check_unicode(where, text)
    return text


def tokenise_text(tokenizer: "PreTrainedTokenizerBase", text: str, bos: Bos = "auto") -> Tensor:
    """Tokenise a text once, as one stream: int64 token ids, (tokens,).

    Special tokens that are written out in the text are read as such. None is added but the one beginning-of-sequence
    token that `bos` asks for: "auto" puts one before the stream if the tokenizer itself adds one, "always" in any case.
    A stream that already begins with it gets no second one.
    """
    if bos == "always" and tokenizer.bos_token_id is None:
        raise UserError("this tokenizer has no beginning-of-sequence token; use bos=auto or bos=never")
    pieces = [
        torch.tensor(encode_text(tokenizer, piece), dtype=torch.int64)
        for piece in split_text(getattr(tokenizer, "backend_tokenizer", None), text)
    ]
    begins_with_bos = bos == "always" or (bos == "auto" and _adds_bos(tokenizer))
    if begins_with_bos and pieces[0][:1].tolist() != [tokenizer.bos_token_id]:
        pieces.insert(0, torch.tensor([tokenizer.bos_token_id]))
    return torch.cat(pieces)


def encode_text(tokenizer: "PreTrainedTokenizerBase", text: str, *, special: bool = False) -> list[int]:
    """Return the token ids of a text of any length, with the tokenizer's own tokens around it if `special`."""
    check_unicode("the text", text)
    # verbose=False: the stream is meant to be longer than the model's context, so no warning about its length
    with _report_as_user_error(f"{tokenizer.name_or_path}: the tokenizer fails"):
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    # Found by using it: its `add_bos_token` flag and its post-processor may disagree.
    return tokenizer.bos_token_id is not None and encode_text(tokenizer, "a", special=True)[:1] == [
        tokenizer.bos_token_id
    ]


def mix_windows(
    streams: Sequence[Tensor],
    *,
    samples: int,
    window: int,
    seed: int,
    choose: Literal["random", "first"] = "random",
    frame: int = 0,
    skip: int = 0,
) -> tuple[Tensor, list[int]]:
    """Choose non-overlapping windows of streams (tokens,) without replacement, in equal shares, kept in stream order.

    If a stream has fewer windows than its share, the others give more. The streams' windows are mixed evenly, so that
    every fold has all of them.

    Args:
        streams: int64 token ids.
        samples: windows to choose; all if there are fewer.
        window: tokens in a window, the frame included.
        seed: the same seed, streams and window choose the same windows on every machine.
        choose: "random" spreads them over the whole streams, "first" takes those at their start.
        frame: tokens that `add_frame` will add to a window.
        skip: pass over the windows that so many samples would be, and choose others.

    Returns:
        int64 token ids, (at most samples, window - frame), and how many windows are of each stream.
    """
    if samples < 1:
        raise UserError(f"samples must be at least 1, not {samples}")
    windows = [_cut_all_windows(stream, window, frame) for stream in streams]
    counts = [len(own) for own in windows]
    if skip >= sum(counts):
        raise NoneLeftError(f"the text has {sum(counts)} windows, and {skip} of them are taken; give more text")
    chosen: list[Tensor] = []
    for own, share in zip(windows, deal_shares(counts, samples, skip), strict=True):
        rows = torch.tensor(share, dtype=torch.int64)
        if choose == "random":
            rows = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))[rows].sort().values
        chosen.append(own[rows])
    counts = [len(own) for own in chosen]
    return torch.cat(chosen)[mix_evenly(counts)], counts


def draw_windows(
    length: Callable[[int], int], documents: int, *, samples: int, window: int, seed: int, skip: int = 0
) -> list[tuple[int, int]]:
    """Draw windows as the released code of GPTQ, SparseGPT and Wanda does: (document, start) of each, in turn.

    Python's generator draws a document, unless there is one alone, again and again until one is longer than a window,
    and then a place in it: `randint(0, n - window - 1)`. Windows may overlap, and one may be drawn twice.

    Args:
        length: number of a document → its tokens n.
        documents: how many there are.
        skip: leave out so many windows that are drawn before.
    """
    generator = random.Random(seed)
    drawn: list[tuple[int, int]] = []
    lengths: dict[int, int] = {}
    while len(drawn) < skip + samples:
        at = 0 if documents == 1 else generator.randint(0, documents - 1)
        if at not in lengths:
            lengths[at] = length(at)
        if lengths[at] > window:
            drawn.append((at, generator.randint(0, lengths[at] - window - 1)))
        elif len(lengths) == documents and max(lengths.values()) <= window:
            what = "the text" if documents == 1 else f"the longest of {documents} documents"
            raise UserError(
                f"{what} has {max(lengths.values())} tokens, and a window of {window} must be shorter: say a shorter "
                "--window, or give more text"
            )
    return drawn[skip:]


def cut_windows(stream: Tensor, *, window: int, limit: int | None = None, frame: int = 0) -> Tensor:
    """Cut a stream (tokens,) into non-overlapping windows from its start: int64 token ids, (windows, window - frame).

    The tail is dropped. At most `limit` windows are kept. `window` includes the frame that `add_frame` will add.
    """
    if limit is not None and limit < 1:
        raise UserError(f"the limit of windows must be at least 1, not {limit}")
    return _cut_all_windows(stream, window, frame)[:limit]


def _cut_all_windows(stream: Tensor, framed_window: int, frame: int) -> Tensor:
    window = framed_window - frame
    if window < 2:  # the first token of a window is never predicted: a window of one token says nothing
        raise UserError(f"window must be at least 2 tokens, not {window}")
    count = len(stream) // window
    if count == 0:
        shorter = f", or say --window {len(stream) + frame}" if len(stream) + frame >= SHORTEST_OFFERED else ""
        raise UserError(
            f"the text is too short for one window: it has {len(stream)} tokens, a window takes {window}; "
            f"give more text{shorter}"
        )
    return stream[: count * window].view(count, window)


def add_frame(windows: Tensor, tokenizer: "PreTrainedTokenizerBase") -> Tensor:
    """Put windows (windows, tokens) between the opening and closing tokens that an encoder was trained with."""
    before, after = (
        torch.tensor(ids, dtype=torch.int64).expand(len(windows), len(ids)) for ids in _find_frame(tokenizer)
    )
    return torch.cat([before, windows, after], 1)


def count_frame_tokens(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Count the tokens that `add_frame` adds to a window."""
    return sum(map(len, _find_frame(tokenizer)))


def _find_frame(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Find what the tokenizer puts before and after a text, by using it."""
    plain, special = encode_text(tokenizer, "a"), encode_text(tokenizer, "a", special=True)
    starts = [i for i in range(len(special)) if special[i : i + len(plain)] == plain]
    if not plain or not starts:
        return [], []
    return special[: starts[0]], special[starts[0] + len(plain) :]


def check_vocabulary(ids: Tensor, config: "PreTrainedConfig") -> None:
    """Refuse token ids, int64 of any shape, that the model's embedding has no row for."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and ids.numel() and (largest := int(ids.max())) >= size:
        raise UserError(
            f"token id {largest} is outside the model's vocabulary of {size}; the tokenizer belongs to another model"
        )


def fingerprint_windows(windows: Tensor) -> str:
    """Return the SHA-256 of the shape and the token ids (little-endian int64) of windows, (windows, window)."""
    ids = windows.detach().to("cpu", torch.int64).contiguous().numpy().astype("<i8", copy=False)
    digest = hashlib.sha256(json.dumps(list(windows.shape)).encode())
    digest.update(ids.tobytes())
    return digest.hexdigest()
