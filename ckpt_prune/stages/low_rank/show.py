"""Sections of the stage `low_rank`."""

from collections.abc import Callable

from ckpt_prune.common.formatting import human_count, plural
from ckpt_prune.show.section import Section, format_span, number_under
from ckpt_prune.stages.low_rank.records import FactoredRecord
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.show_linears import draw_by_kind, error_sentences, list_linears


def sections(report: Report) -> list[Section]:
    """Say how many linear modules are two thin ones, and what error that leaves at their outputs."""
    factored = sorted(report.factored, key=lambda linear: linear.block)
    if not factored:
        return []
    size, left = sum(linear.size for linear in factored), sum(linear.left for linear in factored)
    sentence = (
        f"{plural(len(factored), 'linear module')} became the product of two, of ranks "
        f"{format_span([linear.rank for linear in factored])}: {human_count(left)} of the {human_count(size)} "
        f"parameters of their weights are left ({left / size:.1%})."
    )
    figures = [
        *draw_by_kind(
            "Output error of the factored linears",
            "Lower is better: what two thin linears change in the output of one, on the calibration data.",
            "share of output energy",
            factored,
            "error",
        ),
        *draw_by_kind(
            "Parameters of the factors",
            "Where the ranks went: the recipe lets linears differ.",
            "share of the weight's",
            factored,
            lambda linear: linear.left / linear.size,
            full=(0, 1),
            log=False,
            varying=True,
        ),
    ]
    columns: dict[str, Callable[[FactoredRecord], str | float | None]] = {
        "rank": lambda linear: f"{linear.rank:,}",
        "share": lambda linear: f"{linear.left / linear.size:.1%}",
        "error": number_under("error"),
        "change of the weight": number_under("change"),
    }
    return [
        Section(
            "Low rank", [sentence, *error_sentences(factored)], figures=figures, details=list_linears(factored, columns)
        )
    ]
