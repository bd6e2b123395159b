"""What was held against each other where widths meet the rest of a size, as a table."""

from dataclasses import dataclass

from ckpt_prune.planning.records import Depth, Hidden


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


def tried_table(depth: Depth | None, hidden: Hidden | None) -> TriedTable | None:
    """Numbers of blocks or dimensions, or pairs of both, with the divergence of each; None where nothing was tried."""
    title = "divergence from the dense model on held-out samples, the rest of the size met by widths"
    gone = 0 if depth is None else depth.blocks - len(depth.kept)
    if hidden is not None and any(each.blocks is not None for each in hidden.tried):
        pairs = [(each.blocks or 0, each.kept, each.measured) for each in hidden.tried]
        rows = [[str(a), str(b), f"{found:.4f}", _mark((a, b) == (gone, hidden.kept))] for a, b, found in pairs]
        return TriedTable(title, ["blocks gone", "dimensions", "divergence", ""], rows)
    if hidden is not None and hidden.tried:
        rows = [[str(each.kept), f"{each.measured:.4f}", _mark(each.kept == hidden.kept)] for each in hidden.tried]
        return TriedTable(title, ["dimensions", "divergence", ""], rows)
    if depth is not None and depth.tried:
        rows = [[str(each.blocks), f"{each.measured:.4f}", _mark(each.blocks == gone)] for each in depth.tried]
        return TriedTable(title, ["blocks gone", "divergence", ""], rows)
    return None


def _mark(taken: bool) -> str:
    return "taken" if taken else ""
