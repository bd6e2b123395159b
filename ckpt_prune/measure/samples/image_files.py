"""Image files and their classes, from a folder: plain, with a CSV file of labels, or a sub-folder per class."""

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import UnidentifiedImageError

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import NoneLeftError, UserError
from ckpt_prune.common.text_encoding import decode_text

ImageSplit = Literal["calib", "eval"]
Choose = Literal["random", "first"]

LABELS = "labels.csv"
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What an image file is known by in a folder; upper case counts too. A labels file may name others."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded: some of those Pillow reads start other programs."""


@dataclass(frozen=True)
class ImageFiles:
    """Image files in a fixed order, none of them opened yet."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...] | None = None
    """Class of each, an index into the model's outputs; None where classes are not known or not asked for."""


def find_images(
    directory: Path, *, labels: Path | None = None, split: ImageSplit, id2label: Mapping[int, str] | None = None
) -> ImageFiles:
    """Find the images of a folder and their classes, sorted by path.

    The first of these that fits:

    - A CSV with columns `file`, `label` and perhaps `split`, others ignored: the one given, or `labels.csv` in the
      folder, or beside it where it names files of the folder (only those count). A `file` is relative to the CSV or
      to the folder; a `label` is an index or a class name. With a `split` column, only rows of that split count.
    - A sub-folder per class, with the images anywhere below it; its name is the class.
    - Images in the folder itself, without classes.

    A class name is one of the values of `id2label`, one of the synonyms in it ("tench" of "tench, Tinca tinca"), its
    first word (such as the WordNet id in "n01440764 tench"), or an index; what is a value of `id2label` and a number
    counts as the number in a CSV, as the value where it names a folder.

    Args:
        directory: The folder.
        labels: The CSV, where it is not found by itself.
        split: What the images are for.
        id2label: The model's classes; None leaves classes unread, and a CSV then needs no `label` column.

    Raises:
        UserError: There is no such folder or CSV, no image, or no row of the split; the CSV lacks a column, names files
            that are not there or names one twice; a class is none of the model's; images lie both in the folder and
            in its sub-folders.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such image folder")
    if labels is not None:
        if not labels.is_file():
            raise UserError(f"{labels}: no such labels file")
        return _from_csv(labels, _rows(labels), directory, split, id2label)
    if (directory / LABELS).is_file():
        return _from_csv(directory / LABELS, _rows(directory / LABELS), directory, split, id2label)
    beside = _parent(directory) / LABELS
    if beside.is_file():
        rows = [row for row in _rows(beside) if _is_about(row, beside, directory)]
        if any(_located(row, beside, directory) for row in rows):
            return _from_csv(beside, rows, directory, split, id2label)
    return _from_folders(directory, id2label)


def find_classes(directory: Path, labels: Path | None = None) -> dict[int, str]:
    """The classes that a folder of images names, where no model says which there are: index → label.

    Labels that are numbers are their own indices; others are counted in order.

    Raises:
        UserError: as `find_images`.
    """
    beside = (labels, directory / LABELS, _parent(directory) / LABELS)
    file = next((each for each in beside if each is not None and each.is_file()), None)
    if file is not None:
        texts = {row.values.get("label", "").strip() for row in _rows(file)}
    else:
        texts = {each.name for each in directory.iterdir() if each.is_dir()} if directory.is_dir() else set()
    numbers = all(re.fullmatch(r"[0-9]{1,9}", each) for each in texts)
    return {int(each): each for each in texts} if numbers else dict(enumerate(sorted(texts)))


def has_splits(directory: Path, labels: Path | None = None) -> bool:
    """Whether the labels of a folder of images say which of them are to calibrate on."""
    beside = (labels, directory / LABELS, _parent(directory) / LABELS)
    file = next((each for each in beside if each is not None and each.is_file()), None)
    return file is not None and "split" in _rows(file)[0].values


def choose_images(
    files: ImageFiles, *, samples: int, seed: int = 0, choose: Choose = "random", skip: int = 0
) -> ImageFiles:
    """Choose `samples` of the images without replacement.

    Args:
        files: Those found.
        samples: How many.
        seed: Of a random choice; the same seed and number of files choose the same ones on every machine.
        choose: "random" takes any, in random order: files sorted by path are sorted by class where each class has a
            folder, and folds, which are runs of samples, would each hold other classes. "first" takes the first, in
            the order given.
        skip: Pass over the images that so many samples would be, and choose others.

    Raises:
        UserError: There are fewer than `samples`.
        NoneLeftError: All are passed over.
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
    if choose == "first":
        chosen = list(range(skip, skip + samples))
    else:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(skip + count, generator=generator)[skip : skip + samples].tolist()
    return take_images(files, chosen)


def take_images(files: ImageFiles, rows: list[int]) -> ImageFiles:
    """Some of the files."""
    labels = None if files.labels is None else tuple(files.labels[row] for row in rows)
    return ImageFiles(tuple(files.paths[row] for row in rows), labels)


@dataclass(frozen=True)
class _Row:
    line: int
    values: dict[str, str]


