"""Texts by the names that papers call them, read and joined as their code does (calibration/README.md, section 3)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.files import find_data_file, read_lines, read_rows

Split = Literal["train", "test", "validation"]
WINDOWS = (128, 2048)
"""The two windows that published perplexities are of."""


@dataclass(frozen=True)
class _Part:
    """One split of a data set.

    Attributes:
        join: what stands between two rows.
        local: patterns of the names that its file may have in a folder; the first that fits is read.
        remote: its file in the repository on the Hub.
        rows: so many are read; None for all.
    """

    join: str
    local: tuple[str, ...]
    remote: str
    rows: int | None = None


@dataclass(frozen=True)
class _DataSet:
    repo: str
    revision: str | None
    column: str
    parts: dict[str, _Part]


_SETS = {
    "wikitext2": _DataSet(
        "Salesforce/wikitext",
        None,
        "text",
        {
            split: _Part(
                " " if split == "train" else "\n\n",
                (
                    f"wiki.{short}.raw",
                    f"{split}.jsonl",
                    f"{split}-*.parquet",
                    f"wikitext-2-raw-v1/{split}-*.parquet",
                ),
                f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet",
            )
            for split, short in (("train", "train"), ("test", "test"), ("validation", "valid"))
        },
    ),
    # The perplexities of C4 are of the first 1,100 documents of the first file of its validation split.
    "c4": _DataSet(
        "allenai/c4",
        None,
        "text",
        {
            split: _Part(
                " ",
                (
                    f"{split}.jsonl",
                    f"c4-{split}.00000-of-*.json.gz",
                    f"en/c4-{split}.00000-of-*.json.gz",
                ),
                f"en/c4-{split}.00000-of-{files}.json.gz",
                rows,
            )
            for split, files, rows in (("train", "01024", 10_000), ("validation", "00008", 1_100))
        },
    ),
    "ptb": _DataSet(
        "ptb-text-only/ptb_text_only",
        "refs/convert/parquet",
        "sentence",
        {
            split: _Part(
                "\n\n" if split == "validation" else " ",
                (
                    f"ptb.{short}.txt",
                    f"{split}.jsonl",
                    f"{split}-*.parquet",
                    f"penn_treebank/{split}/0000.parquet",
                ),
                f"penn_treebank/{split}/0000.parquet",
            )
            for split, short in (("train", "train"), ("test", "test"), ("validation", "valid"))
        },
    ),
}
_NAME = re.compile(rf"({'|'.join(_SETS)})(?::(\w+))?(?:@(\w+))?")


@dataclass(frozen=True)
class NamedText:
    """A split of a data set that papers measure on.

    Attributes:
        name: of the data set.
        split: of it.
        folder: where the name was given behind a folder, to look for local copies in.
        window: tokens, of a preset that was asked for.
    """

    name: str
    split: str
    folder: Path | None = None
    window: int | None = None

    @property
    def path(self) -> Path:
        """How an option names it, the split said and the window not."""
        said = f"{self.name}:{self.split}"
        return Path(said) if self.folder is None else self.folder / said

    def file(self) -> Path:
        """The file that holds it: a local copy, or else that of the Hub, in its cache.

        Raises:
            UserError: there is no local copy where one was asked for, or the Hub's cannot be had.
        """
        own, part = _SETS[self.name], self._part
        return find_data_file(
            self.path, self.folder, self.name, part.local, repo=own.repo, remote=part.remote, revision=own.revision
        )

    def read(self) -> str:
        """The text: its rows, joined as the papers' code does.

        Raises:
            UserError: as `file`, or the file cannot be read.
        """
        file = self.file()
        column = _SETS[self.name].column
        try:
            return self._part.join.join(islice(_rows(file, column), self._part.rows))
        except (OSError, EOFError, ValueError) as error:  # gzip and UTF-8, too
            raise UserError(f"{file}: cannot be read as {self.name}: {' '.join(str(error).split())}") from error

    @property
    def _part(self) -> _Part:
        return _SETS[self.name].parts[self.split]


def parse_text_name(given: Path, usual: Split = "test") -> NamedText | None:
    """What a text option names, if it is no file but a data set: NAME, NAME:SPLIT, either with @WINDOW.

    Args:
        given: what was given; a folder before the name is looked into for local copies.
        usual: split where none is said; of C4, which has no test split, the validation split for it.

    Raises:
        UserError: the data set has no such split, or there is no such preset of windows.
    """
    match = _NAME.fullmatch(given.name)
    if match is None or given.is_file():
        return None
    name, split, window = match.groups()
    splits = _SETS[name].parts
    if split is None:
        split = usual if usual in splits else "validation"
    if split not in splits:
        raise UserError(f"{given}: {name} has the splits {', '.join(s for s in get_args(Split) if s in splits)}")
    if window is not None and window not in map(str, WINDOWS):
        raise UserError(f"{given}: presets of windows are @{' and @'.join(map(str, WINDOWS))}; use --window for others")
    folder = None if given == Path(given.name) else given.parent
    return NamedText(name, split, folder, None if window is None else int(window))


def _rows(file: Path, column: str) -> Iterator[str]:
    """Rows of a file, as the data set on the Hub has them."""
    if file.suffix in (".parquet", ".jsonl", ".gz"):
        for record in read_rows(file, [column]):
            value = record.get(column)
            if not isinstance(value, str):
                raise ValueError(f'no string under "{column}"')
            yield value
    elif file.suffix == ".raw":  # rows of the Hub keep their line's end; those of nothing are empty
        for line in read_lines(file):
            text = line.decode("utf-8").rstrip("\r\n")
            yield f"{text}\n" if text.strip() else ""
    else:
        for line in read_lines(file):
            yield line.decode("utf-8").strip()
