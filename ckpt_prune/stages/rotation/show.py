"""Sections of the stage `rotation`."""

import math
from operator import itemgetter

from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.show.section import (
    DECADES,
    Figure,
    HeatMap,
    Section,
    draw_figure,
    draw_line,
    draw_shares,
    format_figure,
    format_span,
    make_tables,
    number_under,
)
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.rotation.records import BIN, FARTHEST, ImportanceMap, Learned, RotationRecord

_ABSORBED = "which is absorbed by the weights and adds no computation at run time"


def sections(report: Report) -> list[Section]:
    """Say what was turned, what of it remains at run time, and how far it concentrated the importance of weights."""
    rotation = report.rotation
    if rotation is None:
        return []
    turns = rotation.turns if report.hidden is None else report.hidden.kind == "per-block"
    learned = sorted(rotation.learned, key=lambda entry: -1 if entry.block is None else entry.block)
    own_block = [entry for entry in learned if entry.block is not None]
    if rotation.kind == "values":
        what = f"the values of every head turn, {_ABSORBED}"
    elif turns:
        what = (
            "every block has its own basis of the residual stream, so a d x d matrix per block (d is the width of the "
            "stream) turns the stream at run time, which takes remote code"
        )
    else:
        what = f"all blocks share one basis of the residual stream, {_ABSORBED}"
    figures: list[Figure | HeatMap] = [
        *draw_figure(
            "Entropy of the importance",
            "Lower is better: the same importance in fewer weights, so the others can go to zero.",
            "nats",
            draw_line("before rotation", own_block, "entropy_before"),
            draw_line("after rotation", own_block, "entropy_after", remark=_steps),
            log=False,
        ),
        *draw_shares(
            "Entropy over steps",
            "Lower is better: of the importance of weights while rotations were learned, as a share of what it was.",
            "share of entropy",
            {f"block {entry.block}": entry.curve for entry in learned},
            "step",
        ),
    ]
    for record in [entry.map for entry in learned if entry.map is not None]:
        figures += [*_heat_map(record), *_histograms(record)]
    details = make_tables(
        "Every rotation",
        learned,
        {
            "blocks": lambda entry: "all" if entry.block is None else str(entry.block),
            "entropy before (nats)": number_under("entropy_before"),
            "entropy after (nats)": number_under("entropy_after"),
            "change": lambda entry: _change(entry.entropy_before, entry.entropy_after) or None,
            "steps": number_under("steps"),
        },
    )
    sentences = _entropies(rotation, learned)
    explanations = [
        f"Rotation {rotation.kind}: {what}.",
        f"The rotations themselves, which no loader needs, are in {ROTATIONS}.",
    ]
    return [Section("Rotation", sentences, explanations, figures=figures, details=details)]


def _entropies(rotation: RotationRecord, learned: list[Learned]) -> list[str]:
    """Say how far the importance is more concentrated, if the entropies of all rotations are known."""
    before, after = (
        [value for entry in learned if (value := entry.figure(key)) is not None]
        for key in ("entropy_before", "entropy_after")
    )
    if not learned or min(len(before), len(after)) < len(learned):
        return []
    sums = math.fsum(before), math.fsum(after)
    importance = f"{rotation.importance} importance" if rotation.importance else "importance"
    steps = [entry.steps for entry in learned if entry.steps is not None]
    per_block = "" if learned[0].block is None else " per block"
    trained = f", in {format_span(steps)} {'step' if max(steps) == 1 else 'steps'}{per_block}" if steps else ""
    change = f" ({change_words})" if (change_words := _change(*sums)) else ""
    return [
        f"Entropy of the {importance} of weights: {format_figure(sums[0])} nats before rotation {rotation.kind}, "
        f"{format_figure(sums[1])} nats after{change}{trained}."
    ]


def _steps(entry: Learned) -> str:
    return "" if entry.steps is None else f"{entry.steps:,} step{'' if entry.steps == 1 else 's'}"


def _change(before: float | None, after: float | None) -> str:
    return f"{after / before - 1:+.1%}" if before is not None and after is not None and before > 0 else ""


def _histograms(record: ImportanceMap) -> list[Figure]:
    """Draw the weights of each importance that stay and go, before and after (DenoiseRotator, Figure 2 c and d)."""
    bars = [bar for each in record.histograms.values() for side in (each.kept, each.zeroed) for bar in enumerate(side)]
    filled = [number for number, count in bars if count]
    span = slice(min(filled, default=0), max(filled, default=0) + 1)
    figures: list[Figure] = []
    for when, each in record.histograms.items():
        lines = []
        for name, counts in (("kept", each.kept), ("zeroed", each.zeroed)):
            levels = [(BIN * number - FARTHEST, count) for number, count in enumerate(counts)]
            lines.append(draw_line(name, levels[span], itemgetter(1), place=itemgetter(0)))
        figures += draw_figure(
            f"{record.weight}: weights by importance, {when} rotation",
            f"Where the zeroed weights lie far to the left, little is lost. A mark every {BIN} decibels, 10 of which "
            "are a factor of ten; zeroed is what a mask by this importance takes.",
            "weights",
            *lines,
            log=False,
            across="decibels of the mean importance",
            joined=True,
        )
    return figures


def _heat_map(record: ImportanceMap) -> list[HeatMap]:
    shares = {"before rotation": record.largest_before, "after": record.largest_after}
    is_known = None not in shares.values()
    ends = [f"{name}: the largest hundredth holds {share:.1%}" for name, share in shares.items() if is_known]
    values = [value for cells in (record.before, record.after) for row in cells for value in row if value and value > 0]
    if not values:
        return []
    note = (
        f"Stronger colour is more: means over cells of its {record.rows:,} rows and {record.columns:,} columns, from "
        f"{format_figure(max(min(values), max(values) / DECADES))} to {format_figure(max(values))} times the mean, log "
        f"scale. {'; '.join(ends) or 'Before rotation; after'}."
    )
    return [HeatMap(f"Importance of {record.weight}", note, {"before": record.before, "after": record.after})]
