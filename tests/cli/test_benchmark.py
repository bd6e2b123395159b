"""`benchmark`: the table, the JSON, one real run, and what is refused."""

import json
import math
import multiprocessing
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.benchmarking import run as benchmark
from ckpt_prune.benchmarking.processes import Worker, start_workers
from ckpt_prune.benchmarking.results import Benchmark, BenchmarkRow, Block, Machine, TimedModel
from ckpt_prune.benchmarking.runners import stop_turning
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.onnx.records import GraphSource, Manifest
from tests.benchmarking import targets
from tests.benchmarking.forking import fork_what_has_imported
from tests.cli.running import ok, read_refusal, run
from tests.graphs import exports, traced_before

DENSE = {"label": "A", "model": "dense"}
PRUNED = {"label": "B", "model": "pruned"}
TORCH = {"runtime": "PyTorch", "device": "cpu", "dtype": "fp32", "optimize": None}
ONNX = {"runtime": "onnxruntime", "device": "cpu", "dtype": "fp16", "optimize": "cpu"}
SIZES = {"parameters": 1_234_567, "disk_bytes": 5 << 20, "base_bytes": 300 << 20, "peak_bytes": 1 << 30}
UNKNOWN = {"parameters": None, "disk_bytes": 999, "base_bytes": None, "peak_bytes": None}


def row(who, runtime, p50, p95, throughput, ratio, flops=None, flops_ratio=None) -> BenchmarkRow:
    return BenchmarkRow(
        **who,
        runtime=runtime,
        p50_ms=p50,
        p95_ms=p95,
        throughput=throughput,
        p50_ratio=ratio,
        flops=flops,
        flops_ratio=flops_ratio,
        latencies_ms=[[p50], [p95]],
    )


RESULT = Benchmark(
    machine=Machine(processor="Abacus 3", gpu=None, cores=2, threads=1, versions={"torch": "2.13", "onnx": "1.23"}),
    rounds=2,
    warmup=1,
    seed=0,
    runs=[
        TimedModel(**DENSE, **TORCH, **SIZES, gpu_bytes=None),
        TimedModel(**PRUNED, **ONNX, **UNKNOWN, gpu_bytes=None),
    ],
    blocks=[
        Block(
            phase="prefill",
            batch=8,
            tokens=128,
            steps=16,
            unit="tokens",
            rows=[
                row(DENSE, "PyTorch", 1234.5678, 2000.0, 829.44, 1.0, 856_000_000, 1.0),
                row(PRUNED, "PyTorch", 802.4690, 900.001, 1276.05, 0.65, 478_000_000, 0.5584),
                row(PRUNED, "onnxruntime", 0.0454, 0.1, 22_555_000.0, None),
            ],
        ),
        Block(
            phase="decode",
            batch=8,
            tokens=128,
            steps=16,
            unit="tokens",
            rows=[row(DENSE, "PyTorch", 5.0, 6.0, 1600.0, 1.0)],
        ),
        Block(
            phase="forward",
            batch=1,
            tokens=None,
            steps=0,
            unit="images",
            rows=[row(DENSE, "PyTorch", 5.0, 6.0, 200.0, 1.0)],
        ),
    ],
)
TABLE = """\
A  dense
B  pruned

Abacus 3, 2 cores, 1 thread a model
torch 2.13, onnx 1.23
2 rounds after 1 of warm-up

       runtime   on                 type  parameters  on disk  base memory  peak memory
A      PyTorch  cpu                 fp32       1.23M  5.24 MB       315 MB      1.07 GB
B  onnxruntime  cpu  fp16, fused for cpu           -    999 B            -            -

batch 8, prefill of 128 tokens:
       runtime   p50 ms   p95 ms      tokens/s  p50 to A's  FLOPs  FLOPs to A's
A      PyTorch  1234.57  2000.00         829.4        1.00   856M          1.00
B      PyTorch   802.47   900.00       1,276.0        0.65   478M          0.56
B  onnxruntime     0.05     0.10  22,555,000.0           -      -             -

batch 8, decode, one of 16 tokens after 128:
   runtime  p50 ms  p95 ms  tokens/s  p50 to A's  FLOPs  FLOPs to A's
A  PyTorch    5.00    6.00   1,600.0        1.00      -             -

batch 1, forward:
   runtime  p50 ms  p95 ms  images/s  p50 to A's  FLOPs  FLOPs to A's
A  PyTorch    5.00    6.00     200.0        1.00      -             -
"""


