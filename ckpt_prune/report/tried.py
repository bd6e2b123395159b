"""What was held against each other where widths meet the rest of a size, as a table."""

from dataclasses import dataclass

from ckpt_prune.job.records import DepthRecord, HiddenRecord


@dataclass(frozen=True)
class TriedTable:
    """A row for each that was tried.

    Attributes:
        title: what the table says, in words without an end.
        headers: of its columns; the last one marks what was taken.
        rows: in the order of the report.
    """

    title: str
    headers: list[str]
    rows: list[list[str]]


def tried_table(depth: DepthRecord | None, hidden: HiddenRecord | None) -> TriedTable | None:
    """Numbers of blocks or dimensions, or pairs of both, with the divergence of each; None where nothing was tried."""
    gone = 0 if depth is None else depth.blocks - len(depth.kept)
    taken: tuple[int, ...]
    tried: list[tuple[tuple[int, ...], float]]
    if hidden is not None and any(each.blocks is not None for each in hidden.tried):
        axes, taken = ["blocks gone", "dimensions"], (gone, hidden.kept)
        tried = [((each.blocks or 0, each.kept), each.measured) for each in hidden.tried]
    elif hidden is not None and hidden.tried:
        axes, taken, tried = ["dimensions"], (hidden.kept,), [((each.kept,), each.measured) for each in hidden.tried]
    elif depth is not None and depth.tried:
        axes, taken, tried = ["blocks gone"], (gone,), [((each.blocks,), each.measured) for each in depth.tried]
    else:
        return None
    title = "divergence from the dense model on held-out samples, the rest of the size met by widths"
    rows = [[*map(str, each), f"{found:.4f}", "taken" if each == taken else ""] for each, found in tried]
    return TriedTable(title, [*axes, "divergence", ""], rows)
