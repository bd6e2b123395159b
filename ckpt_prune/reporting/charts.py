"""Line plots over depth as inline SVG: text and paths only, coloured by the page's style sheet.

A plot is drawn 380 units wide, so that on a phone its 12-unit text is still about 10 pixels high; the page sets several
side by side where there is room.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_prune.reporting.escaping import text
from ckpt_prune.reporting.scales import Axis, block_axis, value_axis

WIDTH, HEIGHT = 380, 236
TEXT = 12
"""Size of all text."""
DIGIT = 7.0
"""What a digit takes at that size: 0.58 of it, as wide as the widest common system fonts have them."""
_TOP, _RIGHT, _BOTTOM = 28, 12, 40
# Half the width of the bar that a spread without neighbours is drawn as.
_BAR = 3
_MARKS = {
    "circle": "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z",
    "square": "M-2.7-2.7H2.7V2.7H-2.7Z",
    "diamond": "M0-3.8L3.8 0L0 3.8L-3.8 0Z",
    "triangle": "M0-3.6L3.5 2.8H-3.5Z",
    "wedge": "M0 3.6L3.5-2.8H-3.5Z",
    "plus": "M-1.2-3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",
    "cross": "M0-1.5L2.2-3.7L3.7-2.2L1.5 0L3.7 2.2L2.2 3.7L0 1.5L-2.2 3.7L-3.7 2.2L-1.5 0L-3.7-2.2L-2.2-3.7Z",
    "bar": "M-1.4-3.9H1.4V3.9H-1.4Z",
}


@dataclass(frozen=True)
class Style:
    """How a line looks: a colour of the style sheet (`.NAME`), a mark and a dash pattern."""

    name: str
    mark: str
    dashes: str = ""


@dataclass(frozen=True)
class Point:
    """One value at one place.

    Attributes:
        place: a block, or a number of blocks.
        value: what is drawn.
        low, high: the ends of the spread it stands for; the value itself where there is none.
        text: the value in words, for the tooltip.
    """

    place: int
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Series:
    """One line: its points with ascending places."""

    label: str
    style: Style
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """A drawn plot.

    Attributes:
        svg: the element.
        below: whether some values lie below a log axis and are drawn, hollow, at its foot.
    """

    svg: str
    below: bool


def draw(
    series: Sequence[Series],
    *,
    description: str,
    unit: str,
    full: tuple[float, float] | None = None,
    log: bool = True,
    across: str = "block",
    joined: bool = False,
) -> Chart:
    """Plot series over blocks, or over numbers of blocks.

    Args:
        series: at least one, with at least one point between them; drawn in this order.
        description: what the plot shows, for those who cannot see it.
        unit: of the values, written above their axis.
        full: values the axis covers in any case.
        log: whether a log scale may be taken (`value_axis`).
        across: what the places are, written below their axis and, before the number, in tooltips.
        joined: whether lines go on over places without a point; they are gaps otherwise.
    """
    points = [point for line in series for point in line.points]
    bounds = [bound for point in points for bound in (point.low, point.value, point.high)]
    places = sorted({point.place for point in points})
    y = value_axis(bounds, HEIGHT - _BOTTOM, _TOP, full=full, log=log)
    left = 10 + DIGIT * max(len(label) for label in y.labels)
    x = block_axis(places[0], places[-1], left, WIDTH - _RIGHT, digit=DIGIT)
    size = _mark_size(x)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(description)}">',
        *_frame(x, y, unit, across),
        *(_band(_runs(line, joined=joined), line.style, x, y) for line in series),
        *(_line(_runs(line, joined=joined), line.style, x, y) for line in series),
        *(_marks(line, x, y, size) for line in series),
        *_columns(series, places, across, x, y),
        "</svg>",
    ]
    return Chart("\n".join(part for part in parts if part), any(not y.shows(point.value) for point in points))


def swatch(style: Style) -> str:
    """A piece of a series' line with its mark, for a legend."""
    return (
        f'<svg class="{style.name}" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f'<path class="line"{_dashes(style)} d="M1 6H27"/>'
        f'<path class="mark" transform="translate(14 6)" d="{_MARKS[style.mark]}"/></svg>'
    )


