"""Drawing: values at their pixels, gaps, spreads, and labels that can be read."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.show.axes import value_axis
from ckpt_prune.show.charts import (
    HEIGHT,
    SHADES,
    SIDE,
    TEXT,
    WIDTH,
    draw,
    draw_bar,
    draw_heat_map,
    has_hidden,
)
from ckpt_prune.show.section import Figure, HeatMap, Line, Point
from tests.show.examples import Drawn, numbers, value


def line(values, name="a"):
    """A line of the values that are there, of blocks 0, 1, ..."""
    return Line(name, [Point(b, v, v, v, f"{v:g}") for b, v in enumerate(values) if v is not None])


def spread(values):
    return Line("a", [Point(b, m, lo, hi, "") for b, (lo, m, hi) in values.items()])


def figure(*lines, **options) -> Figure:
    return Figure("d", "n", "u", lines, **options)


def drawn(*lines, **options) -> Drawn:
    return Drawn(ElementTree.fromstring(draw(figure(*lines, **options))))


def interpolate(ticks, number, *, log=False):
    """Return the position at which a value belongs, going by the outermost ticks alone."""
    (p0, v0), (p1, v1) = ticks[0], ticks[-1]
    if log:
        v0, v1, number = math.log(v0), math.log(v1), math.log(number)
    return p0 + (number - v0) / (v1 - v0) * (p1 - p0)


# ---- where things are ------------------------------------------------------------------------------------------


def test_blocks_keep_their_numbers():
    plot = drawn(Line("a", [Point(b, 1.0, 1.0, 1.0, "") for b in (5, 6, 9)]))
    assert plot.labels[0] == ["5", "6", "7", "8", "9"]
    for block, (x, _, _) in zip((5, 6, 9), plot.marks("line-0"), strict=True):
        assert x == pytest.approx(interpolate(plot.x, block), abs=0.02)


# ---- gaps, spreads, zeros --------------------------------------------------------------------------------------


def test_a_missing_value_parts_the_line():
    plot = drawn(line([1.0, 2.0, None, 1.5, None, 1.0, 1.2, 1.1]))
    marks = [mark[:2] for mark in plot.marks("line-0")]
    assert len(marks) == 6
    assert plot.path("line", "line-0") == [marks[:2], marks[3:]]


def test_a_joined_line_goes_on_over_places_nobody_asked_for():
    points = {0: 3.0, 2: 2.0, 8: 1.0}
    series = Line("a", [Point(place, v, v, v, f"{v:g}") for place, v in points.items()])
    plot = drawn(series, across="blocks recovered", joined=True)
    assert plot.path("line", "line-0") == [[mark[:2] for mark in plot.marks("line-0")]]
    assert drawn(series).path("line", "line-0") == []
    assert [text.text for text in plot.svg.iter("text") if text.get("class") == "unit"] == ["u", "blocks recovered"]
    for place, (x, _, _) in zip(points, plot.marks("line-0"), strict=True):
        assert x == pytest.approx(interpolate(plot.x, place), abs=0.02)
    assert plot.tooltips() == [f"blocks recovered {place}\na: {v:g}" for place, v in points.items()]


def test_what_a_log_scale_cannot_show_lies_hollow_at_its_foot():
    hidden = line([0.5, 0.0, 0.01, 0.2])
    plot = drawn(hidden)
    kinds = [kind for _, _, kind in plot.marks("line-0")]
    assert kinds == ["mark", "off", "mark", "mark"]
    foot = max(numbers(rect.get("y"))[0] + numbers(rect.get("height"))[0] for rect in plot.svg.iter("rect"))
    assert plot.marks("line-0")[1][1] == foot
    # No line runs into a value that is not there.
    assert plot.path("line", "line-0") == [[mark[:2] for mark in plot.marks("line-0")[2:]]]
    assert has_hidden(figure(hidden))
    assert not has_hidden(figure(line([0.5, 0.01])))


def test_rounding_noise_does_not_stretch_the_axis():
    plot = drawn(line([0.5, 0.1, 1e-17]))
    assert [kind for _, _, kind in plot.marks("line-0")] == ["mark", "mark", "off"]
    assert min(tick for _, tick in plot.y) >= 1e-8


@pytest.mark.parametrize(
    ("values", "options", "log"),
    [
        *[([0.05, 0.99], {}, False), ([0.05, 1.0], {}, True), ([0.05, 0.9, 0.0], {}, False)],
        *[([1e-5, 1.0], {"log": False}, False), ([1e-5, 1.0], {"full": (0, 1)}, False)],
    ],
)
def test_a_log_scale_from_a_factor_of_twenty_where_it_is_wanted(values, options, log):
    assert (drawn(line(values), **options).unit == "u, log scale") is log


# ---- what can be read ------------------------------------------------------------------------------------------


def test_every_block_tells_its_values():
    tips = drawn(line([0.25, None], "before"), line([0.5, 0.75], "after")).tooltips()
    assert tips == ["block 0\nbefore: 0.25\nafter: 0.5", "block 1\nafter: 0.75"]


def test_texts_are_escaped():
    evil = "<script>&\"'\x00"
    svg = draw(Figure(evil, evil, evil, [line([1.0], evil)]))
    seen = evil.replace("\x00", "\ufffd")
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == f"{seen}. {seen}"
    assert "<script" not in svg
    assert Drawn(root).tooltips() == [f"block 0\n{seen}: 1"]


def boxes(plot: Drawn):
    """A generous box around every text: 0.6 of its size a character."""
    corners = []
    for text in plot.svg.iter("text"):
        width = 0.6 * TEXT * len(text.text)
        (x,), (y,) = numbers(text.get("x")), numbers(text.get("y"))
        x0 = x - {"end": 1.0, "middle": 0.5, None: 0.0}[text.get("text-anchor")] * width
        corners.append((x0, x0 + width, y - 0.75 * TEXT, y + 0.25 * TEXT))
    return corners


def check_geometry(plot: Drawn):
    everything = boxes(plot)
    for x0, x1, top, bottom in everything:
        # Half a unit: the box is wider than the text.
        assert x0 >= -0.5
        assert x1 <= WIDTH + 0.5
        assert top >= 0
        assert bottom <= HEIGHT
    for i, a in enumerate(everything):
        for b in everything[i + 1 :]:
            assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)
    start, foot, end = next(numbers(p.get("d")) for p in plot.svg.iter("path") if p.get("class") == "base")
    for group in ("line-0", "line-1"):
        for x, y, _ in plot.marks(group):
            assert start <= x <= end <= WIDTH
            assert 28 <= y <= foot
    assert len(plot.labels[1]) >= 2
    assert len(plot.labels[0]) >= 1


magnitudes = st.one_of(
    st.just(0.0),
    st.floats(1e-12, 1e12),
    st.floats(0, 1),
    st.floats(-1e6, 1e6),
    st.sampled_from([5e-324, 1e-300, 1e299]),
)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.one_of(st.none(), magnitudes), min_size=1, max_size=130).filter(
        lambda values: any(value is not None for value in values)
    ),
    log=st.booleans(),
    full=st.sampled_from([None, (0, 1)]),
    first=st.sampled_from([0, 7, 950]),
)
def test_labels_never_collide_and_everything_is_inside(values, log, full, first):
    points = [Point(first + b, v, v, v, "") for b, v in enumerate(values) if v is not None]
    check_geometry(drawn(Line("a", points), log=log, full=full))


@pytest.mark.parametrize("blocks", [1, 2, 12, 13, 24, 32, 48, 80, 126, 1000])
def test_block_numbers_are_whole_and_many_enough(blocks):
    plot = drawn(line([0.5] * blocks))
    check_geometry(plot)
    ticks = [int(label) for label in plot.labels[0]]
    assert len(ticks) >= min(blocks, 5)
    assert len({b - a for a, b in pairwise(ticks)}) <= 1
    assert blocks > 12 or ticks == list(range(blocks))


# ---- scales ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(values=st.lists(magnitudes, min_size=1, max_size=6), log=st.booleans())
def test_ticks_say_where_they_are(values, log):
    axis = value_axis(values, 200, 0, log=log)
    assert axis.low < axis.high
    assert axis.high >= max(values) - 1e-9 * (axis.high - axis.low)
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert 2 <= len(axis.ticks) <= 9
    assert len(set(axis.labels)) == len(axis.labels)
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        assert value(label) == pytest.approx(tick, rel=1e-6, abs=1e-9 * axis.high)
        assert axis.low <= tick <= axis.high
    # The most is -1.5·10⁻¹³⁷.
    assert max(len(label) for label in axis.labels) <= 11


@pytest.mark.parametrize(
    ("share", "most", "widths"), [(75.0, 100.0, [120, 90, 0]), (0.0, 100.0, [120, 0, 0]), (150.0, 150.0, [80, 80, 40])]
)
def test_a_bar_ends_where_its_percentage_is(share, most, widths):
    """Track, what is below 100, what is above."""
    assert [float(r.get("width")) for r in ElementTree.fromstring(draw_bar(share, most))] == widths


# ---- heat maps ---------------------------------------------------------------------------------------------------


def shades(before, after) -> list[tuple[int, str]]:
    """Every path of cells: how many of them, and its opacity."""
    svg = draw_heat_map(HeatMap("t", "n", {"before": before, "after": after}))
    assert svg.count('class="frame"') == (2 if svg else 0)
    return [(path.count("M"), shade) for path, shade in re.findall(r'<path d="([^"]+)" fill-opacity="([\d.]+)"', svg)]


@pytest.mark.parametrize("cells", [[], [[]], [[None]], [[0.0, -1.0]]])
def test_a_heat_map_of_nothing_is_not_drawn(cells):
    assert shades(cells, cells) == []


def test_a_heat_map_draws_no_more_than_so_much():
    cells = shades([[1.0] * 200] * 200, [[1.0] * 3, [], [2.0]])
    assert sum(count for count, _ in cells) == SIDE**2 + 4
    assert len(cells) <= SHADES
