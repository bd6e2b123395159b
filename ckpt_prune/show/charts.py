"""Figures as inline SVG: text and paths only, coloured by the page's style sheet.

A figure is drawn 380 units wide, so that on a phone its 12-unit text is still about 10 pixels high.
"""

import html
import math
import re
from collections.abc import Iterator, Sequence

from ckpt_prune.common.safe_text import CONTROL_CHARACTERS
from ckpt_prune.show.axes import Axis, block_axis, value_axis
from ckpt_prune.show.section import DECADES, Figure, HeatMap, Line, Point

WIDTH, HEIGHT = 380, 236
TEXT = 12
"""Size of all text."""
DIGIT = 7.0
"""Width of a digit at that size: 0.58 of it, as in the widest common system fonts."""
_TOP, _RIGHT, _BOTTOM = 28, 12, 40
_BAR = 3
"""Half the width of the bar that a spread without neighbours is drawn as."""
MARKS = (
    "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z",
    "M-2.7-2.7H2.7V2.7H-2.7Z",
    "M0-3.8L3.8 0L0 3.8L-3.8 0Z",
    "M0-3.6L3.5 2.8H-3.5Z",
    "M0 3.6L3.5-2.8H-3.5Z",
    "M-1.2-3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",
    "M0-1.5L2.2-3.7L3.7-2.2L1.5 0L3.7 2.2L2.2 3.7L0 1.5L-2.2 3.7L-3.7 2.2L-1.5 0L-3.7-2.2L-2.2-3.7Z",
    "M-1.4-3.9H1.4V3.9H-1.4Z",
)
"""A mark for each line of a figure. The style sheet has as many colours: .line-0, .line-1, ..."""
SHADES = 12
"""Steps of the scale of a heat map: a path for each."""
SIDE = 64
"""Cells along each side of a heat map that are drawn at most, whatever a file holds."""
_GAP = 16
# XML has no controls, no halves of surrogate pairs (JSON can hold them) and no non-characters.
_IMPOSSIBLE = re.compile(f"{CONTROL_CHARACTERS.pattern}|[\ufffe\uffff]")


def escape(text: str) -> str:
    """Escape text for HTML and SVG, as content or as a quoted attribute; what a page cannot hold becomes U+FFFD."""
    return html.escape(_IMPOSSIBLE.sub("\ufffd", text))


def draw(figure: Figure) -> str:
    """Draw lines over places, in their order. There is at least one point."""
    points = [point for line in figure.lines for point in line.points]
    bounds = [bound for point in points for bound in (point.low, point.value, point.high)]
    places = sorted({point.place for point in points})
    y = value_axis(bounds, HEIGHT - _BOTTOM, _TOP, full=figure.full, log=figure.log)
    x = block_axis(
        places[0], places[-1], 10 + DIGIT * max(len(label) for label in y.labels), WIDTH - _RIGHT, digit=DIGIT
    )
    # The first line comes last, so that it is seen where others lie on it.
    lines = list(enumerate(figure.lines))[::-1]
    runs = [(_runs(line, joined=figure.joined), number) for number, line in lines]
    parts = [
        *_frame(x, y, figure.unit, figure.across),
        *(_band(points, number, x, y) for points, number in runs),
        *(_stroke(points, number, x, y) for points, number in runs),
        *(_marks(line, number, x, y) for number, line in lines),
        *_tooltips(figure, places, x, y),
    ]
    return _svg(f"{figure.title}. {figure.note}", parts)


def has_hidden(figure: Figure) -> bool:
    """Return True if values lie below a log axis; they are drawn, hollow, at its foot."""
    points = [point for line in figure.lines for point in line.points]
    bounds = [bound for point in points for bound in (point.low, point.value, point.high)]
    axis = value_axis(bounds, 0, 1, full=figure.full, log=figure.log)
    return any(not axis.shows(point.value) for point in points)


def draw_legend(number: int) -> str:
    """Draw a piece of a line with its mark."""
    return (
        f'<svg class="line-{number % len(MARKS)}" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f'<path class="line" d="M1 6H27"/>'
        f'<path class="mark" transform="translate(14 6)" d="{MARKS[number % len(MARKS)]}"/></svg>'
    )


def draw_bar(share: float, most: float) -> str:
    """Draw a percentage as a bar on a track that ends at 100, and what is above 100 in another colour.

    Args:
        most: the percentage that fills the width, at least 100.
    """
    track, bar, more = (_pixel(120 * value / most) for value in (100, min(share, 100), max(share - 100, 0)))
    return (
        '<svg class="bar" viewBox="0 0 120 10" width="120" height="10" aria-hidden="true">'
        f'<rect class="track" width="{track}" height="10"/><rect y="2" width="{bar}" height="6"/>'
        f'<rect class="more" x="{track}" y="2" width="{more}" height="6"/></svg>'
    )


def _svg(description: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}">'
    return "\n".join([head, *filter(None, parts), "</svg>"])


