"""`report`: one file beside the output, whole or not at all, and one line for whatever is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_prune.common.filenames import REPORT
from tests.cli.running import ok, read_refusal
from tests.show.examples import (
    Json,
    elsewhere,
    layer,
    linear,
    make_mask_report,
    parse,
    plan,
    recovery,
    report,
    site,
    words,
    write,
)

WANTED = "give a folder that `ckpt-prune prune` wrote, or a plan file"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A working folder with an output `out` and a plan."""
    folder = tmp_path / "own"
    write(folder / "out" / REPORT, report([site(0), site(1)]))
    write(folder / "plan.json", plan([site(0), site(1)]))
    monkeypatch.chdir(folder)
    return folder


def heading(path: str) -> str:
    return words(parse(Path(path).read_text(encoding="utf-8")).find(".//h1"))


def test_the_working_folder(here, monkeypatch):
    monkeypatch.chdir("out")
    assert ok("report", ".") == f"report written to {here / 'out.report.html'}\n"
    assert heading("../out.report.html") == "tiny, pruned by recipe corp"
    assert ok("report", REPORT, "--overwrite") == f"report written to {here / 'out.report.html'}\n"
    assert [path.name for path in Path().iterdir()] == [REPORT]
    Path("inner").mkdir()
    monkeypatch.chdir("inner")
    assert ok("report", "..", "--overwrite") == f"report written to {here / 'out.report.html'}\n"


# ---- where it goes ---------------------------------------------------------------------------------------------


def test_a_plan(here):
    assert ok("report", "plan.json") == "report written to plan.report.html\n"
    assert heading("plan.report.html") == "Plan for tiny, by corp"


def test_neither_torch_nor_transformers_is_loaded(here):
    """Reading numbers must not take seconds: a fresh interpreter tells."""
    code = (
        "import sys\nfrom ckpt_prune.cli.main import main\n"
        "main(['report', 'out'], standalone_mode=False)\nprint({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["plan.json", "other", "gone.html"])
def test_what_is_no_report_is_never_overwritten(here, place):
    Path("other").mkdir()
    Path("gone.html").symlink_to("nowhere")
    assert read_refusal("report", "out", "-o", place, "--overwrite") == (
        f"{place} exists and is not a report: it is not overwritten"
    )


@pytest.mark.parametrize("place", ["out/a.html", "out/sub/a.html", "link/a.html"])
def test_nothing_is_written_into_the_checkpoint(here, place):
    Path("link").symlink_to("out")
    for source in ("out", f"out/{REPORT}"):
        assert (
            read_refusal("report", source, "-o", place)
            == f"{place} is inside out, a checkpoint: choose a place outside it"
        )


def without(*keys: str) -> Json:
    record: Json = report([site(0)])
    place = record
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return record


DAMAGE = {
    "cut": ('{"version": 1, "sites": [', "Expecting value: line 1 column 26 (char 25)"),
    "twice": ('{"sites": [], "sites": []}', "key 'sites' is given twice"),
    "no name": (without("source", "name"), "source.name: field required"),
    "no parameters": (
        report([], before={"parameters": 0, "bytes": 1, "flops": 1}),
        "before.parameters: input should be greater than or equal to 1",
    ),
    "more zeros than weights": (
        make_mask_report([linear(0), linear(1, zeros=33)]),
        "linears.1: value error, more zeros than weights",
    ),
    "a perplexity of nothing": (
        elsewhere([], recovery=recovery(perplexity_after=[{"blocks": 0}, {"perplexity": 9.0}])),
        "recovery.perplexity_after.1.blocks: field required",
    ),
    "epochs below 0": (
        elsewhere([layer(0, epochs=-1)]),
        "layers.0.epochs: input should be greater than or equal to 0",
    ),
}


@pytest.mark.parametrize(("value", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_report(here, value, reason):
    path = Path("out") / REPORT
    if isinstance(value, str):
        path.write_text(value)
    else:
        write(path, value)
    assert read_refusal("report", "out") == f"out/ckpt_prune.json is damaged ({reason}): prune again"


def test_what_is_no_plan(here):
    write("plan.json", plan([site(0)], model=None))
    assert (
        read_refusal("report", "plan.json") == f"plan.json is no plan (model: input should be a valid string): {WANTED}"
    )


# ---- real outputs ----------------------------------------------------------------------------------------------


def test_what_prune_and_plan_write(place):
    """Nothing in the output changes: `verify` still finds the files as written."""
    ok("report", "pruned")
    assert heading("pruned.report.html") == "dense, pruned by recipe rcpu"
    figures = [words(h) for h in parse(Path("pruned.report.html").read_text(encoding="utf-8")).iter("h3")]
    assert {"MLP: output error", "Attention heads: output error"} <= set(figures)
    ok("verify", "pruned", "--against", "dense")
    ok("plan", "dense", "--recipe", "ridge", "--statistics", "stats", "--ratio", "0.5", "-o", "p.json")
    ok("report", "p.json")
    assert heading("p.report.html") == "Plan for dense, by ridge"
    figures = [words(h) for h in parse(Path("p.report.html").read_text(encoding="utf-8")).iter("h3")]
    assert "ρ²: what the kept units predict" in figures
