"""Importance maps on the page."""

import re

import pytest

from ckpt_prune.job.report import Learned
from ckpt_prune.reporting.document import read_document
from ckpt_prune.reporting.maps import SHADES, SIDE, map_figures
from ckpt_prune.reporting.page import page

from .examples import Json, learned, linear, masked, parse, words, write

OWN = {"weight": "o.weight", "rows": 4, "columns": 2, "before": [[1.0, 1.0], [0.5, 1.5]], "after": [[0.0, 4.0]]}
HELD = {"largest_before": 0.0123, "largest_after": 0.4}


def figures(**changes: object) -> list[str]:
    entry: Json = learned(0) | {"map": OWN | HELD | changes}
    return map_figures([Learned.read(entry)])


def shades(svg: str) -> list[tuple[int, str]]:
    """Every path of cells: how many of them, and its opacity."""
    return [(path.count("M"), shade) for path, shade in re.findall(r'<path d="([^"]+)" fill-opacity="([\d.]+)"', svg)]


def test_darker_is_more_on_one_scale():
    (svg,) = figures()
    # From 0.5 to 4: 1 is a third of the way, 1.5 a bit more than half. Nothing is drawn where nothing is.
    assert shades(svg) == [(1, "0.08"), (2, "0.33"), (1, "0.50"), (1, "1.00")]
    assert svg.count('class="frame"') == 2
    said = words(parse(f"<html><body>{svg}</body></html>"))
    assert "Importance of o.weight" in said
    assert "4 rows and 2 columns, from 0.500 to 4 times the mean, log scale." in said
    assert "before rotation: the largest hundredth holds 1.2%; after: the largest hundredth holds 40.0%." in said


@pytest.mark.parametrize("cells", [[], [[]], [[None]], [[0.0, -1.0]], [[float("nan")]]])
def test_where_nothing_can_be_drawn_is_no_figure(cells):
    assert figures(before=cells, after=cells) == []


def test_a_file_draws_no_more_than_so_much():
    (svg,) = figures(before=[[1.0] * 200] * 200, after=[[1.0] * 3, [], [2.0]])
    assert sum(count for count, _ in shades(svg)) == SIDE**2 + 4
    assert len(shades(svg)) <= SHADES


def test_names_are_no_markup_and_what_is_not_known_is_not_said():
    (svg,) = figures(weight="<script>&", largest_after=None)
    assert "<script>" not in svg
    assert "&lt;script&gt;&amp;" in svg
    assert "hundredth" not in svg


def test_the_page_has_it(tmp_path):
    report = masked([linear(0)], learned(0) | {"map": OWN | HELD}, learned(1))
    html = page(read_document(write(tmp_path / "out" / "ckpt_prune.json", report)))
    assert "While it was made" in html
    assert html.count('class="cells"') == 2
