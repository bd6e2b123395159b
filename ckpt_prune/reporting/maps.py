"""Heat maps as inline SVG: two panels of one scale, one path for every shade."""

import math
from collections.abc import Sequence

from ckpt_prune.job.report import ImportanceMap, Learned
from ckpt_prune.reporting.charts import HEIGHT, WIDTH, number
from ckpt_prune.reporting.escaping import text
from ckpt_prune.reporting.plots import shown

SHADES = 12
"""Steps of the scale: a path for each."""
SIDE = 64
"""Cells along each side that are drawn at most, whatever a file holds."""
_SPAN = 4
"""Powers of ten that the scale covers at most, below the largest value."""
_TOP, _GAP = 28, 16

Cells = Sequence[Sequence[float | None]]


def map_figures(learned: Sequence[Learned]) -> list[str]:
    """The figure of every map that the report has, as HTML."""
    found = [entry.map for entry in learned if entry.map is not None]
    return [drawn for each in found if (drawn := _figure(each))]


def _figure(own: ImportanceMap) -> str:
    panels = [[row[:SIDE] for row in cells[:SIDE]] for cells in (own.before, own.after)]
    values = [value for cells in panels for row in cells for value in row if value is not None and value > 0]
    if not values:
        return ""
    high = math.log10(max(values))
    low = max(math.log10(min(values)), high - _SPAN)
    told = [f"the largest hundredth holds {value:.1%}" for value in _ends(own)]
    notes = [f"{label}: {told[at]}" if told else label for at, label in enumerate(("before rotation", "after"))]
    title = f"Importance of {own.weight}"
    note = (
        f"Darker is more: means over cells of its {own.rows:,} rows and {own.columns:,} columns, from {shown(10**low)} "
        f"to {shown(10**high)} times the mean, log scale. {notes[0]}; {notes[1]}."
    )
    width = (WIDTH - _GAP) / 2
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(f"{title}. {note}")}">']
    for at, (label, cells) in enumerate(zip(("before", "after"), panels, strict=True)):
        left = at * (width + _GAP)
        parts.append(f'<text class="unit" x="{number(left)}" y="14">{label}</text>')
        parts += _panel(cells, left, width, low, high)
    parts.append("</svg>")
    caption = f"<figcaption><h3>{text(title)}</h3><p>{text(note)}</p></figcaption>"
    return "\n".join(["<figure>", caption, *parts, "</figure>"])


def _ends(own: ImportanceMap) -> list[float]:
    """What the largest weights hold before and after, where both are known."""
    found = [own.largest_before, own.largest_after]
    return [value for value in found if value is not None] if None not in found else []


def _panel(cells: Cells, left: float, width: float, low: float, high: float) -> list[str]:
    """A frame, and the cells of every shade as one path."""
    shades: dict[int, str] = {}
    height = HEIGHT - _TOP
    for down, row in enumerate(cells):
        for across, value in enumerate(row):
            shade = _shade(value, low, high)
            if shade:
                x, y = left + width * across / len(row), _TOP + height * down / len(cells)
                shades[shade] = shades.get(shade, "") + (
                    f"M{number(x)} {number(y)}h{number(width / len(row))}v{number(height / len(cells))}"
                    f"h-{number(width / len(row))}z"
                )
    frame = f"M{number(left)} {_TOP}h{number(width)}v{height}h-{number(width)}z"
    paths = [f'<path d="{path}" fill-opacity="{shade / SHADES:.2f}"/>' for shade, path in sorted(shades.items())]
    return [f'<g class="cells">{"".join(paths)}<path class="frame" d="{frame}"/></g>']


def _shade(value: float | None, low: float, high: float) -> int:
    """From 0, which is not drawn, to `SHADES`."""
    if value is None or not value > 0 or math.log10(value) < low:
        return 0
    share = 1.0 if high <= low else (math.log10(value) - low) / (high - low)
    return 1 + int(share * (SHADES - 1))
