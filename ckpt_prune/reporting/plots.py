"""What is plotted: one entry of `PLOTS` per quantity.

A new quantity of a site, a block, a linear or a rotation needs an entry here and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt_prune.common.records import Record
from ckpt_prune.job.records import FactoredLinear, MaskedLinear, SiteRecord
from ckpt_prune.job.recovery_records import RecoveredLayer
from ckpt_prune.job.report import Learned, Perplexity
from ckpt_prune.report.figures import inputs_of, kind_of, relative_floor
from ckpt_prune.reporting.charts import Point, Series, Style

Pick = Callable[[Any], Sequence[tuple[str, float]]]
"""The named values of a site (or of another record): none where it was not measured, one, or one per head, which are
shown as their mean and spread."""


@dataclass(frozen=True)
class Space:
    """How a space, or a kind of linear, is spoken of.

    Attributes:
        label: in titles and legends.
        target: what the errors of its sites are errors of, as an adjective.
        style: of its line where a plot has one line per space, or kind.
    """

    label: str
    target: str
    style: Style


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        label: in the legend.
        style: how it looks.
        pick: its values.
        remark: what else to say of a record's value, in the tooltip; an empty text says nothing.
    """

    label: str
    style: Style
    pick: Pick
    remark: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Plot:
    """One quantity over depth.

    Attributes:
        title: `{space}` and `{target}` stand for the words of the space.
        note: what better is, in a line.
        unit: of the values; `{target}` as above.
        lines: of sites and linears, several give a plot per space (kind); a single one gives one plot with a line per
            space (kind), named after it. Of what has neither, one plot.
        full: range its axis covers in any case.
        log: whether its axis may be logarithmic.
        varying: shown only where some line is not constant.
        of: which records of the report; those of "perplexities" lie not at a block but at a number of blocks.
    """

    title: str
    note: str
    unit: str
    lines: tuple[Line, ...]
    full: tuple[float, float] | None = None
    log: bool = True
    varying: bool = False
    of: Literal["sites", "layers", "linears", "factored", "learned", "perplexities"] = "sites"


@dataclass(frozen=True)
class Figure:
    """A plot filled with the values of a report.

    Attributes:
        across, joined: what the places of its points are, and whether those that lack one are no gaps (`charts.draw`).
    """

    title: str
    note: str
    unit: str
    series: tuple[Series, ...]
    full: tuple[float, float] | None
    log: bool
    across: str
    joined: bool


SPACES = {
    "mlp": Space("MLP", "output", Style("mlp", "circle")),
    "heads": Space("Attention heads", "output", Style("heads", "square")),
    "queries": Space("Query heads in groups", "output", Style("queries", "wedge")),
    "values": Space("Values", "output", Style("values", "plus")),
    "qk": Space("Q/K", "logit", Style("qk", "diamond")),
    "rotary": Space("Rotary pairs", "logit", Style("rotary", "cross")),
}
KINDS = {
    kind: Space(kind, "output", Style(kind, mark))
    for kind, mark in (
        *(("q", "circle"), ("k", "square"), ("v", "diamond"), ("o", "wedge")),
        *(("gate", "plus"), ("up", "cross"), ("down", "bar")),
    )
}
"""The kinds of linears (`Family.labels`)."""
_BEFORE, _AFTER = Style("before", "circle"), Style("after", "square")
_HELD_OUT, _FLOOR = Style("held-out", "diamond", "5 3"), Style("floor", "triangle", "1.5 3")
_START = Style("other", "diamond", "5 3")


def figure(key: str) -> Pick:
    """The site's number under a key of the report."""

    def pick(record: Record) -> list[tuple[str, float]]:
        return _named(record.figure(key))

    return pick


def of_heads(key: str) -> Pick:
    """The number under a key, head by head."""

    def pick(site: SiteRecord) -> list[tuple[str, float]]:
        found = [(f"head {head.head}", head.figure(key)) for head in site.heads or []]
        return [(name, value) for name, value in found if value is not None]

    return pick


def of_shift(key: str) -> Pick:
    """The number under a key of what the site loses on other samples."""

    def pick(site: SiteRecord) -> list[tuple[str, float]]:
        return _named(None if site.shift is None else site.shift.figure(key))

    return pick


def _held_against_others(site: SiteRecord) -> list[tuple[str, float]]:
    return [] if site.shift is None else _named(site.figure("error_compensated"))


def share_of_width(key: str) -> Pick:
    """The number under a key as a share of the inputs of the consumer."""

    def pick(site: SiteRecord) -> list[tuple[str, float]]:
        value, width = site.figure(key), inputs_of(site)
        return _named(None if value is None or width is None else value / width)

    return pick


def steps_taken(learned: Learned) -> str:
    """How many steps a rotation was trained; empty where that is not known."""
    return "" if learned.steps is None else count_of_steps(learned.steps)


