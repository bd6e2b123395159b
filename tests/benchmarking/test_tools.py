"""`tools/bench_export.py` and `tools/bench_rounded_graphs.py`: what they make of graphs."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tools import bench_rounded_graphs

FAILED = {"max_abs": None, "mean_abs": None, "agreement": None}
PASSED = {"max_abs": 2e-6, "mean_abs": 1e-7, "agreement": 0.5}
FEATURES = {"max_abs": 3e-6, "mean_abs": 2e-8, "agreement": None}
PERPLEXITY = {"name": "perplexity", "pytorch": 9.25, "onnxruntime": None}


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("bench_export")


@pytest.mark.parametrize(
    ("cases", "metrics", "written", "figures", "cells"),
    [
        ([PASSED, FAILED], [PERPLEXITY], False, (None, None, 0.5), ["not written", "-", "perplexity", "9.250", "-"]),
        ([FEATURES], [], True, (3e-6, 2e-8, None), ["1.00", "3.0e-06", "-", "-", "-"]),
        ([PASSED, FEATURES], [], True, (3e-6, 1e-7, 0.5), ["1.00", "3.0e-06", "-", "-", "-"]),
        ([], [], False, (None, None, None), ["not written", "-", "-", "-", "-"]),
    ],
)
def test_a_graph_that_failed_is_a_result_too(
    tool, tmp_path, monkeypatch, capsys, cases, metrics, written, figures, cells
):
    proved = {"graphs": [{"cases": cases, "metrics": metrics}]}
    found = {"written": written, "bytes": {"fp32": 1 << 20}, "validation": proved}
    monkeypatch.setattr(tool, "ckpt_prune", lambda *arguments: json.dumps(found))
    monkeypatch.setattr(tool, "checkpoint", lambda model, ratio, work: model.folder)
    model = tool.Model("tiny", tmp_path, "", (), ())
    tool.graphs(model, Namespace(out=tmp_path / "out", work=tmp_path), set())
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert len(lines) == 9
    assert {(line["max_abs"], line["mean_abs"], line["agreement"]) for line in lines} == {figures}
    capsys.readouterr()
    tool.print_graphs(lines[:1])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.strip("| ").split(" | ") == ["tiny", "0%", "fp32", *cells]


def test_a_model_that_it_does_not_know(tool, tmp_path, monkeypatch, capsys):
    out, work = tmp_path / "out", tmp_path / "work"
    monkeypatch.setattr(tool, "models", lambda: [tool.Model("embedded", tmp_path, "", (), ())])
    monkeypatch.setattr(sys, "argv", ["it", "speed", "--out", str(out), "--work", str(work), "--models", "embeded"])
    with pytest.raises(SystemExit) as caught:
        tool.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("no such model: embeded; there are embedded\n")
    assert not work.exists()


def graph(dtype: str, lost: float | None, kl: float, max_loss: float | None) -> dict:
    metrics = [
        {"name": "perplexity", "onnxruntime": 11.0, "pytorch": pytorch, "difference": difference, "kl": kl}
        for pytorch, difference in ((10.5, 0.05), (10.0, lost))
    ]
    return {"dtype": dtype, "file": f"{dtype}.onnx", "metrics": metrics, "max_loss": max_loss, "passed": True}


def test_each_graph_is_a_line_and_the_best_are_marked(tmp_path, monkeypatch, capsys):
    called = []

    def ckpt_prune(*words: str) -> str:
        called.append(words[0])
        if words[0] == "export":
            graphs = [{"file": f"{dtype}.onnx", "quantization": None} for dtype in ("fp32", "int4")]
            return json.dumps({"bytes": {"fp32": 4 << 20, "int4": 1 << 20}, "manifest": {"graphs": graphs}})
        return json.dumps({"graphs": [graph("fp32", 0.02, 0.01, None), graph("int4", 0.1, 0.05, 0.1)]})

    monkeypatch.setattr(bench_rounded_graphs, "ckpt_prune", ckpt_prune)
    monkeypatch.setattr(bench_rounded_graphs, "checkpoint", lambda model, ratio, work: model.folder)
    model = bench_rounded_graphs.Model("tiny", tmp_path, "ridge", (), ())
    args = Namespace(out=tmp_path / "out", work=tmp_path, dtypes=["fp32", "int4"])
    bench_rounded_graphs.graphs(model, 0.2, args, set())
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["tiny | 0.2 | fp32", "tiny | 0.2 | int4"]
    assert [(line["lost"], line["lost_by_rounding"]) for line in lines] == [(0.02, None), (0.1, 0.05)]
    bench_rounded_graphs.graphs(model, 0.2, args, {line["key"] for line in lines})
    assert called == ["export", "validate"]  # what is done is not done again
    worse = lines[1] | {"key": "worse", "bytes": 2 << 20, "lost": 0.11}
    infinite = lines[1] | {"key": "infinite", "bytes": 1, "lost": None}
    assert bench_rounded_graphs.frontier([*lines, worse, infinite]) == {line["key"] for line in lines}
    capsys.readouterr()
    bench_rounded_graphs.show(
        [*lines, {"model": "tiny", "speed": {"0.2 fp32": {"prefill 1": 2.0}, "0.2 int4": {"prefill 1": 1.0}}}]
    )
    assert capsys.readouterr().out.splitlines()[1:] == [
        "tiny (dense 10)",
        "",
        "| dropped | type | MiB | perplexity | lost | KL | prefill 1, ms |  |",
        "|---|---|---|---|---|---|---|---|",
        "| 20% | fp32 | 4.00 | 11.0000 | 2.00% | 0.0100 | 2.0 | * |",
        "| 20% | int4 | 1.00 | 11.0000 | 10.00% | 0.0500 | 1.0 | * |",
    ]