def _parent(directory: Path) -> Path:
    # Path(".").parent is "." again
    return directory.parent if directory.name not in ("", "..") else Path(os.path.abspath(directory)).parent  # noqa: PTH100


def _rows(file: Path) -> list[_Row]:
    try:
        content = decode_text(file, read_input(file), "CSV")
        head = content.partition("\n")[0]
        # Spreadsheets write semicolons where a comma stands in numbers, and tabs as "Unicode text".
        delimiter = next((each for each in ",;\t" if each in head), ",")
        reader = csv.DictReader(io.StringIO(content, newline=""), restkey="", restval="", delimiter=delimiter)
        rows = [_Row(reader.line_num, {k.strip(): v for k, v in row.items() if k}) for row in reader]
        columns = reader.fieldnames or []
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: not a readable CSV: {describe_error(error)}") from error
    if not rows:
        raise UserError(f"{file}: no rows; it needs the columns file and label{_had(columns)}")
    return rows


def _had(columns: Any) -> str:
    return f", its columns are {', '.join(columns)}" if columns else ""


def _located(row: _Row, file: Path, directory: Path) -> Path | None:
    name = row.values.get("file", "").strip()
    for folder in (file.parent, directory):
        if name and (folder / name).is_file():
            return folder / name
    return None


def _is_about(row: _Row, file: Path, directory: Path) -> bool:
    """Whether a row of a CSV beside a folder is about that folder: not where it names a file that lies elsewhere."""
    path = _located(row, file, directory)
    return path is None or Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))  # noqa: PTH100


def _from_csv(
    file: Path, rows: list[_Row], directory: Path, split: ImageSplit, id2label: Mapping[int, str] | None
) -> ImageFiles:
    columns = list(rows[0].values)
    for column in ("file", "label") if id2label is not None else ("file",):
        if column not in columns:
            raise UserError(f"{file}: no column {column}{_had(columns)}")
    if "split" in columns:
        there = sorted({row.values["split"].strip() for row in rows})
        rows = [row for row in rows if row.values["split"].strip() == split]
        if not rows:
            raise UserError(f"{file}: no row of split {split}; its splits are {', '.join(there)}")
    found: dict[Path, int] = {}
    missing = []
    for row in rows:
        path = _located(row, file, directory)
        if path is None:
            missing.append(row.values["file"])
        elif path in found:
            raise UserError(f"{file}, line {row.line}: {row.values['file']} is named twice")
        elif id2label is None:
            found[path] = -1
        else:
            found[path] = _label(row.values["label"].strip(), f"{file}, line {row.line}", id2label, number_first=True)
    if missing:
        raise UserError(
            f"{file}: {len(missing)} of {len(rows)} files are not there, the first is {missing[0]}; "
            f"they are looked for in {file.parent} and {directory}"
        )
    return _sorted(found, labelled=id2label is not None)


def _from_folders(directory: Path, id2label: Mapping[int, str] | None) -> ImageFiles:
    loose = [path for path in directory.iterdir() if _is_image(path)]
    folders = {}
    for folder in directory.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            inside = [path for path in _below(folder) if _is_image(path)]
            if inside:
                folders[folder] = inside
    if loose and folders:
        raise UserError(
            f"{directory}: images both in the folder and in its sub-folders ({min(folders).name}); "
            "give a folder of images, or one with a sub-folder per class"
        )
    if not loose and not folders:
        raise UserError(f"{directory}: no images ({' '.join(SUFFIXES)}) in it or in its sub-folders")
    if loose or id2label is None:
        return _sorted(dict.fromkeys((*loose, *(p for inside in folders.values() for p in inside)), -1), labelled=False)
    found = {}
    for folder in sorted(folders):
        label = _label(folder.name, str(folder), id2label, number_first=False)
        found.update(dict.fromkeys(folders[folder], label))
    return _sorted(found, labelled=True)


def _below(folder: Path) -> Iterator[Path]:
    for place, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        yield from (Path(place, name) for name in names)


def _is_image(path: Path) -> bool:
    # "._x.jpg" and its like are notes of a file manager
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _sorted(found: Mapping[Path, int], *, labelled: bool) -> ImageFiles:
    paths = tuple(sorted(found, key=lambda path: path.as_posix()))
    return ImageFiles(paths, tuple(found[path] for path in paths) if labelled else None)


def _label(text: str, where: str, id2label: Mapping[int, str], *, number_first: bool) -> int:
    number = int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None
    if number_first and number is not None and number in id2label:
        return number
    exact = [index for index, name in id2label.items() if name == text]
    fitting = exact or [index for index, name in id2label.items() if text in _names(name)]
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


def _names(name: str) -> set[str]:
    """What a class may be called: the synonyms of its `id2label` value, and its WordNet id where it begins with one."""
    wordnet = re.fullmatch(r"(n[0-9]{8})\s+(.*)", name)
    words = wordnet[2] if wordnet else name
    return {part.strip() for part in words.split(",")} | ({wordnet[1]} if wordnet else set(name.split(maxsplit=1)[:1]))


def describe_error(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, UnidentifiedImageError):  # its own text names an object in memory
        return f"not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:300] or type(error).__name__