def _frame(x: Axis, y: Axis, unit: str, across: str) -> Iterator[str]:
    """Yield grid lines, tick labels and what the axes count."""
    right = _pixel(x.end)
    yield f'<text class="unit" x="4" y="14">{escape(unit)}{", log scale" if y.log else ""}</text>'
    yield '<g class="grid">'
    yield from (f'<path class="y" d="M{_pixel(x.start)} {_pixel(y.at(tick))}H{right}"/>' for tick in y.ticks)
    yield f'<path class="base" d="M{_pixel(x.start)} {_pixel(y.start)}H{right}"/>'
    yield from (f'<path class="x" d="M{_pixel(x.at(tick))} {_pixel(y.start)}v4"/>' for tick in x.ticks)
    yield '</g>\n<g class="tick">'
    for tick, label in zip(y.ticks, y.labels, strict=True):
        height = _pixel(y.at(tick) + TEXT / 3)  # a third of the text below the line centres digits on it
        yield f'<text class="y" x="{_pixel(x.start - 6)}" y="{height}" text-anchor="end">{label}</text>'
    for tick, label in zip(x.ticks, x.labels, strict=True):
        yield f'<text class="x" x="{_pixel(x.at(tick))}" y="{_pixel(y.start + 17)}" text-anchor="middle">{label}</text>'
    yield "</g>"
    yield f'<text class="unit" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(across)}</text>'


def _runs(line: Line, *, joined: bool) -> list[list[Point]]:
    """Return a line's points, split at missing places; all in one if the line is joined."""
    runs: list[list[Point]] = []
    for point in line.points:
        if runs and (joined or point.place == runs[-1][-1].place + 1):
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _band(runs: Sequence[Sequence[Point]], number: int, x: Axis, y: Axis) -> str:
    """Draw the area from the low to the high ends; a place without neighbours has a bar of its own."""
    path = ""
    for run in runs:
        if all(point.low == point.high for point in run):
            continue
        offsets = (-_BAR, _BAR) if len(run) == 1 else (0,)
        above = [(x.at(point.place) + offset, y.at(point.high)) for point in run for offset in offsets]
        beneath = [(x.at(point.place) + offset, y.at(point.low)) for point in run for offset in offsets]
        path += _path(above + beneath[::-1]) + "Z"
    return f'<path class="band line-{number % len(MARKS)}" d="{path}"/>' if path else ""


def _stroke(runs: Sequence[Sequence[Point]], number: int, x: Axis, y: Axis) -> str:
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
    return f'<path class="line line-{number % len(MARKS)}" d="{path}"/>' if path else ""


def _marks(line: Line, number: int, x: Axis, y: Axis) -> str:
    """Draw a mark for each point; smaller ones where places are so near that full ones would touch."""
    pitch = (x.end - x.start) / (x.high - x.low)
    shrink = "" if pitch >= 9 else " scale(0.7)" if pitch >= 5 else " scale(0.45)"
    marks = []
    for point in line.points:
        place = f"translate({_pixel(x.at(point.place))} {_pixel(y.at(point.value))})"
        kind = "mark" if y.shows(point.value) else "off"
        marks.append(f'<path class="{kind}" transform="{place}{shrink}" d="{MARKS[number % len(MARKS)]}"/>')
    return f'<g class="line-{number % len(MARKS)}">{"".join(marks)}</g>' if marks else ""


def _tooltips(figure: Figure, places: Sequence[int], x: Axis, y: Axis) -> Iterator[str]:
    """Yield an invisible area over each place; pointed at, it shows every value there."""
    pitch = x.at(x.low + 1) - x.start
    yield '<g class="over">'
    for place in places:
        lines = [f"{figure.across} {place}"]
        lines += [
            f"{line.name}: {point.text}" for line in figure.lines for point in line.points if point.place == place
        ]
        yield (
            f'<rect x="{_pixel(x.at(place) - pitch / 2)}" y="{_pixel(y.end)}" width="{_pixel(pitch)}" '
            f'height="{_pixel(y.start - y.end)}"><title>{escape(chr(10).join(lines))}</title></rect>'
        )
    yield "</g>"


def draw_heat_map(heat_map: HeatMap) -> str:
    """Draw panels side by side on one log scale, one path for every shade; empty if no value is above 0."""
    panels = {name: [row[:SIDE] for row in cells[:SIDE]] for name, cells in heat_map.panels.items()}
    values = [value for cells in panels.values() for row in cells for value in row if value is not None and value > 0]
    if not values:
        return ""
    high = math.log10(max(values))
    low = max(math.log10(min(values)), high - math.log10(DECADES))
    width, height = (WIDTH - _GAP * (len(panels) - 1)) / len(panels), HEIGHT - _TOP
    parts = []
    for number, (name, cells) in enumerate(panels.items()):
        left_edge = number * (width + _GAP)
        shades: dict[int, str] = {}
        for down, row in enumerate(cells):
            cell = (
                f"h{_pixel(width / len(row))}v{_pixel(height / len(cells))}h-{_pixel(width / len(row))}z" if row else ""
            )
            for across, value in enumerate(row):
                if value is not None and value > 0 and math.log10(value) >= low:
                    share = 1.0 if high <= low else (math.log10(value) - low) / (high - low)
                    place = (
                        f"M{_pixel(left_edge + width * across / len(row))} {_pixel(_TOP + height * down / len(cells))}"
                    )
                    shade = 1 + int(share * (SHADES - 1))
                    shades[shade] = shades.get(shade, "") + place + cell
        paths = [f'<path d="{path}" fill-opacity="{shade / SHADES:.2f}"/>' for shade, path in sorted(shades.items())]
        frame = f"M{_pixel(left_edge)} {_TOP}h{_pixel(width)}v{height}h-{_pixel(width)}z"
        parts.append(f'<text class="unit" x="{_pixel(left_edge)}" y="14">{escape(name)}</text>')
        parts.append(f'<g class="cells">{"".join(paths)}<path class="frame" d="{frame}"/></g>')
    return _svg(f"{heat_map.title}. {heat_map.note}", parts)


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_pixel(a)} {_pixel(b)}" for a, b in corners)


def _pixel(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
