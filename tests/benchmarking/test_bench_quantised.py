"""`tools/bench_quantised.py`: what it keeps of each graph, and which points it marks."""

import json
from argparse import Namespace

from tools import bench_quantised as tool


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
            graphs = [{"file": f"{dtype}.onnx", "quantised": None} for dtype in ("fp32", "int4")]
            return json.dumps({"bytes": {"fp32": 4 << 20, "int4": 1 << 20}, "manifest": {"graphs": graphs}})
        return json.dumps({"graphs": [graph("fp32", 0.02, 0.01, None), graph("int4", 0.1, 0.05, 0.1)]})

    monkeypatch.setattr(tool, "ckpt_prune", ckpt_prune)
    monkeypatch.setattr(tool, "checkpoint", lambda model, ratio, work: model.folder)
    model = tool.Model("tiny", tmp_path, "ridge", (), ())
    args = Namespace(out=tmp_path / "out", work=tmp_path, dtypes=["fp32", "int4"])
    tool.graphs(model, 0.2, args, set())
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["tiny | 0.2 | fp32", "tiny | 0.2 | int4"]
    assert [(line["lost"], line["lost_by_rounding"]) for line in lines] == [(0.02, None), (0.1, 0.05)]
    tool.graphs(model, 0.2, args, {line["key"] for line in lines})
    assert called == ["export", "validate"]  # what is done is not done again
    worse = lines[1] | {"key": "worse", "bytes": 2 << 20, "lost": 0.11}
    infinite = lines[1] | {"key": "infinite", "bytes": 1, "lost": None}
    assert tool.frontier([*lines, worse, infinite]) == {line["key"] for line in lines}
    capsys.readouterr()
    tool.show([*lines, {"model": "tiny", "speed": {"0.2 fp32": {"prefill 1": 2.0}, "0.2 int4": {"prefill 1": 1.0}}}])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "tiny (dense 10)",
        "",
        "| dropped | type | MiB | perplexity | lost | KL | prefill 1, ms |  |",
        "|---|---|---|---|---|---|---|---|",
        "| 20% | fp32 | 4.00 | 11.0000 | 2.00% | 0.0100 | 2.0 | * |",
        "| 20% | int4 | 1.00 | 11.0000 | 10.00% | 0.0500 | 1.0 | * |",
    ]