def count_of_steps(steps: int) -> str:
    """Steps in words."""
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def outcome(layer: RecoveredLayer) -> str:
    """Which weights a block ended with."""
    kept = f"weights of epoch {layer.best_epoch:,}" if layer.recovered else "old weights kept"
    return f"training diverged, {kept}" if layer.diverged else kept


def _unless_recovered(layer: RecoveredLayer) -> str:
    """Its outcome where that is not what recovery is for."""
    return "" if layer.recovered and not layer.diverged else outcome(layer)


PLOTS = (
    Plot(
        "{space}: {target} error",
        "Lower is better. No compensation of this kind gets below the floor.",
        "share of {target} energy",
        (
            Line("uncompensated", _BEFORE, figure("error_uncompensated")),
            Line("compensated", _AFTER, figure("error_compensated")),
            Line("held out", _HELD_OUT, figure("error_held_out")),
            Line("floor", _FLOOR, lambda site: _named(relative_floor(site))),
        ),
    ),
    Plot(
        "{space}: {target} error per head",
        "Lower is better. Line: mean of the heads; band: from the least to the largest.",
        "share of the head's {target} energy",
        (
            Line("uncompensated", _BEFORE, of_heads("error_uncompensated")),
            Line("compensated", _AFTER, of_heads("error_compensated")),
        ),
    ),
    Plot(
        "ρ²: what the kept units predict",
        "Higher is better: the share of what was dropped that compensation can restore at most.",
        "share of the dropped variance",
        (Line("", _BEFORE, figure("rho2")),),
        full=(0, 1),
    ),
    Plot(
        "ρ² per head",
        "Higher is better. Line: mean of the heads; band: from the least to the largest.",
        "share of the dropped variance",
        (Line("", _BEFORE, of_heads("rho2")),),
        full=(0, 1),
    ),
    Plot(
        "{space}: rank of the inputs",
        "Lower means more redundant, easier to prune. k95: directions that hold 95 % of the variance.",
        "share of the width",
        (
            Line("effective rank", _AFTER, share_of_width("effective_rank")),
            Line("k95", _BEFORE, share_of_width("k95")),
        ),
        log=False,
    ),
    Plot(
        "Active inputs",
        "Lower means sparser: inputs that are zero on most tokens cost little when dropped.",
        "mean share of tokens",
        (Line("", _BEFORE, figure("active")),),
        full=(0, 1),
    ),
    Plot(
        "{space}: {target} error on other samples",
        "Lower is better: of what was made from the calibration samples, on those of --test.",
        "share of {target} energy",
        (
            Line("uncompensated", _BEFORE, of_shift("uncompensated")),
            Line("compensated", _AFTER, of_shift("test")),
            Line("compensated, calibration", _HELD_OUT, _held_against_others),
            Line("floor", _FLOOR, of_shift("floor")),
        ),
    ),
    Plot(
        "How far other samples are from the calibration's",
        "Lower is nearer: the norm of the difference of covariances (of Q/K: of the equations of the fit).",
        "share of the calibration's norm",
        (Line("", _BEFORE, of_shift("covariances")),),
    ),
    Plot(
        "Degrees of freedom",
        "Lower overfits less: the numbers that the compensation is free to choose (RCPU, section 4.2).",
        "numbers",
        (Line("", _BEFORE, of_shift("freedom")),),
    ),
    Plot(
        "Units kept",
        "Where the budget went: the recipe lets blocks differ.",
        "share of the units",
        (Line("", _BEFORE, lambda site: [("", len(site.kept) / site.units)]),),
        full=(0, 1),
        varying=True,
    ),
    Plot(
        "Output error of the linears",
        "Lower is better: what the mask changed in a linear's own output, on the calibration data.",
        "share of output energy",
        (Line("", _BEFORE, figure("error")),),
        of="linears",
    ),
    Plot(
        "Output error of the factored linears",
        "Lower is better: what two thin linears change in the output of one, on the calibration data.",
        "share of output energy",
        (Line("", _BEFORE, figure("error")),),
        of="factored",
    ),
    Plot(
        "Parameters of the factors",
        "Where the ranks went: the recipe lets linears differ.",
        "share of the weight's",
        (Line("", _BEFORE, lambda linear: [("", linear.left / linear.size)]),),
        full=(0, 1),
        log=False,
        of="factored",
        varying=True,
    ),
    Plot(
        "Entropy of the importance",
        "Lower is better: the same importance in fewer weights, so the others can go to zero.",
        "nats",
        (
            Line("before rotation", _BEFORE, figure("entropy_before")),
            Line("after rotation", _AFTER, figure("entropy_after"), steps_taken),
        ),
        log=False,
        of="learned",
    ),
    Plot(
        "Error of the hidden states",
        "Lower is better: against the dense model, on held-out samples. Start: the block with its old weights, behind "
        "recovered blocks.",
        "mean squared error",
        (
            Line("before recovery", _BEFORE, figure("mse_before")),
            Line("start", _START, figure("mse_start")),
            Line("after recovery", _AFTER, figure("mse_after"), _unless_recovered),
        ),
        of="layers",
    ),
    Plot(
        "Linear CKA of the hidden states",
        "Higher is better: 1 where they are those of the dense model but for rotation and scale. Held-out samples.",
        "linear CKA",
        (
            Line("before recovery", _BEFORE, figure("cka_before")),
            Line("after recovery", _AFTER, figure("cka_after"), _unless_recovered),
        ),
        full=(0, 1),
        of="layers",
    ),
    Plot(
        "Perplexity over recovered blocks",
        "Lower is better: on held-out windows, with only so many of the first blocks recovered and the others as "
        "pruned.",
        "perplexity",
        (Line("perplexity", _AFTER, figure("perplexity")),),
        of="perplexities",
    ),
)


