"""Image files of a folder, and their classes from a CSV file of labels or from a sub-folder per class."""

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import UnidentifiedImageError

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import NoneLeftError, UserError
from ckpt_prune.common.text_encoding import decode_text
from ckpt_prune.measure.samples.mixing import deal_shares, mix_evenly

ImageSplit = Literal["calib", "eval"]

LABELS = "labels.csv"
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of image files in a folder, in upper or lower case. A labels file may name others."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded: some of those Pillow reads start other programs."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files in a fixed order, none of them opened yet.

    Attributes:
        paths: of the files.
        labels: class of each, an index into the model's outputs; None if classes are not known or not asked for.
        counts: number of files in each folder, in the order of `paths`; empty for a single folder.
        split: which rows of which labels file these are, in words; None if the file has no column split.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...] | None = None
    counts: tuple[int, ...] = ()
    split: str | None = None


def find_all_images(
    directories: Sequence[Path],
    *,
    labels: Path | None = None,
    split: ImageSplit,
    id2label: Mapping[int, str] | None = None,
) -> ImageFiles:
    """Find the images of several folders, as `find_images`; they have classes if those of every folder do."""
    if labels is not None and len(directories) > 1:
        raise UserError(f"--labels {labels} is of one folder: give one --images, or a labels.csv in each")
    folders = [find_images(each, labels=labels, split=split, id2label=id2label) for each in directories]
    if len(folders) == 1:
        return folders[0]
    paths = tuple(path for each in folders for path in each.paths)
    classes = [each.labels for each in folders if each.labels is not None]
    together = tuple(index for each in classes for index in each) if len(classes) == len(folders) else None
    return ImageFiles(paths, together, tuple(len(each.paths) for each in folders))


