"""Sizes in time, by a table of this machine: times are made up here, since no test can rely on measured ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_prune.benchmarking import latency_table
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.runner.sections import latency_sentences
from ckpt_prune.stages.report import Report
from tests.cli.running import TEXT, ok, read_json, run, without_quality
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.show.examples import report

REST, ATTENTION, COLUMN, HEAD = 5e6, 1e6, 1e5, 2e6
"""Nanoseconds that are made up."""


def made_up(model: Any) -> float:
    """Make up the time of a model: so much a block, a column of its mlp and a KV group."""
    layers = model.model.layers
    total = REST
    for layer in layers:
        groups = layer.self_attn.k_proj.weight.shape[0] // layer.self_attn.head_dim
        total += ATTENTION + groups * HEAD + layer.mlp.down_proj.weight.shape[1] * COLUMN
    return total


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """How many models were timed, and on what."""
    calls: list[tuple[int, str]] = []

    def fastest(timers: Sequence[Any], workload: Any, say: str) -> list[float]:
        calls.append((len(timers), f"{workload.tokens} tokens, {workload.steps} steps"))
        return [made_up(timer._model) for timer in timers]

    monkeypatch.setattr(latency_table, "time_fastest", fastest)
    return calls


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent / "cache"))
    torch.manual_seed(3)
    with quiet_transformers():
        tiny_llama(max_position_embeddings=32, num_hidden_layers=6).save_pretrained("deep")
    tiny_tokenizer("<s> $A").save_pretrained("deep")
    return place


JOB = ("--recipe", "ridge", *TEXT, "--target-latency")


def test_widths_by_time(here, timed) -> None:
    lines = without_quality(ok("prune", "deep", *JOB, "70%", "-o", "out"))
    report = read_json("out/ckpt_prune.json")
    widths = [len(site["kept"]) for site in report["sites"] if site["space"] == "mlp"]
    groups = [len(site["kept"]) for site in report["sites"] if site["space"] == "heads"]
    dense = REST + 6 * (ATTENTION + 2 * HEAD + 24 * COLUMN)
    took = REST + 6 * ATTENTION + sum(groups) * HEAD + sum(widths) * COLUMN
    assert took <= 0.7 * dense < took + 6 * COLUMN
    share = f"{took / dense:.1%}"
    assert lines[-2] == (
        f"Latency of one pass on the machine that pruned it: foreseen {share} of the dense model's ({took / 1e6:.4g} "
        f"of {dense / 1e6:.4g} ms), measured {share} ({took / 1e6:.4g} of {dense / 1e6:.4g} ms)."
    )
    # A dense model, half as deep, half of each space, half of everything; then the two whole ones.
    assert timed == [(5, "32 tokens, 0 steps"), (2, "32 tokens, 0 steps")]


def test_what_was_foreseen_and_what_was_measured_is_in_the_report_and_on_its_page(here, monkeypatch) -> None:
    """The output takes a quarter longer than the table says, as it does where a machine reads short rows slowly."""

    def fastest(timers: Sequence[Any], workload: Any, say: str) -> list[float]:
        times = [made_up(timer._model) for timer in timers]
        return [times[0], 1.25 * times[1]] if say == "timing the output" else times

    monkeypatch.setattr(latency_table, "time_fastest", fastest)
    result = json.loads(ok("prune", "deep", *JOB, "70%", "-o", "out", "--json"))
    latency = read_json("out/ckpt_prune.json")["latency"]
    assert result["latency"] == latency
    assert latency["of"] == "latency of one pass"
    assert latency["dense"] == latency["measured_dense"] == pytest.approx(49.4)
    assert latency["measured"] == pytest.approx(1.25 * latency["foreseen"])
    ok("verify", "out", "--against", "deep")
    ok("report", "out", "-o", "page.html")
    foreseen, measured = (latency[key] for key in ("foreseen", "measured"))
    assert (
        f"foreseen {foreseen / 49.4:.1%} of the dense model&#x27;s ({foreseen:.4g} of 49.4 ms), measured "
        f"{measured / 49.4:.1%} ({measured:.4g} of 49.4 ms); more than was foreseen.</p>"
    ) in Path("page.html").read_text(encoding="utf-8")
    assert (
        f"Latency of one pass on the machine that pruned it: foreseen {foreseen / 49.4:.1%} of the dense model's "
        f"({foreseen:.4g} of 49.4 ms), measured {measured / 49.4:.1%} ({measured:.4g} of 49.4 ms); more than was "
        "foreseen."
    ) in Path("out/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("off", "doubt"), [(0.51, " by a table that was 51% off and is not to be relied on"), (0.1, "")]
)
def test_a_table_that_is_not_to_be_relied_on_is_told_with_what_it_foresaw(off: float, doubt: str) -> None:
    values = {"of": "latency of one pass", "dense": 40.0, "foreseen": 20.0, "off": off}
    record = Report.read(report([], latency=values | {"measured_dense": 20.0, "measured": 18.0}))
    assert latency_sentences(record) == [
        f"Latency of one pass on the machine that pruned it: foreseen 50.0% of the dense model's (20 of 40 ms){doubt}, "
        "measured 90.0% (18 of 20 ms); more than was foreseen."
    ]


def test_an_output_that_was_not_timed_is_whole_and_is_timed_by_resume(here, monkeypatch) -> None:
    def fastest(timers: Sequence[Any], workload: Any, say: str) -> list[float]:
        if say == "timing the output" and stopped:
            raise KeyboardInterrupt
        return [made_up(timer._model) for timer in timers]

    stopped = True
    monkeypatch.setattr(latency_table, "time_fastest", fastest)
    result = run("prune", "deep", *JOB, "70%", "-o", "out")
    assert result.exit_code == 130
    assert "out is complete, but was not timed: the same command with --resume tries again\n" in result.stderr
    before = read_json("out/ckpt_prune.json")
    assert (before["latency"]["measured"], before["latency"]["measured_dense"]) == (None, None)
    ok("verify", "out", "--against", "deep")
    ok("report", "out", "-o", "page.html")
    unknown = "the output was not timed here: see ckpt-prune benchmark.</p>"
    assert unknown in Path("page.html").read_text(encoding="utf-8")
    stopped = False
    ok("prune", "deep", *JOB, "70%", "-o", "out", "--resume")
    after = read_json("out/ckpt_prune.json")
    assert after["latency"]["measured"] == pytest.approx(after["latency"]["foreseen"])
    assert after.pop("loss")["of"] == "perplexity"  # which was still to be measured
    assert after | {"latency": before["latency"]} == before
    ok("verify", "out", "--against", "deep")


@pytest.mark.parametrize(("spoilt", "measured"), [(1, 2), (9, 3)])
def test_a_table_that_misses_is_measured_again_and_not_kept(here, monkeypatch, spoilt: int, measured: int) -> None:
    """The last model, which holds the table to account, takes twice as long as the table tells of it, now and then."""
    calls: list[int] = []

    def fastest(timers: Sequence[Any], workload: Any, say: str) -> list[float]:
        calls.append(len(timers))
        times = [made_up(timer._model) for timer in timers]
        return [*times[:-1], times[-1] * (2 if len(calls) <= spoilt else 1)]

    monkeypatch.setattr(latency_table, "time_fastest", fastest)
    stderr = run("plan", "deep", "--recipe", "magnitude", "--target-latency", "70%").stderr
    assert calls == [5] * measured
    kept = list((here.parent / "cache").rglob("*.json"))
    assert len(kept) == (spoilt == 1)
    doubt = ": the machine does other things too, so do not rely on it; it is not kept"
    assert (doubt in stderr) is (spoilt == 9)


def test_a_table_is_kept_and_told_apart(here, timed) -> None:
    for target in ("70%", "30ms", "70%@8", "70%@token:8"):
        ok("plan", "deep", "--recipe", "magnitude", "--target-latency", target)
    assert timed == [(5, "32 tokens, 0 steps"), (5, "8 tokens, 0 steps"), (5, "8 tokens, 16 steps")]
    kept = list((here.parent / "cache").rglob("*.json"))
    assert len(kept) == 3
    for path in kept:
        path.write_text("{")
    ok("plan", "deep", "--recipe", "magnitude", "--target-latency", "70%")
    assert len(timed) == 4


def test_what_is_out_of_reach(here, timed) -> None:
    result = run("prune", "deep", *JOB, "1ns", "-o", "out")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "latency table: 7.4 ms a block, 5 ms for the rest; of half of everything it says 17.6 ms, which took 17.6 ms",
        "Error: 1ns latency of one pass: out of reach of recipe ridge, whose spaces leave 23.6 ms at the least, "
        "47.8% of 49.4 ms",
    ]


# ---- a narrower residual stream ------------------------------------------------------------------------------------

OUTSIDE = 5e6
"""Nanoseconds of what stands outside the blocks, at a stream of 16 dimensions, as all that is made up here."""
NARROW = ("--recipe", "narrow.yaml", *TEXT, "--folds", "2", "--target-latency")
RECIPE = """\
version: 1
name: narrow
allocation: least-error
container: any
hidden: {kind: shared, drop: auto, multiple_of: 2}
spaces:
  heads: {score: rcpu, compensation: {method: ridge}}
  mlp: {score: rcpu, compensation: {method: ridge}}
