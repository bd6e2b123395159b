"""The section on amounts of blocks or dimensions that were tried."""

from collections.abc import Mapping

from ckpt_prune.job.records import Tried
from ckpt_prune.show.section import Section, Table


def show_tried(unit: str, tried: Mapping[int, Tried], taken: int) -> list[Section]:
    """Make a table of the amounts that were tried, with the divergence of each; nothing if none was.

    Args:
        unit: of the amounts, as the column is headed.
        taken: the amount that the output has.
    """
    if not tried:
        return []
    rows = [(str(n), f"{each.measured:.4f}", "taken" if n == taken else "") for n, each in tried.items()]
    sentence = "Divergence from the dense model on held-out samples, the rest of the size met by widths."
    return [Section("Amounts that were tried", [sentence], tables=[Table([unit, "divergence", ""], rows)])]
