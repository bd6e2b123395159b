"""A section says, once, what was done. The terminal, the model card and the page print it.

A stage returns its sections from `stages/STAGE/show.py`. Text is plain: printers escape it.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

from ckpt_prune.common.block_range import runs_of
from ckpt_prune.common.records import Record

R = TypeVar("R")
MISSING = "–"
DECADES = 1e4
"""The scale of a heat map covers so much at most, below the largest value."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings.

    Attributes:
        words: so many of the first columns are words; the others are numbers.
        title: of a table that stands among the details.
        bars: whether the page draws the last column, percentages, as bars.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""
    bars: bool = False


@dataclass(frozen=True)
class Point:
    """A value at a place, with the ends of the spread it is the mean of, and its text for a tooltip."""

    place: int
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Line:
    """Points with ascending places."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Figure:
    """Lines over the blocks of a model, or over something else.

    Attributes:
        note: which direction is better, and why.
        unit: of the values.
        full: values that the axis covers in any case.
        log: whether a log scale may be taken.
        across: what the places are.
        joined: whether lines continue over places without a point.
    """

    title: str
    note: str
    unit: str
    lines: Sequence[Line]
    full: tuple[float, float] | None = None
    log: bool = True
    across: str = "block"
    joined: bool = False


@dataclass(frozen=True)
class HeatMap:
    """Panels of cells on one scale: name of a panel → rows of values, from 0 up."""

    title: str
    note: str
    panels: Mapping[str, Sequence[Sequence[float | None]]]


@dataclass(frozen=True)
class Section:
    """Everything that is said about one thing.

    Attributes:
        sentences: facts and advice, which all printers print.
        explanations: for readers of the card and the page who did not run the command.
        drawing: a line of characters of equal width.
        details: tables that the page alone prints, folded away.
    """

    title: str
    sentences: Sequence[str] = ()
    explanations: Sequence[str] = ()
    drawing: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure | HeatMap] = ()
    details: Sequence[Table] = ()


Pick = str | Callable[[Any], float | Mapping[str, float] | None]
"""The number to draw of a record: a key of it, or a function that returns one number or several by name."""


def draw_line(
    name: str,
    records: Sequence[Any],
    pick: Pick,
    *,
    remark: Callable[[Any], str] | None = None,
    place: Callable[[Any], int] = lambda record: int(record.block),
) -> Line:
    """Make a line with a point for each record that has the number; of several numbers, their mean and their spread."""
    points = []
    for record in records:
        picked = record.figure(pick) if isinstance(pick, str) else pick(record)
        values = picked if isinstance(picked, Mapping) else {} if picked is None else {"": picked}
        if values:
            (low, least), (high, most) = (end((value, name) for name, value in values.items()) for end in (min, max))
            # The mean of equal numbers may lie a rounding outside them.
            mean = min(max(sum(values.values()) / len(values), low), high)
            text = format_figure(mean)
            if len(values) > 1:
                text = f"mean {text}, from {format_figure(low)} ({least}) to {format_figure(high)} ({most})"
            remarks = remark(record) if remark is not None else ""
            points.append(Point(place(record), mean, low, high, f"{text}, {remarks}" if remarks else text))
    return Line(name, points)


def draw_figure(
    title: str, note: str, unit: str, *lines: Line, varying: bool = False, **options: Any
) -> Sequence[Figure]:
    """Make a figure of those lines that have points; none if no line has any.

    Args:
        title, note, unit, lines: as in `Figure`.
        varying: make no figure if every line is constant.
        options: of `Figure`.
    """
    drawn = [line for line in lines if line.points]
    if varying:
        varies = any(len({point.value for point in line.points}) > 1 for line in drawn)
        drawn = drawn if varies else []
    return [Figure(title, note, unit, drawn, **options)] if drawn else []


def draw_shares(
    title: str, note: str, unit: str, curves: Mapping[str, Sequence[tuple[int, float | None]]], across: str
) -> Sequence[Figure]:
    """Draw curves (place, value), each as a share of its beginning: their mean, from the least to the most."""
    shares: dict[int, dict[str, float]] = {}
    for name, curve in curves.items():
        start = curve[0][1] if curve else None
        for place, value in curve:
            if start is not None and start > 0 and value is not None:
                shares.setdefault(place, {})[name] = value / start
    # Curves that end early are missing from later places, which would move the mean.
    most = max(map(len, shares.values()), default=0)
    complete = [(place, values) for place, values in sorted(shares.items()) if len(values) == most]
    line = draw_line("mean of blocks, least to most", complete, itemgetter(1), place=itemgetter(0))
    return [Figure(title, note, unit, [line], log=False, across=across, joined=True)] if len(complete) > 1 else []


def make_tables(
    title: str, records: Sequence[R], columns: Mapping[str, Callable[[R], str | float | None]], *, words: int = 1
) -> Sequence[Table]:
    """Make a table with a row for each record, without those columns that no record has a value for.

    Args:
        title: of the table.
        records: none of them, no table.
        columns: heading → value of a record. Numbers get three digits.
    """
    rows = [[column(record) for column in columns.values()] for record in records]
    filled = [number for number in range(len(columns)) if any(row[number] is not None for row in rows)]
    headings = list(columns)
    cells = [[format_cell(row[number]) for number in filled] for row in rows]
    return [Table([headings[number] for number in filled], cells, words, title)] if rows else []


def number_under(key: str) -> Callable[[Record], float | None]:
    """Return the column of `make_tables` with the number under a key."""
    return lambda record: record.figure(key)


def format_cell(value: str | float | None) -> str:
    return MISSING if value is None else value if isinstance(value, str) else format_figure(value)


def format_figure(value: float) -> str:
    """Format a number with three significant digits; whole numbers and large ones without a point."""
    if abs(value) >= 1e6:  # or infinite, between ends of an axis that are both near the largest float
        return f"{value:.2e}"
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def format_span(numbers: Collection[int]) -> str:
    """Format the range of numbers, such as "2" or "2 to 5"."""
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def name_blocks(blocks: Sequence[int]) -> str:
    """Name ascending blocks, such as "blocks 0 to 2 and 4"."""
    *most, last = [format_span(run) for run in runs_of(blocks)]
    runs = f"{', '.join(most)} and {last}" if most else last
    return f"{'block' if len(blocks) == 1 else 'blocks'} {runs}"


def name_some(names: Sequence[str], most: int = 8) -> str:
    """List the first names, and say how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def list_entries(entries: Mapping[str, Any]) -> str:
    """List every entry, whatever the modality has: `target dense, 128 samples, window 2048, ...`."""
    parts = []
    for key, value in entries.items():
        if value is None or isinstance(value, dict | list) or (isinstance(value, float) and not math.isfinite(value)):
            continue
        words = {"data": "digest of the data", "windows": "windows:"}.get(key, key.replace("_", " "))
        if key in {"samples", "tokens", "folds", "epochs"} and isinstance(value, int):
            parts.append(f"{value:,} {words.removesuffix('s') if value == 1 else words}")
        else:
            parts.append(f"{words} {value}")
    return ", ".join(parts)


def mean_of(values: Collection[float | None]) -> float | None:
    """Return the mean of the numbers that are known; None if none is."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
