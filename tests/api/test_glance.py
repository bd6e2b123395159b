"""Results in an interpreter: one line, however many blocks, weights, items or files they hold."""

from pathlib import Path

import pytest

import ckpt_prune
from ckpt_prune.benchmarking.results import Benchmark, BenchmarkRow, Block, Machine
from ckpt_prune.evaluation.block_comparison import BlockComparison, Comparison, SharesOfError
from ckpt_prune.evaluation.choices import ChoiceScore
from ckpt_prune.evaluation.results import PlainResult, ScoredResult
from ckpt_prune.evaluation.similarity import Similarity
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.runner.push import Pushed
from ckpt_prune.runner.sweep import Sweep
from ckpt_prune.runner.sweep_points import SweepPoint

LINE = 700
"""Characters that a result may take in an interpreter."""
QUIET = {"progress": False}
DATA = {"text": "calib.txt", "samples": 8, "window": 16}


def cost(parameters: int) -> str:
    return f"Cost(parameters={parameters}, bytes={4 * parameters}, "


@pytest.mark.usefixtures("place")
def test_what_is_made_of_checkpoints() -> None:
    statistics = ckpt_prune.calibrate("dense", **DATA, collect="moments,gram", output="measured", **QUIET)
    assert repr(statistics) == (
        "Statistics(folder='measured', modality='text', samples=8, window=16, folds=1, blocks=2, "
        "collect=['moments', 'gram'])"
    )
    given = {"recipe": "rcpu", "ratio": 0.5, "statistics": "stats"}
    planned = ckpt_prune.plan("dense", **given, output="plan.json", **QUIET)
    pruned = ckpt_prune.prune("dense", **given, output="small", **QUIET)
    dry = ckpt_prune.prune("dense", **given, output="other", dry_run=True, **QUIET)
    before, after = planned.plan.before.parameters, planned.plan.after.parameters
    assert repr(planned).startswith("Planned(plan=Plan(model_path='dense', recipe='rcpu', container='")
    assert repr(planned).endswith(", sites=4), path=PosixPath('plan.json'))")
    assert repr(pruned).startswith("Pruned(path='small', report=Report(source='dense', recipe='rcpu', container='")
    assert repr(dry).startswith("Pruned(path='other', settled=Prepared(source='dense', recipe='rcpu', ")
    recovered = ckpt_prune.recover(pruned, dense="dense", **DATA, epochs=1, output="better", **QUIET)
    assert repr(recovered).startswith("Recovered(path=PosixPath('better'), report=Report(source='dense', ")
    for shown in (planned, pruned, dry, recovered):
        assert cost(before) in repr(shown)
        assert cost(after) in repr(shown)
        assert len(repr(shown)) < LINE
    described = ckpt_prune.inspect("small", sparsity=True, **QUIET)
    assert f"parameters={after}, " in repr(described)
    assert len(repr(described)) < LINE
    assert len(str(described)) < LINE
    for value in (pruned.report, pruned.settled, planned.plan):
        assert len(str(value)) < LINE
    quantised = ckpt_prune.quantize(pruned, output="int8", format="int8", **QUIET)
    assert repr(quantised).startswith(
        "QuantizedModel(path=PosixPath('int8'), record=QuantizationRecord(source='small', "
    )
    assert len(repr(quantised)) < LINE


def test_a_graph(finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    validations = ckpt_prune.validate("out/onnx", against="out", text="calib.txt", window=16, samples=4, **QUIET)
    assert repr(validations.graphs[0]).startswith(
        "Validation(file='model.onnx', passed=True, provider='cpu', dtype='fp32', "
    )
    assert len(repr(validations)) < LINE


def test_what_grows_with_blocks_items_and_files() -> None:
    alike = Similarity(mse=0.1, relative_error=0.1, cosine=0.9, cka=0.9)
    blocks = [BlockComparison(block, alike, SharesOfError(0.5, 0.25, None)) for block in range(48)]
    size = Cost(parameters=100, bytes=400, flops=100, tokens=8)
    widths, errors = {"heads": (1, 2), "mlp": (3, 4)}, {"heads": 0.1, "mlp": 0.2}
    points = tuple(SweepPoint(at / 50, size, widths, errors) for at in range(50))
    task = dict.fromkeys(("acc,none", "acc_stderr,none", "acc_norm,none"), 0.5)
    machine = Machine(processor="cpu", gpu=None, cores=2, threads=1, versions={})
    row = BenchmarkRow.model_construct(label="A", model="a", latencies_ms=[[1.0]] * 999)
    timed = Block.model_construct(phase="prefill", batch=1, rows=[row])
    results = [
        Benchmark.model_construct(machine=machine, rounds=999, runs=[], blocks=[timed]),
        Comparison(Path("a"), Path("b"), blocks, 0.1, logits=True, samples=8, tokens=16),
        Sweep("ridge", ("heads", "mlp"), size, points),
        ChoiceScore(items=999, accuracy=0.5, accuracy_norm=0.5, chance=0.2, picked=(1,) * 999, right=(True,) * 999),
        ScoredResult(Path("a"), None, skipped=tuple(f"{at}.jpg" for at in range(999))),  # type: ignore[arg-type]
        PlainResult({"results": {f"task{at}": task for at in range(20)}, "versions": {}}, []),
        Pushed("org/name", False, {f"model-{at:05d}-of-00099.safetensors": at for at in range(99)}),
    ]
    assert [result for result in results if len(repr(result)) >= LINE] == []
    assert repr(results[2]) == (
        "Sweep(recipe='ridge', key='ratio', values='0.0 to 0.98', points=50, before=Cost(parameters=100, bytes=400, "
        "flops=100, tokens=8, cache=None))"
    )
    assert repr(results[-1]) == "Pushed(repo='org/name', public=False, files=99, bytes=4851)"
