"""The commands, done from Python: the same files, and results that the next function takes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt_prune
from ckpt_prune.common.errors import GraphFailedError
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.parallel.group import process_group
from tests.cli.running import ok, read_json
from tests.graphs import traced_for_others
from tests.parallel.threads import in_threads

DATA = {"text": "calib.txt", "samples": 8, "window": 16}
QUIET = {"progress": False}


def test_each_result_is_what_the_next_function_takes(place, finished, monkeypatch, capfd):
    traced_for_others(monkeypatch, finished / "out/onnx")
    statistics = ckpt_prune.calibrate("dense", **DATA, output="measured", **QUIET)
    assert isinstance(statistics, Statistics)
    planned = ckpt_prune.plan("dense", recipe="rcpu", statistics=statistics, ratio="50%", **QUIET)
    assert [len(site.kept) for site in planned.plan.sites] == [1, 12, 1, 12]
    pruned = ckpt_prune.prune("dense", plan=planned, statistics=statistics, output="small", **QUIET)
    assert pruned.path == Path("small")
    assert pruned.report is not None
    assert pruned.report.after == planned.plan.after
    recovered = ckpt_prune.recover(pruned, dense="dense", **DATA, epochs=1, output="better", **QUIET)
    assert [layer.block for layer in recovered.report.layers] == [0, 1]
    assert ckpt_prune.verify(recovered, **QUIET).passed
    score = ckpt_prune.evaluate(recovered, against="dense", text="calib.txt", window=16, **QUIET)
    assert score.against == Path("dense")
    assert score.kl > 0
    described = ckpt_prune.inspect(recovered, ratios=[0.5], **QUIET)
    assert described.parameters == planned.plan.after.parameters
    assert described.pruned[0].units == {"heads": 1, "mlp": 6}
    graph = ckpt_prune.export(recovered, output="graph", text="calib.txt", window=16, **QUIET)
    assert graph.passed
    assert graph.path == Path("graph")
    assert ckpt_prune.validate(graph, against=recovered, text="calib.txt", window=16, **QUIET).passed
    assert capfd.readouterr() == ("", "")


def test_data_is_what_json_prints(place):
    given = {"recipe": "rcpu", "statistics": "stats", "ratio": 0.5}
    words = ("--recipe", "rcpu", "--statistics", "stats", "--ratio", "0.5", "--json")
    dry = ckpt_prune.prune("dense", **given, output="out", dry_run=True, **QUIET)
    assert dry.report is None
    assert dry.passed
    assert not Path("out").exists()
    assert dry.data() == json.loads(ok("prune", "dense", *words, "--dry-run", "-o", "out"))
    assert ckpt_prune.plan("dense", **given, **QUIET).data() == json.loads(ok("plan", "dense", *words))
    swept = ckpt_prune.sweep("dense", [0.25, 0.5], recipe="rcpu", statistics="stats", **QUIET)
    of_the_command = ok("plan", "dense", *words[:4], "--sweep", "0.25:0.5:0.25", "--json")
    assert json.loads(json.dumps(swept.data())) == json.loads(of_the_command)
    assert ckpt_prune.inspect("pruned", sparsity=True).data() == json.loads(
        ok("inspect", "pruned", "--sparsity", "--json")
    )
    written = ckpt_prune.prune("dense", **given, output="out", **QUIET)
    data = written.data()
    assert data.pop("messages") == dry.data()["messages"]
    assert data.pop("fewer_bits") == written.fewer_bits is not None
    assert data == read_json("out/ckpt_prune.json")


def test_notices_are_printed_and_kept_unless_progress_is_off(place, capsys):
    given = {"dense": "dense", "text": "calib.txt", "samples": 4, "window": 16, "epochs": 1}
    result = ckpt_prune.recover("pruned", **given, output="a")
    assert result.notices
    assert capsys.readouterr().err.splitlines() == list(result.notices)
    silent = ckpt_prune.recover("pruned", **given, output="b", **QUIET)
    assert silent.notices == result.notices
    assert capsys.readouterr() == ("", "")


def test_an_output_whose_graph_cannot_be_made_comes_with_the_error(place, monkeypatch):
    def full(*_args: object, **_options: object) -> None:
        raise ckpt_prune.UserError("no room for it")

    monkeypatch.setattr("ckpt_prune.onnx.export.ProvenGraphs.write", full)
    with pytest.raises(GraphFailedError, match=r"^no room for it$") as caught:
        ckpt_prune.prune(
            "dense",
            recipe="rcpu",
            statistics="stats",
            ratio=0.5,
            overrides=["export.format=onnx"],
            output="out",
            **QUIET,
        )
    assert caught.value.pruned.report.data() == read_json("out/ckpt_prune.json")
    assert caught.value.pruned.notices == (
        "out is complete without its graph: `ckpt-prune export out -o out/onnx` writes it",
    )


@dataclass(frozen=True)
class Made:
    """What stands for a graph and for what was pushed."""

    path: Path = Path("onnx")
    passed: bool = True


def test_of_several_processes_one_makes_the_graph_and_pushes(place, monkeypatch):
    done: list[tuple[str, int]] = []

    def record(what: str) -> Callable[..., Made]:
        def once(*_args: object, **_options: object) -> Made:
            done.append((what, process_group().size))
            return Made()

        return once

    monkeypatch.setattr("ckpt_prune.onnx.export.ProvenGraphs.write", record("graph"))
    monkeypatch.setattr("ckpt_prune.runner.push.push_output", record("push"))
    monkeypatch.setattr("ckpt_prune.runner.refusals._check_pushed", record("look"))
    given = {"recipe": "rcpu", "statistics": "stats", "ratio": 0.5, "overrides": ["export.format=onnx"]}
    results = in_threads(2, lambda _group: ckpt_prune.prune("dense", **given, output="out", push="me/small", **QUIET))
    # What one does, it does alone; the look before any work shares nothing.
    assert done == [("look", 2), ("graph", 1), ("push", 1)]
    assert all(result.graph.passed and result.pushed.passed for result in results)
