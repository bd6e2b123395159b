"""Sentences and figures shared by the stages that work on every linear module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ckpt_prune.show.section import Figure, Pick, Table, draw_figure, draw_line, format_figure, make_tables, mean_of
from ckpt_prune.stages.low_rank.records import FactoredRecord
from ckpt_prune.stages.mask.records import MaskedLinear

Linear = MaskedLinear | FactoredRecord
L = TypeVar("L", bound=Linear)
KINDS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of modules (`Family.labels`), in the order of figures."""


def label_of(linear: Linear) -> str:
    """Return what tables call a linear module; in old files that do not say, the path of the module in its block."""
    if linear.kind is not None:
        return linear.kind
    name = linear.weight.removesuffix(".weight")
    return name.partition(f".{linear.block}.")[2] or name


def place_of(linear: Linear) -> str:
    """Name a linear module of a model."""
    return f"{label_of(linear)} of block {linear.block}"


def error_sentences(linears: Sequence[Linear]) -> list[str]:
    """Say how large the errors of the outputs are, if any was measured."""
    measured = [linear for linear in linears if linear.error is not None]
    mean = mean_of([linear.error for linear in measured])
    if mean is None:
        return []
    worst = max(measured, key=lambda linear: linear.error or 0.0)
    return [
        f"The error of their outputs on the calibration samples is {format_figure(mean)} on average, "
        f"{format_figure(worst.error or 0.0)} at most ({place_of(worst)})."
    ]


def list_linears(linears: Sequence[L], columns: Mapping[str, Callable[[L], str | float | None]]) -> Sequence[Table]:
    """Make the table of every linear module: which it is, its shape, and the given columns."""
    return make_tables(
        "Every linear",
        linears,
        {
            "block": lambda linear: str(linear.block),
            "linear": label_of,
            "weight": lambda linear: linear.weight,
            "shape": lambda linear: f"{linear.rows:,} × {linear.columns:,}",
            **columns,
        },
        words=3,
    )


def draw_by_kind(
    title: str, note: str, unit: str, linears: Sequence[Linear], pick: Pick, **options: Any
) -> Sequence[Figure]:
    """Draw a quantity over blocks, with a line for each kind of linear module."""
    labels = dict.fromkeys(label_of(linear) for linear in linears)
    order = [kind for kind in KINDS if kind in labels] + [label for label in labels if label not in KINDS]
    lines = [draw_line(kind, [linear for linear in linears if label_of(linear) == kind], pick) for kind in order]
    return draw_figure(title, note, unit, *lines, **options)