@pytest.fixture
def asked(monkeypatch):
    """Record what the library is asked for; it answers with RESULT, and one remark."""
    calls = []

    def compare(options, batches, spread, say):
        calls.append((options, batches))
        say("one remark")
        return RESULT

    monkeypatch.setattr(benchmark, "compare", compare)
    return calls


def test_the_table(asked):
    result = run("benchmark", "dense", "pruned", "--device", "cpu")
    assert (result.exit_code, result.stdout, result.stderr) == (0, TABLE, "one remark\n")


# ---- for real ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def parameters(folder: str) -> int:
    return sum(tensor.numel() for tensor in load_file(f"{folder}/model.safetensors").values())


def test_dense_against_pruned_in_both_runtimes(place, scratch, monkeypatch, tmp_path_factory):
    """One graph is there already, the other is made: `tests/onnx_graphs` has what is in it."""
    fork_what_has_imported(monkeypatch)
    model, graph = exports(tmp_path_factory)("llama-gqa-tied")
    traced_before(monkeypatch, graph)
    shutil.rmtree("dense")
    shutil.copytree(model, "dense")
    shutil.copytree(graph, "dense/onnx")
    result = run(
        *["benchmark", "dense", "pruned", "--onnx", "--rounds", "2", "--warmup", "1", "--batch", "2,1"],
        *["--generate", "3", "--json"],
    )
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        "dense: using the graph in dense/onnx",
        "pruned: exporting a graph, for this run only",
    ]
    report = Benchmark.model_validate_json(result.stdout)
    assert json.loads(result.stdout) == report.model_dump()
    assert multiprocessing.active_children() == []
    assert list(scratch.iterdir()) == []

    assert (report.rounds, report.warmup) == (2, 1)
    assert report.machine.threads == torch.get_num_threads()
    seats = [(entry.label, entry.model, entry.runtime) for entry in report.runs]
    models = [("A", "dense"), ("B", "pruned")]
    assert seats == [(*model, runtime) for runtime in ("PyTorch", "onnxruntime") for model in models]
    assert [entry.parameters for entry in report.runs] == [parameters("dense"), parameters("pruned")] * 2
    files = ["dense/model.safetensors", "pruned/model.safetensors", "dense/onnx/model.onnx"]
    assert [entry.disk_bytes for entry in report.runs[:3]] == [Path(file).stat().st_size for file in files]
    assert report.runs[3].disk_bytes > 4 * parameters("pruned")
    for entry in report.runs:
        assert (entry.device, entry.dtype, entry.gpu_bytes) == ("cpu", "fp32", None)
        assert 0 < entry.base_bytes <= entry.peak_bytes
    assert [(block.batch, block.phase) for block in report.blocks] == [
        *[(2, "prefill"), (2, "decode"), (1, "prefill"), (1, "decode")]
    ]
    for block in report.blocks:
        assert (block.tokens, block.steps, block.unit) == (29, 3, "tokens")
        assert [(timing.label, timing.model, timing.runtime) for timing in block.rows] == seats
        steps = 3 if block.phase == "decode" else 1
        for timing, dense in zip(block.rows, [block.rows[0]] * 2 + [block.rows[2]] * 2, strict=True):
            assert [len(timed) for timed in timing.latencies_ms] == [steps, steps]
            assert math.isclose(timing.p50_ratio, timing.p50_ms / dense.p50_ms)
        assert block.rows[1].flops < block.rows[0].flops == block.rows[2].flops


