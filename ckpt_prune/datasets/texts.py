"""Data sets of texts by the names that papers use, joined as their code does (measure/README.md, section 3)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.text_encoding import NOT_UTF8
from ckpt_prune.datasets.files import find_data_file, read_lines, read_rows

Split = Literal["train", "test", "validation"]
_SHORT = {"train": "train", "test": "test", "validation": "valid"}
WINDOWS = (128, 2048)
"""Tokens of the two windows that published perplexities use."""


@dataclass(frozen=True)
class _SplitFiles:
    """Files of one split of a data set, and how its rows become a text.

    Attributes:
        separator: between two rows.
        local: patterns of names that its file may have in a folder; the first that fits is read.
        remote: path in the repository on the Hub.
        rows: number that is read; None for all.
    """

    separator: str
    local: tuple[str, ...]
    remote: str
    rows: int | None = None


@dataclass(frozen=True)
class _DataSet:
    repo: str
    revision: str | None
    column: str
    splits: dict[str, _SplitFiles]


def _wikitext2(split: str) -> _SplitFiles:
    parquet = f"wikitext-2-raw-v1/{split}"
    local = (f"wiki.{_SHORT[split]}.raw", f"{split}.jsonl", f"{split}-*.parquet", f"{parquet}-*.parquet")
    return _SplitFiles(" " if split == "train" else "\n\n", local, f"{parquet}-00000-of-00001.parquet")


def _c4(split: str, files: str, rows: int) -> _SplitFiles:
    packed = f"c4-{split}.00000-of-"
    local = (f"{split}.jsonl", f"{packed}*.json.gz", f"en/{packed}*.json.gz")
    return _SplitFiles(" ", local, f"en/{packed}{files}.json.gz", rows)


def _ptb(split: str) -> _SplitFiles:
    remote = f"penn_treebank/{split}/0000.parquet"
    local = (f"ptb.{_SHORT[split]}.txt", f"{split}.jsonl", f"{split}-*.parquet", remote)
    return _SplitFiles("\n\n" if split == "validation" else " ", local, remote)


_SETS = {
    "wikitext2": _DataSet("Salesforce/wikitext", None, "text", {split: _wikitext2(split) for split in _SHORT}),
    # Published perplexities of C4 use the first 1,100 documents of the first file of its validation split.
    "c4": _DataSet(
        "allenai/c4",
        None,
        "text",
        {"train": _c4("train", "01024", 10_000), "validation": _c4("validation", "00008", 1_100)},
    ),
    "ptb": _DataSet(
        "ptb-text-only/ptb_text_only", "refs/convert/parquet", "sentence", {split: _ptb(split) for split in _SHORT}
    ),
}
TEXT_NAMES = tuple(_SETS)
"""Names of texts that stand for a data set."""
_NAME = re.compile(rf"({'|'.join(_SETS)})(?::(\w+))?(?:@(\w+))?")


@dataclass(frozen=True)
class NamedText:
    """A split of a data set that papers measure on.

    Attributes:
        name: of the data set.
        split: of it.
        folder: that was given before the name, to look for local copies in.
        window: tokens of the preset that was asked for.
    """

    name: str
    split: str
    folder: Path | None = None
    window: int | None = None

    @property
    def path(self) -> Path:
        """The name as an option says it, with the split and without the window."""
        option = f"{self.name}:{self.split}"
        return Path(option) if self.folder is None else self.folder / option

    def file(self) -> Path:
        """Find its file: a local copy, or else the Hub's."""
        data_set = _SETS[self.name]
        files = data_set.splits[self.split]
        return find_data_file(
            self.path,
            self.folder,
            self.name,
            files.local,
            repo=data_set.repo,
            remote=files.remote,
            revision=data_set.revision,
        )

    def read(self) -> str:
        """Read its rows, joined as the papers' code does."""
        files = _SETS[self.name].splits[self.split]
        return files.separator.join(self._read(files.rows))

    def documents(self) -> list[str]:
        """Read all of its rows: of C4's train split those of its first file."""
        return self._read(None)

    def _read(self, most: int | None) -> list[str]:
        file, data_set = self.file(), _SETS[self.name]
        try:
            return list(islice(_rows(file, data_set.column), most))
        except (OSError, EOFError, ValueError) as error:  # gzip's, too
            reason = NOT_UTF8 if isinstance(error, UnicodeDecodeError) else one_line(error)
            raise UserError(f"{file}: cannot be read as {self.name}: {reason}") from error


def parse_text_name(given: Path, default: Split = "test") -> NamedText | None:
    """Parse NAME or NAME:SPLIT, with or without @WINDOW; None for anything else, and for a file.

    Args:
        given: by the user; local copies are looked for in the folder before the name.
        default: split if none is given. C4 has no test split, and takes its validation split for it.
    """
    match = _NAME.fullmatch(given.name)
    if match is None or given.is_file():
        return None
    name, split, window = match.groups()
    splits = _SETS[name].splits
    if split is None:
        split = default if default in splits else "validation"
    if split not in splits:
        raise UserError(f"{given}: {name} has the splits {', '.join(s for s in get_args(Split) if s in splits)}")
    if window is not None and window not in map(str, WINDOWS):
        raise UserError(f"{given}: presets of windows are @{' and @'.join(map(str, WINDOWS))}; use --window for others")
    folder = None if given == Path(given.name) else given.parent
    return NamedText(name, split, folder, None if window is None else int(window))


def _rows(file: Path, column: str) -> Iterator[str]:
    if file.suffix in (".parquet", ".jsonl", ".gz"):
        for row in read_rows(file, [column]):
            value = row.get(column)
            if not isinstance(value, str):
                raise ValueError(f'no string under "{column}"')
            yield value
    elif file.suffix == ".raw":  # as on the Hub: rows keep the end of their line, and blank ones are empty
        for line in read_lines(file):
            text = line.decode("utf-8").rstrip("\r\n")
            yield f"{text}\n" if text.strip() else ""
    else:
        for line in read_lines(file):
            yield line.decode("utf-8").strip()
