"""The results on the front page: its table and chart are those that tools/results.py makes of tools/results.json."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tools import results

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figures() -> dict[str, Any]:
    return json.loads(results.RESULTS.read_text(encoding="utf-8"))


def test_the_front_page_has_the_table_and_the_chart_of_the_figures(figures):
    """`python tools/results.py write` writes both."""
    page = results.FRONT_PAGE.read_text(encoding="utf-8")
    assert f"{results.BEGIN}\n{results.table(figures)}\n{results.END}" in page
    assert results.CHART.read_text(encoding="utf-8") == results.chart(figures)
    assert "(tools/results.svg)" in page


def test_other_figures_make_another_table_and_another_chart(figures):
    table, drawing = results.table(figures), results.chart(figures)
    figures["smollm2-135m/ridge"]["perplexity"][1] += 5
    assert results.table(figures) != table
    assert results.chart(figures) != drawing
    page = f"before\n{results.BEGIN}\nold\n{results.END}\nafter"
    assert results.with_table(page, figures) == (
        f"before\n{results.BEGIN}\n{results.table(figures)}\n{results.END}\nafter"
    )


def test_rows_stand_in_the_order_of_the_runs_and_every_entry_is_of_a_run(figures):
    assert set(figures) <= {run.name for run in results.RUNS}
    table = results.table(dict(reversed(figures.items())))
    assert table == results.table(figures)
    rows = [line.split(" | ")[1].strip("`") for line in table.splitlines() if re.match(r"\| [A-Z].* \| `", line)]
    assert rows == [run.recipe for run in results.RUNS if run.name in figures]


def test_what_was_not_measured_has_a_dash_and_accuracies_are_percentages():
    vit = next(run for run in results.RUNS if run.takes_images)
    row = {"top1": [0.8, 0.646], "cpu_seconds": 20, "peak_gib": 0.5, "date": "2026-11-26", "commit": "7139f245"}
    assert results.cells(vit, row)[2:] == [
        "–",
        "80.0% top-1 → 64.6% top-1",
        "–",
        "20 s, 0.50 GiB",
        "2026-11-26, 7139f245",
    ]
    assert "accuracy" in results.chart({vit.name: row})
    table = results.table({vit.name: row})
    assert "--images images --samples 256" in table
    assert "| perplexity, or accuracy |" in table


def contrast(colour: str, page: str) -> float:
    """The ratio of luminances as WCAG 2 has it: 4.5 is wanted of text, 3 of large text and of drawings."""

    def luminance(text: str) -> float:
        shares = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted(map(luminance, (colour, page)))
    return (light + 0.05) / (dark + 0.05)


def test_the_chart_can_be_read_anywhere(figures):
    """It is one file without outside links, with colours that light and dark pages show, and no background."""
    drawing = results.CHART.read_text(encoding="utf-8")
    root = ET.fromstring(drawing)
    assert root.tag == f"{SVG}svg"
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        assert not any(name.endswith("href") for name in element.attrib)
        assert element.tag.removeprefix(SVG) in {"svg", "title", "style", "text", "rect"}
    outside = re.findall(r"url\(|@import|https?://\S+", drawing)
    assert outside == ['http://www.w3.org/2000/svg"']
    for colour in re.findall(r"#[0-9a-f]{6}(?!;fill-opacity)", drawing):
        assert min(contrast(colour, "#ffffff"), contrast(colour, "#0d1117")) >= 4, colour
    for bar in root.iter(f"{SVG}rect"):
        x, y, wide, high = (float(bar.attrib[key]) for key in ("x", "y", "width", "height"))
        assert 0 <= x < x + wide <= width
        assert y + high <= height
        assert wide < width / 1.2 or high < 20  # no page behind it
    labels = [element for element in root.iter(f"{SVG}text") if (element.text or "").endswith("%")]
    assert len(labels) == len({(element.attrib["x"], element.attrib["y"]) for element in labels})
    assert len(labels) == sum(key in row for row in figures.values() for key in ("parameters", "perplexity", "top1"))


def test_a_wrong_row_or_a_missing_model_is_refused_before_anything_is_measured(tmp_path: Path):
    (tmp_path / "tools").mkdir()
    script = shutil.copy(results.__file__, tmp_path / "tools" / "results.py")

    def standard_error(*words: str) -> str:
        done = subprocess.run([sys.executable, script, "measure", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        return done.stderr

    assert standard_error(str(tmp_path), "--only", "smollm2-135m/rigde").startswith(
        "smollm2-135m/rigde is none of smollm2-135m/"
    )
    assert "has smollm2-135m" in standard_error(str(tmp_path), "--data", str(tmp_path), "--only", "smollm2-135m")
    assert list((tmp_path / "tools").iterdir()) == [script]
