"""Texts with labels in rows, as GLUE's tasks have them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.datasets.files import read_rows
from ckpt_prune.datasets.glue import GLUE, LabelTask

_COLUMNS = (*dict.fromkeys(task.columns for task in GLUE.values()), ("text1", "text2"), ("text",))
SHAPES = f"label, and {' or '.join('+'.join(columns) for columns in sorted(_COLUMNS, key=len, reverse=True))}"


@dataclass(frozen=True)
class LabelItem:
    """One row.

    Attributes:
        texts: one, or two that belong together.
        label: a class from 0, a number, or a class by its name.
    """

    texts: tuple[str, ...]
    label: float | str


def read_labelled(path: Path, task: LabelTask, limit: int | None = None) -> list[LabelItem]:
    """Read a file of labelled texts.

    Args:
        path: .jsonl (also .gz) or .parquet.
        task: what is known of it.
        limit: only the first so many rows.

    Raises:
        UserError: the file cannot be read, holds no row, or a row is none of a task; the message says which.
    """
    items: list[LabelItem] = []
    try:
        for raw in read_rows(path, (*task.columns, "label")):
            if len(items) == limit:
                break
            items.append(_item(raw, task, len(items) + 1, path))
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as labelled texts: {' '.join(str(error).split())}") from error
    if not items:
        raise UserError(f"{path} holds no labelled text")
    return items


def _item(raw: Mapping[str, Any], task: LabelTask, number: int, path: Path) -> LabelItem:
    wanted = [task.columns] if task.columns else _COLUMNS
    # The longest first: a pair's first text may be named as that of a row with one.
    columns = next((each for each in sorted(wanted, key=len, reverse=True) if raw.keys() >= {*each}), None)
    label = raw.get("label")
    texts = tuple(raw[column] for column in columns or ())
    known = isinstance(label, str) or (
        isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    )
    if columns is None or not known or not all(isinstance(each, str) for each in texts):
        expected = f"label, and {'+'.join(task.columns)}" if task.columns else SHAPES
        raise UserError(f"{path}, row {number}: no labelled text; expected {expected}")
    if label == -1:
        raise UserError(
            f"{path}, row {number}: label -1 stands for one that is not public, as in GLUE's test splits: give the "
            "validation split"
        )
    return LabelItem(texts, label)  # type: ignore[arg-type]
