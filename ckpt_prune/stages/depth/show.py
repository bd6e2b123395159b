"""Sections of the stage `depth`."""

from collections.abc import Sequence

from ckpt_prune.job.records import DepthRecord, GapRecord
from ckpt_prune.show.section import Section, Table, make_tables, number_under
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.show_tried import show_tried

STAYS, GONE, MAPPED = "#", ".", "+"


def sections(report: Report) -> list[Section]:
    """Say which whole blocks are gone, what makes up for them, and which numbers of them were tried."""
    depth = report.depth
    if depth is None:
        return []
    gone = depth.blocks - len(depth.kept)
    return [show_depth(depth), *show_tried("blocks gone", {each.blocks: each for each in depth.tried}, gone)]


def show_depth(depth: DepthRecord) -> Section:
    """Draw which blocks are gone, and make a table of the gaps."""
    sentences, explanations = [], []
    if depth.gaps and depth.part == "block":
        explanations = ["Whole blocks are gone, and those that stay are numbered anew."]
    elif depth.gaps and depth.left_out:
        explanations = [f"Blocks without {depth.part} have no tensors of it, nor of the norm before it."]
    elif depth.gaps:
        sentences = [
            f"The last projection of {depth.part} is zeros in {len(depth.gaps)} of them: a stock class computes it all "
            "the same, and nothing is saved."
        ]
    tables = gap_table(depth.gaps)
    return Section("Blocks", sentences, explanations, drawing=draw_blocks(depth), tables=tables)


def draw_blocks(depth: DepthRecord) -> str:
    """Return a sign for every block of the dense model: it stays, it is gone, or it has taken the map of a gap."""
    kept = set(depth.kept)
    mapped = {gap.first - 1 for gap in depth.gaps if gap.into is not None}
    signs = "".join(
        GONE if block not in kept else MAPPED if block in mapped else STAYS for block in range(depth.blocks)
    )
    what = "blocks" if depth.part == "block" else f"{depth.part} of blocks"
    legend = f" ({GONE} is gone{f', {MAPPED} makes up for it' if MAPPED in signs else ''})" if depth.gaps else ""
    return f"{what} {signs} {len(depth.kept)} of {depth.blocks} stay{legend}"


def name_gap(gap: GapRecord) -> str:
    last = gap.first + gap.blocks - 1
    return f"block {gap.first}" if last == gap.first else f"blocks {gap.first} to {last}"


def name_gone(depth: DepthRecord) -> str:
    return ("" if depth.part == "block" else f"{depth.part} of ") + ", ".join(map(name_gap, depth.gaps))


def gap_table(gaps: Sequence[GapRecord]) -> Sequence[Table]:
    """Make the table with a row for every gap: distances, errors, and the map that makes up for it."""
    measured = any(gap.error_uncompensated is not None for gap in gaps)
    return make_tables(
        "",
        gaps,
        {
            "gone": name_gap,
            "map": lambda gap: _map(gap) if measured else None,
            "cosine distance": number_under("distance"),
            "predicted divergence": number_under("divergence"),
            "error before": number_under("error_uncompensated"),
            "after": number_under("error_compensated"),
            "held out": number_under("error_held_out"),
        },
        words=2 if measured else 1,
    )


def _map(gap: GapRecord) -> str:
    strength = "" if gap.strength is None else f" (lambda {gap.strength:g})"
    return "none lowers the error" if gap.into is None else f"{gap.method}{strength} in {gap.into}"


def size_axes(report: Report) -> dict[str, int]:
    """Return how many blocks stay, for a table of sizes."""
    return {} if report.depth is None else {"blocks": len(report.depth.kept)}