def find_images(
    directory: Path, *, labels: Path | None = None, split: ImageSplit, id2label: Mapping[int, str] | None = None
) -> ImageFiles:
    """Find the images of a folder and their classes, sorted by path.

    The first of these that fits:

    - A CSV with columns `file`, `label` and perhaps `split`, others ignored: the one given, or `labels.csv` in the
      folder, or beside it if it names files of the folder (only those count). A `file` is relative to the CSV or
      to the folder; a `label` is an index or a class name. With a `split` column, only rows of that split count.
    - A sub-folder per class, with the images anywhere below it; its name is the class.
    - Images in the folder itself, without classes.

    A class name is one of the values of `id2label`, a synonym in one ("tench" of "tench, Tinca tinca"), its first word
    (such as the WordNet id in "n01440764 tench"), or an index. A value of `id2label` that is a number counts as the
    number in a CSV, and as the value if it names a folder. If `id2label` is None, classes are not read, and a CSV needs
    no `label` column.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such image folder")
    if labels is not None:
        if not labels.is_file():
            raise UserError(f"{labels}: no such labels file")
        return _read_csv(labels, read_label_rows(labels), directory, split, id2label)
    inside, beside = directory / LABELS, _parent(directory) / LABELS
    if inside.is_file():
        return _read_csv(inside, read_label_rows(inside), directory, split, id2label)
    if beside.is_file():
        rows = [row for row in read_label_rows(beside) if _is_about(row, beside, directory)]
        if any(_locate(row, beside, directory) for row in rows):
            return _read_csv(beside, rows, directory, split, id2label)
    return _read_folders(directory, id2label)


def choose_images(
    files: ImageFiles, *, samples: int, seed: int = 0, choose: Literal["random", "first"] = "random", skip: int = 0
) -> ImageFiles:
    """Choose `samples` of the images without replacement. A seed chooses the same ones of as many files everywhere.

    Folders give equal shares, which are mixed evenly; where one has fewer, the others give more.
    "random" also puts them in random order: files sorted by path are sorted by class if each class has a folder, and
    folds, which are runs of samples, would each hold other classes. "first" takes the first, in the order given. `skip`
    passes over the images that so many samples would be.
    """
    count = len(files.paths) - skip
    if skip and count < 1:
        raise NoneLeftError(f"there are {len(files.paths)} images, and {skip} of them are taken; give more images")
    if samples < 1:
        raise UserError(f"samples must be at least 1, not {samples}")
    if count < samples:
        raise UserError(
            f"there are {count} images, {samples} are asked for; give more images, or at most {count} samples"
        )
    counts, chosen, start = files.counts or (len(files.paths),), list[int](), 0
    shares = deal_shares(counts, samples, skip)
    for own, share in zip(counts, shares, strict=True):
        order = torch.arange(own)
        if choose == "random":
            order = torch.randperm(own, generator=torch.Generator().manual_seed(seed))
        chosen += (start + order[torch.tensor(share, dtype=torch.int64)]).tolist()
        start += own
    return take_images(files, [chosen[at] for at in mix_evenly([len(share) for share in shares]).tolist()])


def take_images(files: ImageFiles, rows: list[int]) -> ImageFiles:
    labels = None if files.labels is None else tuple(files.labels[row] for row in rows)
    return replace(files, paths=tuple(files.paths[row] for row in rows), labels=labels, counts=())


@dataclass(frozen=True)
class _Row:
    line: int
    values: dict[str, str]


def _parent(directory: Path) -> Path:
    # Path(".").parent is "." again
    return directory.parent if directory.name not in ("", "..") else Path(os.path.abspath(directory)).parent  # noqa: PTH100


def read_label_rows(file: Path) -> list[_Row]:
    """Read a CSV file of labels: at least one row."""
    try:
        content = decode_text(file, read_input(file), "CSV")
        head = content.partition("\n")[0]
        # Spreadsheets write semicolons in countries whose numbers have commas, and tabs as "Unicode text".
        delimiter = next((each for each in ",;\t" if each in head), ",")
        reader = csv.DictReader(io.StringIO(content, newline=""), restkey="", restval="", delimiter=delimiter)
        rows = [_Row(reader.line_num, {k.strip(): v for k, v in row.items() if k}) for row in reader]
        columns = reader.fieldnames or []
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: not a readable CSV: {describe_error(error)}") from error
    if not rows:
        raise UserError(f"{file}: no rows; it needs the columns file and label{_list_columns(columns)}")
    return rows


def _list_columns(columns: Any) -> str:
    return f", its columns are {', '.join(columns)}" if columns else ""


def _locate(row: _Row, file: Path, directory: Path) -> Path | None:
    name = row.values.get("file", "").strip()
    for folder in (file.parent, directory):
        if name and (folder / name).is_file():
            return folder / name
    return None


def _is_about(row: _Row, file: Path, directory: Path) -> bool:
    """Return True unless a row of a CSV beside a folder names a file that lies elsewhere."""
    path = _locate(row, file, directory)
    return path is None or Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))  # noqa: PTH100


def _read_csv(
    file: Path, rows: list[_Row], directory: Path, split: ImageSplit, id2label: Mapping[int, str] | None
) -> ImageFiles:
    columns = list(rows[0].values)
    for column in ("file", "label") if id2label is not None else ("file",):
        if column not in columns:
            raise UserError(f"{file}: no column {column}{_list_columns(columns)}")
    if "split" in columns:
        splits = sorted({row.values["split"].strip() for row in rows})
        rows = [row for row in rows if row.values["split"].strip() == split]
        if not rows:
            raise UserError(f"{file}: no row of split {split}; its splits are {', '.join(splits)}")
    classes: dict[Path, int] = {}
    missing = []
    for row in rows:
        path = _locate(row, file, directory)
        if path is None:
            missing.append(row.values["file"])
        elif path in classes:
            raise UserError(f"{file}, line {row.line}: {row.values['file']} is named twice")
        elif id2label is None:
            classes[path] = -1
        else:
            where = f"{file}, line {row.line}"
            classes[path] = _find_class(row.values["label"].strip(), where, id2label, number_first=True)
    if missing:
        raise UserError(
            f"{file}: {len(missing)} of {len(rows)} files are not there, the first is {missing[0]}; "
            f"they are looked for in {file.parent} and {directory}"
        )
    words = f"split {split} of {file.name}" if "split" in columns else None
    return replace(_sort_images(classes, labelled=id2label is not None), split=words)


def _read_folders(directory: Path, id2label: Mapping[int, str] | None) -> ImageFiles:
    loose = [path for path in directory.iterdir() if _is_image(path)]
    folders = {}
    for folder in directory.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            images = [path for path in _walk(folder) if _is_image(path)]
            if images:
                folders[folder] = images
    if loose and folders:
        raise UserError(
            f"{directory}: images both in the folder and in its sub-folders ({min(folders).name}); "
            "give a folder of images, or one with a sub-folder per class"
        )
    if not loose and not folders:
        raise UserError(f"{directory}: no images ({' '.join(SUFFIXES)}) in it or in its sub-folders")
    if loose or id2label is None:
        images = [*loose, *(path for images in folders.values() for path in images)]
        return _sort_images(dict.fromkeys(images, -1), labelled=False)
    classes = {}
    for folder in sorted(folders):
        index = _find_class(folder.name, str(folder), id2label, number_first=False)
        classes.update(dict.fromkeys(folders[folder], index))
    return _sort_images(classes, labelled=True)


def _walk(folder: Path) -> Iterator[Path]:
    for place, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(place, name) for name in names)


def _is_image(path: Path) -> bool:
    # "._x.jpg" and its like are notes of a file manager
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _sort_images(classes: Mapping[Path, int], *, labelled: bool) -> ImageFiles:
    paths = tuple(sorted(classes, key=lambda path: path.as_posix()))
    return ImageFiles(paths, tuple(classes[path] for path in paths) if labelled else None)


def _find_class(text: str, where: str, id2label: Mapping[int, str], *, number_first: bool) -> int:
    number = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
    if number_first and number is not None and number in id2label:
        return number
    exact = [index for index, name in id2label.items() if name == text]
    fitting = exact or [index for index, name in id2label.items() if text in _list_names(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(f"{where}: label {text!r} fits {len(fitting)} of the model's classes; use the class's index")
    if number is not None and number in id2label:
        return number
    raise UserError(
        f"{where}: label {text!r} is none of the model's {len(id2label)} classes, which look like "
        f"{next(iter(id2label.values()))!r}; give a class's index or its name in config.json's id2label"
    )


def _list_names(name: str) -> set[str]:
    """List what a class may be called: the synonyms of its `id2label` value, and its WordNet id or first word."""
    wordnet = re.fullmatch(r"(n[0-9]{8})\s+(.*)", name)
    words = wordnet[2] if wordnet else name
    return {part.strip() for part in words.split(",")} | ({wordnet[1]} if wordnet else set(name.split(maxsplit=1)[:1]))


def describe_error(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # its own text names an object in memory
        return f"not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:300] or type(error).__name__
