"""`tools/bench_export.py`: what it makes of graphs that fail, and of names that it does not know."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

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