def test_ctrl_c(place, monkeypatch):
    def interrupt(worker, workload):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "start_workers", partial(start_workers, target=targets.waiting))
    monkeypatch.setattr(Worker, "time", interrupt)
    result = run("benchmark", "dense", "pruned")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    assert multiprocessing.active_children() == []


# ---- refused before anything is loaded ---------------------------------------------------------------------------


@pytest.fixture
def idle(monkeypatch):
    """No process may be started."""
    monkeypatch.setattr(benchmark, "start_workers", None)


def graph_folder(name: str, *, task: str = "text-generation", cached: bool = True) -> None:
    """Write a folder whose record says that it is an exported one."""
    shutil.copytree("dense", name, ignore=shutil.ignore_patterns("*.safetensors"))
    graph = {"file": "model.onnx", "dtype": "fp32", "opset": 20, "quantization": None}
    graph |= {"inputs": [], "outputs": [], "tensors": {}}
    manifest = Manifest(
        **{"versions": {}, "source": GraphSource(name="dense", fingerprint=""), "task": task},
        **{"modality": "text", "cached": cached, "optimize": "none", "files": {}, "graphs": [graph]},
    )
    Path(name, GRAPH_RECORD).write_text(manifest.model_dump_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "graph is an exported graph, which runs in onnxruntime alone: say --onnx to time both there"),
        (
            ("--onnx", "--dtype", "fp16"),
            "graph is an exported graph, and it is fp32: give the checkpoint, or leave that option out",
        ),
    ],
)
def test_a_graph_beside_a_checkpoint(place, idle, options, message):
    graph_folder("graph")
    assert read_refusal("benchmark", "graph", "dense", *options) == message


def test_two_of_four_is_left_out_on_a_cpu_with_a_reason(place, monkeypatch):
    def refuse_seats(seats):
        raise UserError(", ".join(f"{seat.runtime} {seat.label}" for seat in seats))

    monkeypatch.setattr(benchmark, "start_workers", refuse_seats)
    result = run("benchmark", "dense", "dense", "--two-four", "--dtype", "fp16", "--device", "cpu")
    why = "dense is not timed with 2:4: torch's kernels for 2:4 run on NVIDIA GPUs alone, and this is cpu"
    assert result.stderr.splitlines() == [why, why, "Error: PyTorch A, PyTorch B"]


def test_blocks_are_timed_with_their_turns_and_without(place, monkeypatch):
    """Without turns the rotated model computes something else by the same blocks; the dense one has none."""
    ok("prune", "dense", "--recipe", "cayley-rotator-magnitude-50", "--set", "rotation.steps=3", "-o", "turned")
    fork_what_has_imported(monkeypatch)
    how = ("--blocks", "--rounds", "1", "--warmup", "0", "--tokens", "8", "--generate", "0", "--json")
    timed = json.loads(run("benchmark", "dense", "turned", *how).stdout)["blocks"]
    assert [block["phase"] for block in timed] == ["prefill", "block"]
    rows = [(row["label"], row["runtime"], len(row["latencies_ms"][0])) for row in timed[1]["rows"]]
    assert rows == [("A", "PyTorch", 2), ("B", "PyTorch", 2), ("B", "PyTorch, unturned", 2)]
    turned, plain = (load_model(Path("turned"), device="cpu") for _ in range(2))
    stop_turning(plain)
    assert sum(module.numel() for module in turned.parameters()) - sum(p.numel() for p in plain.parameters()) == 16 * 16
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert not torch.allclose(turned(input_ids=ids).logits, plain(input_ids=ids).logits)
    graph_folder("graph")
    message = read_refusal("benchmark", "graph", "graph", "--blocks")
    assert message == "--blocks times blocks in PyTorch, and graph is an exported graph"
