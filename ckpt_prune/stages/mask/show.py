"""Sections of the stage `mask`."""

from collections.abc import Callable

from ckpt_prune.common.formatting import human_count, plural
from ckpt_prune.common.records import Record
from ckpt_prune.common.zero_patterns import describe_mask
from ckpt_prune.show.section import Section, name_some, number_under
from ckpt_prune.stages.mask.records import MaskedLinear
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.show_linears import draw_by_kind, error_sentences, list_linears, place_of

_DENSE = (
    "The tensors keep their dense shapes, zeros included, so size and speed are unchanged by the mask unless a runtime "
    "makes use of the zeros."
)
_PACKED = (
    "For 2:4 torch.sparse.to_sparse_semi_structured does, on NVIDIA GPUs of compute capability 8.0 or later; vLLM "
    "removed its support of 2:4."
)


def sections(report: Report) -> list[Section]:
    """Say how many weights are zero, and what error that leaves at the outputs of the linear modules."""
    mask, asked = report.mask, report.recipe.entries.get("mask")
    damp = Record.read(asked).figure("damp") if isinstance(asked, dict) else None
    linears = sorted(report.linears, key=lambda linear: linear.block)
    if not linears:
        return []
    zeros, size = sum(linear.zeros for linear in linears), sum(linear.size for linear in linears)
    how = "" if mask is None else f"by {describe_mask(mask.method, mask.pattern, mask.only)}"
    count = plural(len(linears), "linear weight")
    sentences = [f"Masked {how}: {zeros / size:.2%} zeros in {count} of {human_count(size)} parameters."]
    if mask is not None and mask.shares is not None and mask.shares.ratios:
        ratios, kept = mask.shares.ratios, mask.shares.kept
        span = f"{min(ratios):.1%} to {max(ratios):.1%} zeros"
        if kept:
            span = f"{min(kept)} to {max(kept)} of {mask.pattern.partition(':')[2]} weights kept"
        sentences.append(f"Zeros are shared out over blocks by {mask.allocation}: {span}.")
    sentences += error_sentences(linears)
    damped = [linear for linear in linears if linear.damp is not None and damp is not None and linear.damp > damp]
    if damped:
        most = max(linear.damp or 0 for linear in damped)
        sentences.append(
            f"{len(damped)} of {len(linears)} Hessians were singular with damping {damp:g} and took up to {most:g}: "
            f"use more samples ({name_some([place_of(linear) for linear in damped], 3)})."
        )
    explanations = [_DENSE] if zeros else []
    explanations += [_PACKED] if zeros and mask is not None and mask.pattern == "2:4" else []
    if all(linear.error is None for linear in linears):
        why = "it needs --diagnostics and the Grams of their inputs"
        if mask is not None and mask.method == "magnitude":
            why = "a magnitude mask looks at no calibration data"
        explanations.append(f"The error of their outputs was not measured: {why}.")
    figures = draw_by_kind(
        "Output error of the linears",
        "Lower is better: what the mask changed in a linear's own output, on the calibration data.",
        "share of output energy",
        linears,
        "error",
    )
    columns: dict[str, Callable[[MaskedLinear], str | float | None]] = {
        "zeros": lambda linear: f"{linear.zeros:,}",
        "share": lambda linear: f"{linear.zeros / linear.size:.1%}",
        "error": number_under("error"),
        "damping": number_under("damp"),
        "dead inputs": number_under("dead"),
    }
    return [Section("Mask", sentences, explanations, figures=figures, details=list_linears(linears, columns))]


def source_lines(report: Report) -> list[str]:
    """Say that a model which is changed further was masked."""
    if report.mask is None:
        return []
    masked = describe_mask(report.mask.method, report.mask.pattern, report.mask.only)
    return [
        f"this model was masked before ({masked}): what is rewritten now loses those zeros, and another mask chooses "
        "anew; see `ckpt-prune inspect OUT --sparsity`"
    ]


def count_zeros(report: Report) -> int:
    """Return how many of an output's weights are zeros of its mask."""
    return sum(linear.zeros for linear in report.linears)
