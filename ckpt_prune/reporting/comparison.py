"""The page of a comparison of two models."""

from collections.abc import Callable, Sequence

from ckpt_prune.common.formatting import plural
from ckpt_prune.evaluation.block_comparison import BlockComparison, Comparison
from ckpt_prune.reporting.charts import Point, Series, Style
from ckpt_prune.reporting.escaping import text
from ckpt_prune.reporting.page import details, over_depth, shell
from ckpt_prune.reporting.plots import Figure, shown

Column = tuple[str, Callable[[BlockComparison], float | None]]
COLUMNS: Sequence[Column] = (
    ("MSE", lambda each: each.states.mse),
    ("relative error", lambda each: each.states.relative_error),
    ("cosine", lambda each: each.states.cosine),
    ("CKA", lambda each: each.states.cka),
)
"""Figures of a block, as they are headed."""
_NOTES = {
    "MSE": "Lower is better: mean squared difference of hidden states.",
    "relative error": "Lower is better: squared difference over squared length.",
    "cosine": "Higher is better: mean over tokens.",
    "CKA": "Higher is better: linear centred kernel alignment, which no rotation of the states changes.",
}
_LENS = "Lower is better: divergence of what each model's own head makes of the block's states (logit lens)."
MISSING = "–"


def columns(found: Comparison) -> list[Column]:
    """Those that a comparison has values of."""
    more: list[Column] = [("lens", lambda each: each.divergence)]
    return [*COLUMNS, *(more if found.blocks[0].divergence is not None else [])]


def verdict(found: Comparison) -> str:
    """What the outputs are apart, in a line."""
    what = "KL divergence of the outputs" if found.logits else "relative error of the last hidden states"
    unit = " nats" if found.logits else ""
    of = plural(found.samples, "sample")
    return f"{what} {found.divergence:.4g}{unit}, mean over {of} of {plural(found.tokens, 'token')}"


def rows(found: Comparison) -> list[list[str]]:
    """A line for each block, as tables show it."""
    return [
        [str(each.block), *(MISSING if (value := pick(each)) is None else f"{value:.4g}" for _, pick in columns(found))]
        for each in found.blocks
    ]


def comparison_page(found: Comparison) -> str:
    """The HTML of a comparison, the same for the same input."""
    title = f"{found.model.name} beside {found.reference.name}"
    plots = [
        Figure(
            title=name,
            note=_NOTES.get(name, _LENS),
            unit=name,
            series=(Series(name, Style("after", "circle"), _points(found, pick)),),
            full=(0, 1) if name in ("cosine", "CKA") else None,
            log=name not in ("cosine", "CKA"),
            across="block",
            joined=False,
        )
        for name, pick in columns(found)
        if _points(found, pick)
    ]
    header = f'<header>\n<h1>{text(title)}</h1>\n<p class="soft">{text(verdict(found))}</p>\n</header>'
    names = ("block", *(name for name, _ in columns(found)))
    return shell(title, [header, *over_depth(plots), details("Every block", names, rows(found), left=1)])


def _points(found: Comparison, pick: Callable[[BlockComparison], float | None]) -> tuple[Point, ...]:
    known = [(each.block, value) for each in found.blocks if (value := pick(each)) is not None]
    return tuple(Point(block, value, value, value, shown(value)) for block, value in known)
