"""The printers: the page is well-formed and complete in itself, and nothing in it from a report is markup."""

import re
from importlib import resources

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.runner.sections import titled_sections
from ckpt_prune.show.html import print_page
from ckpt_prune.show.markdown import print_markdown
from ckpt_prune.show.section import Section, Table
from ckpt_prune.show.terminal import section_lines
from ckpt_prune.stages.report import read_report_or_plan
from tests.show.examples import (
    Json,
    details,
    linear,
    make_learned_rotation,
    make_mask_report,
    parse,
    report,
    site,
    words,
    write,
)

STYLE = resources.files("ckpt_prune.show").joinpath("style.css").read_text(encoding="utf-8")
EVIL = '</title><script>alert("1")</script>&amp;\'\x07'
SECTION = Section(
    "Units",
    ["1. Half of them go.", "Use `more` samples."],
    ["Long."],
    drawing="##..",
    tables=[Table(("space", "kept"), [("mlp|", "4.5")])],
    details=[Table(("a",), [("b",)], title="Every site")],
)


@pytest.fixture
def page(tmp_path):
    def print_report(value: Json) -> str:
        return print_page(*titled_sections(read_report_or_plan(write(tmp_path / "out/ckpt_prune.json", value))))

    return print_report


def test_a_terminal_shows_neither_explanations_nor_details():
    assert list(section_lines([SECTION, Section("Empty", explanations=["Long."])])) == [
        *("Units", "  ##..", "  space  kept", "  mlp|    4.5", "  1. Half of them go.", "  Use `more` samples.")
    ]


def test_markdown_escapes_texts():
    assert print_markdown([SECTION]).split("\n") == [
        *("## Units", "", "```", "##..", "```", ""),
        *("| space | kept |", "|---|---:|", "| mlp\\| | 4.5 |", ""),
        *("- 1\\. Half of them go.", "- Use \\`more\\` samples.", "- Long.", ""),
    ]


def test_a_page_shows_everything():
    root = parse(print_page("t", [SECTION]))
    assert [words(p) for p in root.iter("p")] == ["1. Half of them go.", "Use `more` samples.", "Long."]
    assert [words(root.find(f".//{tag}")) for tag in ("h1", "h2", "pre", "summary")] == [
        *("t", "Units", "##..", "Every site")
    ]
    assert [words(td) for td in root.iter("td")] == ["mlp|", "4.5", "b"]


def test_a_page_loads_and_runs_nothing(page):
    html = page(report([site(0), site(1)]))
    root = parse(html)
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "image", "use", "iframe", "object", "embed", "base", "a", "form"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {n for n in names if n in {"src", "href", "xlink:href", "srcset", "action"} or n.startswith("on")}
    assert not re.search(r"url\(|@import|@font-face|//", STYLE)
    assert not re.search(r"https?:|//\w", html)
    assert html.startswith('<!doctype html>\n<html lang="en">')
    assert (html.count("<style>"), STYLE in html) == (1, True)
    metas = [dict(m.attrib) for m in root.iter("meta")]
    assert metas[0] == {"charset": "utf-8"}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    policy = next(m.get("content") for m in root.iter("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_nothing_from_a_report_is_markup(page):
    mask = {"method": EVIL, "pattern": EVIL, "ratio": 0.5}
    json_report = make_mask_report([linear(0, weight=EVIL, kind=EVIL)], make_learned_rotation(0), kind=EVIL, mask=mask)
    json_report |= {
        "sites": [site(0, EVIL, method=EVIL), site(1, EVIL)],
        "source": {"name": EVIL, "fingerprint": EVIL},
        "recipe": {"name": EVIL, "summary": EVIL, "source": EVIL},
        "calibration": {EVIL: EVIL, "target": EVIL},
        "container": {"model_type": EVIL, "note": EVIL},
        "ckpt_prune": EVIL,
    }
    html = page(json_report)
    root = parse(html)
    seen = EVIL.replace("\x07", "\ufffd")
    assert "script" not in {element.tag for element in root.iter()}
    assert words(root.find(".//h1")) == f"{seen}, pruned by recipe {seen}"
    assert details(html)["Every site"][1][1:3] == details(html)["Every linear"][1][1:3] == [seen, seen]


def test_half_a_surrogate_pair_is_no_text(page):
    with pytest.raises(UserError, match=r"ckpt_prune\.json is damaged \(text that is not Unicode: '\\ud800'\)"):
        page(report([], calibration={"target": "\ud800"}))


# ---- colours ---------------------------------------------------------------------------------------------------


def schemes() -> dict[str, dict[str, str]]:
    """The style sheet's colours, light and dark."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    read = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in (light, dark)]
    return {"light": read[0], "dark": read[1]}


def luminance(colour: str) -> float:
    """Relative luminance of sRGB (WCAG 2.1)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out(scheme):
    """WCAG's 4.5 for text, and more than its 3 for graphics, on the page of either scheme."""
    colours = schemes()[scheme]
    for name in ("ink", "soft", *(f"line-{number}" for number in range(8))):
        lighter, darker = sorted((luminance(colours[name]), luminance(colours["page"])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, name


def test_no_colour_but_those_of_both_schemes_is_used():
    assert schemes()["light"].keys() == schemes()["dark"].keys()
    assert "color-scheme: light dark" in STYLE
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?![^{]*\{)", re.sub(r"--[\w-]+: [^;]+;", "", STYLE))
    assert set(re.findall(r"var\(--([\w-]+)\)", STYLE)) <= schemes()["light"].keys() | {"band"}
    assert all(f".line-{number} {{ color: var(--line-{number}); }}" in STYLE for number in range(8))