"""


@pytest.fixture
def narrow(here: Path, timed: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Times of which all but a part of the rest are as long as the stream is wide."""

    def fastest(timers: Sequence[Any], workload: Any, say: str) -> list[float]:
        timed.append((len(timers), f"{workload.tokens} tokens, {workload.steps} steps"))
        models = [timer._model for timer in timers]
        return [OUTSIDE + made_up(model) * model.config.hidden_size / 16 for model in models]

    monkeypatch.setattr(latency_table, "time_fastest", fastest)
    Path("narrow.yaml").write_text(RECIPE)
    return timed


def took(report: dict[str, Any], *, dense: bool = False) -> float:
    sites = [] if dense else report["sites"]
    kept = {space: [len(site["kept"]) for site in sites if site["space"] == space] for space in ("heads", "mlp")}
    groups, columns = sum(kept["heads"] or [12]), sum(kept["mlp"] or [144])
    width = 16 if dense else report["hidden"]["kept"]
    return OUTSIDE + (REST + 6 * ATTENTION + groups * HEAD + columns * COLUMN) * width / 16


def test_dimensions_and_units_by_time(here, narrow) -> None:
    """Units of a narrower model take less, so that more of them stay; the table is kept for each stream."""
    output = ok("prune", "deep", *NARROW, "60%", "--set", "hidden.drop=4", "-o", "out")
    report = read_json("out/ckpt_prune.json")
    dense = took(report, dense=True)
    assert took(report) <= 0.6 * dense < took(report) + 6 * HEAD
    assert "of the dense model's (" in output
    assert "more than was foreseen" not in output
    output = ok("prune", "deep", *NARROW, "60%", "-o", "auto")
    report = read_json("auto/ckpt_prune.json")
    assert len(report["hidden"]["tried"]) > 2
    assert took(report) <= 0.6 * dense
    assert "of the dense model's (" in output
    assert "more than was foreseen" not in output
    assert [count for count, _ in narrow] == [7, 2, 2]
