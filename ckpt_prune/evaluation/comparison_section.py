"""The section about a comparison of two models."""

from collections.abc import Callable, Mapping, Sequence

from ckpt_prune.common.formatting import plural
from ckpt_prune.evaluation.block_comparison import BlockComparison, Comparison
from ckpt_prune.show.section import MISSING, Section, Table, draw_figure, draw_line

_NOTES = {
    "MSE": "Lower is better: mean squared difference of hidden states.",
    "relative error": "Lower is better: squared difference over squared length.",
    "cosine": "Higher is better: mean over tokens.",
    "CKA": "Higher is better: linear centred kernel alignment, which no rotation of the states changes.",
}


def show_comparison(comparison: Comparison) -> Section:
    """Say how far the outputs are apart, and show a row and a figure of what leaves every block."""
    columns: Mapping[str, Callable[[BlockComparison], float | None]] = {
        "MSE": lambda block: block.states.mse,
        "relative error": lambda block: block.states.relative_error,
        "cosine": lambda block: block.states.cosine,
        "CKA": lambda block: block.states.cka,
    }
    shares: Mapping[str, Callable[[BlockComparison], float | None]] = {
        "input error": lambda block: block.errors.input_error,
        "local error": lambda block: block.errors.local_error,
        "growth": lambda block: block.errors.growth,
    }
    picks = [*columns.values(), *shares.values()]
    others = any(each.reference for each in comparison.blocks)
    rows = [
        [
            str(each.block),
            *([_name(each.partners)] if others else []),
            *(MISSING if (value := pick(each)) is None else f"{value:.4g}" for pick in picks),
        ]
        for each in comparison.blocks
    ]
    figures = [
        figure
        for name, pick in columns.items()
        for figure in draw_figure(
            name,
            _NOTES[name],
            name,
            draw_line(name, comparison.blocks, pick),
            full=(0, 1) if name in ("cosine", "CKA") else None,
            log=name not in ("cosine", "CKA"),
        )
    ]
    what = "KL divergence of the outputs" if comparison.logits else "relative error of the last hidden states"
    sentence = (
        f"{what} {comparison.divergence:.4g}{' nats' if comparison.logits else ''}, mean over "
        f"{plural(comparison.samples, 'sample')} of {plural(comparison.tokens, 'token')}"
    )
    table = Table(["block", *(["of A"] if others else []), *columns, *shares], rows)
    return Section("Hidden states, block by block", [sentence], tables=[table], figures=figures)


def _name(blocks: Sequence[int]) -> str:
    return str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
