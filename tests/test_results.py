"""The table and the chart of the front page are made from tools/results.json, and current."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import results

    yield results
    sys.modules.pop("results")


def test_the_front_page_has_the_results_as_measured(results):
    measured = json.loads(results.RESULTS.read_text(encoding="utf-8"))
    page = results.FRONT_PAGE.read_text(encoding="utf-8")
    assert measured
    assert results.with_table(page, measured) == page
    assert results.chart(measured) == results.CHART.read_text(encoding="utf-8")


def test_the_chart_is_well_formed(results):
    tree = ElementTree.parse(results.CHART)
    bars = [element for element in tree.iter() if element.tag.endswith("rect")]
    assert len(bars) == len(json.loads(results.RESULTS.read_text(encoding="utf-8")))