def figures(
    sites: Sequence[SiteRecord],
    layers: Sequence[RecoveredLayer] = (),
    linears: Sequence[MaskedLinear] = (),
    learned: Sequence[Learned] = (),
    perplexities: Sequence[Perplexity] = (),
    plots: Sequence[Plot] = PLOTS,
    factored: Sequence[FactoredLinear] = (),
) -> list[Figure]:
    """Every plot that has something to show, in the order of `plots`, then of the spaces.

    Args:
        sites: ascending blocks.
        layers: ascending blocks.
        linears: ascending blocks.
        learned: rotations, ascending blocks; one that all blocks share has no place over depth.
        perplexities: ascending numbers of recovered blocks. Between them are no gaps: they are chosen by whoever
            recovers.
        plots: what to show.
        factored: ascending blocks.
    """
    parts: dict[str, list[tuple[Space, Sequence[Record]]]] = {
        "sites": _apart(SPACES, [(site.space, site) for site in sites]),
        "layers": [(words(""), layers)],
        "linears": _apart(KINDS, [(kind_of(linear), linear) for linear in linears]),
        "factored": _apart(KINDS, [(kind_of(linear), linear) for linear in factored]),
        "learned": [(words(""), [entry for entry in learned if entry.block is not None])],
        "perplexities": [(words(""), perplexities)],
    }
    return [figure for plot in plots for figure in _filled(plot, parts[plot.of])]


def words(name: str) -> Space:
    """How a space or a kind of linear is spoken of; one that is not known here by its own name."""
    return (SPACES | KINDS).get(name, Space(name, "output", Style("other", "triangle")))


def shown(value: float) -> str:
    """A number with three significant digits; whole numbers and large ones without a point."""
    if abs(value) >= 1e6:  # or infinite, between ends of an axis that are both near the largest float
        return f"{value:.2e}"
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 1e-4 else f"{value:.2e}"


def _apart(known: Mapping[str, Space], named: Sequence[tuple[str, Record]]) -> list[tuple[Space, Sequence[Record]]]:
    """Records by name, in the order of `known`, then any others."""
    present = {name: None for name, _ in named}
    order = [name for name in known if name in present] + [name for name in present if name not in known]
    return [(words(name), [record for own, record in named if own == name]) for name in order]


def _filled(plot: Plot, parts: Sequence[tuple[Space, Sequence[Any]]]) -> list[Figure]:
    groups: list[tuple[Space, list[Series]]]
    if plot.of in ("sites", "linears", "factored") and len(plot.lines) == 1:
        line = plot.lines[0]
        groups = [(words(""), [_series(line, own, label=space.label, style=space.style) for space, own in parts])]
    else:
        groups = [
            (space, [_series(line, own, label=line.label, style=line.style) for line in plot.lines])
            for space, own in parts
        ]
    joined = plot.of == "perplexities"
    across = "blocks recovered" if joined else "block"
    found = []
    for space, lines in groups:
        series = tuple(line for line in lines if line.points)
        varies = any(len({point.value for point in line.points}) > 1 for line in series)
        if series and (varies or not plot.varying):
            title, unit = (text.format(space=space.label, target=space.target) for text in (plot.title, plot.unit))
            found.append(Figure(title, plot.note, unit, series, plot.full, plot.log, across, joined))
    return found


def _series(line: Line, records: Sequence[Any], *, label: str, style: Style) -> Series:
    points = []
    for record in records:
        named = line.pick(record)
        if not named:
            continue
        values = [value for _, value in named]
        mean, low, high = sum(values) / len(values), min(values), max(values)
        text = shown(mean)
        if len(values) > 1:
            least, most = (next(name for name, value in named if value == end) for end in (low, high))
            text = f"mean {text}, from {shown(low)} ({least}) to {shown(high)} ({most})"
        remark = line.remark(record) if line.remark is not None else ""
        text += f", {remark}" if remark else ""
        place = record.blocks if isinstance(record, Perplexity) else record.block
        # A mean of equal numbers may lie a rounding outside them.
        points.append(Point(place, min(max(mean, low), high), low, high, text))
    return Series(label, style, tuple(points))


def _named(value: float | None) -> list[tuple[str, float]]:
    return [] if value is None else [("", value)]
