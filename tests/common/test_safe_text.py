"""Names from files: what a terminal or a model card would obey is shown instead."""

import io

import pytest

from ckpt_prune.common.safe_text import as_code, as_markdown, escape_controls, escape_output, to_one_line
from ckpt_prune.runner.publish import model_card
from ckpt_prune.stages.report import Report
from tests.show.examples import report


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("é 漢\tb\n", "é 漢\tb\n"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\rb\x7f\x9b", r"a\rb\x7f\x9b"),
        ("\u202etxt.exe", r"\u202etxt.exe"),
        ("a\u2028b\u200f\udcff", r"a\u2028b\u200f\udcff"),
    ],
)
def test_plain(text, shown):
    assert escape_controls(text) == shown
    stream = io.StringIO()
    with escape_output(stream):
        print(text, end="")
    assert stream.getvalue() == shown


def test_markdown():
    assert as_markdown("W_o * 2, by A. Author (2024)") == "W_o * 2, by A. Author (2024)"
    assert as_markdown("# a\n\n| b <img src=x> [c](http://d) `e") == r"\# a \| b \<img src=x> \[c\](http://d) \`e"
    assert as_code("a`b\n\x1b") == r"`a'b \x1b`"


def test_a_card_holds_no_marks_of_its_recipe():
    values = report([])
    values["recipe"] |= {"summary": "one\n---\n<script>", "source": "![x](http://y)"}
    values["source"]["name"] = "`m`\n# m"
    card = model_card(Report.read(values))
    assert r"\<script>" in card
    assert r"!\[x\](http://y)" in card
    assert card.count("\n---\n") == 1
    assert card.count("\n# ") == 1


def test_a_refusal_is_one_line_of_bounded_length():
    assert to_one_line("no \x1b[31mname\nof mine") == "no \\x1b[31mname\\nof mine"
    long = to_one_line(f"{'a' * 70_000} is too long")
    assert long == f"{'a' * 60}…{'a' * 60} (70,000 characters) is too long"
    assert len(to_one_line("a word " * 1000)) < 1200