def _frame(x: Axis, y: Axis, unit: str, across: str) -> Iterable[str]:
    """Grid lines, tick labels and what the axes count."""
    right = number(x.end)
    scale = ", log scale" if y.log else ""
    yield f'<text class="unit" x="4" y="14">{text(unit + scale)}</text>'
    yield '<g class="grid">'
    for tick in y.ticks:
        yield f'<path class="y" d="M{number(x.start)} {number(y.at(tick))}H{right}"/>'
    yield f'<path class="base" d="M{number(x.start)} {number(y.start)}H{right}"/>'
    for tick in x.ticks:
        yield f'<path class="x" d="M{number(x.at(tick))} {number(y.start)}v4"/>'
    yield '</g>\n<g class="tick">'
    for tick, label in zip(y.ticks, y.labels, strict=True):
        # A third of the text below the line centres digits on it.
        yield (
            f'<text class="y" x="{number(x.start - 6)}" y="{number(y.at(tick) + TEXT / 3)}" '
            f'text-anchor="end">{label}</text>'
        )
    for tick, label in zip(x.ticks, x.labels, strict=True):
        yield (
            f'<text class="x" x="{number(x.at(tick))}" y="{number(y.start + 17)}" text-anchor="middle">{label}</text>'
        )
    yield "</g>"
    yield f'<text class="unit" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{text(across)}</text>'


def _runs(line: Series, *, joined: bool) -> list[list[Point]]:
    """A line's points, parted where a place is missing; where it is joined, all in one."""
    runs: list[list[Point]] = []
    for point in line.points:
        if runs and (joined or point.place == runs[-1][-1].place + 1):
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _band(runs: Sequence[Sequence[Point]], style: Style, x: Axis, y: Axis) -> str:
    """From the low to the high ends; a place with no neighbours has a bar of its own."""
    path = ""
    for run in runs:
        if all(point.low == point.high for point in run):
            continue
        offsets = (-_BAR, _BAR) if len(run) == 1 else (0,)
        above = [(x.at(point.place) + offset, y.at(point.high)) for point in run for offset in offsets]
        beneath = [(x.at(point.place) + offset, y.at(point.low)) for point in run for offset in offsets]
        path += _path(above + beneath[::-1]) + "Z"
    return f'<path class="band {style.name}" d="{path}"/>' if path else ""


def _line(runs: Sequence[Sequence[Point]], style: Style, x: Axis, y: Axis) -> str:
    path = ""
    for run in runs:
        # A line into the foot of a log axis would claim a value there.
        shown: list[list[Point]] = [[]]
        for point in run:
            if y.shows(point.value):
                shown[-1].append(point)
            else:
                shown.append([])
        path += "".join(_path([(x.at(p.place), y.at(p.value)) for p in part]) for part in shown if len(part) > 1)
    return f'<path class="line {style.name}"{_dashes(style)} d="{path}"/>' if path else ""


def _marks(line: Series, x: Axis, y: Axis, size: float) -> str:
    shrink = "" if size == 1 else f" scale({number(size)})"
    marks = []
    for point in line.points:
        place = f"translate({number(x.at(point.place))} {number(y.at(point.value))})"
        kind = "mark" if y.shows(point.value) else "off"
        marks.append(f'<path class="{kind}" transform="{place}{shrink}" d="{_MARKS[line.style.mark]}"/>')
    return f'<g class="{line.style.name}">{"".join(marks)}</g>' if marks else ""


def _columns(series: Sequence[Series], places: Sequence[int], across: str, x: Axis, y: Axis) -> Iterable[str]:
    """Over each place an area that shows nothing but, pointed at, every value there."""
    pitch = x.at(x.low + 1) - x.start
    yield '<g class="over">'
    for place in places:
        lines = [f"{across} {place}"]
        lines += [f"{line.label}: {point.text}" for line in series for point in line.points if point.place == place]
        yield (
            f'<rect x="{number(x.at(place) - pitch / 2)}" y="{number(y.end)}" width="{number(pitch)}" '
            f'height="{number(y.start - y.end)}"><title>{text(chr(10).join(lines))}</title></rect>'
        )
    yield "</g>"


def _mark_size(x: Axis) -> float:
    """Smaller marks where places are so near that full ones would touch."""
    pitch = (x.end - x.start) / (x.high - x.low)
    return 1 if pitch >= 9 else 0.7 if pitch >= 5 else 0.45


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in corners)


def _dashes(style: Style) -> str:
    return f' stroke-dasharray="{style.dashes}"' if style.dashes else ""


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
