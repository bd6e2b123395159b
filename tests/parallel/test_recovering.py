"""Blocks that several processes train together."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.stages.recovery.block_training import rows_within
from ckpt_prune.stages.recovery.training import SampleSplit
from tests import families
from tests.interrupting import interrupt_at
from tests.parallel.threads import in_threads
from tests.reports import recover
from tests.stages.recovering import QUICK, recovery_job

pytestmark = pytest.mark.thorough  # processes share out measuring and pruning every time

TRAINING = {"epochs": 2, "lr": 0.001, "batch": 3, "held_out": 0.34, "accumulate": 2}


def recover_together(pruned: Path, dense: Path, out: Path, size: int, **options):
    """The report of what so many processes have recovered."""

    def work(_group):
        job = recovery_job(pruned, dense, TokenWindows(families.windows(7)), after=frozenset({1}), **TRAINING)
        return recover(job, out, **options)

    reports = in_threads(size, work)
    assert all(report == reports[0] for report in reports)
    return reports[0]


def assert_alike(a: Path, b: Path, before: Path) -> None:
    ours, theirs, given = (load_file(folder / "model.safetensors") for folder in (a, b, before))
    moved = [name for name, tensor in ours.items() if not torch.equal(tensor, given[name])]
    assert moved
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-3, atol=1e-5), name


def test_as_one_process_would(tmp_path):
    dense = families.make(tmp_path / "dense", "mistral")
    pruned = tmp_path / "pruned"
    families.prune(families.job_on(dense, families.recipe("none", score="magnitude")), pruned)
    one, three = (recover_together(pruned, dense, tmp_path / str(size), size) for size in (1, 3))
    assert_alike(tmp_path / "1", tmp_path / "3", pruned)
    assert one["recovery"]["data"] == three["recovery"]["data"]
    for ours, theirs in zip(one["layers"], three["layers"], strict=True):
        assert ours.pop("curve") == pytest.approx(theirs.pop("curve"), rel=1e-3)
        assert ours == pytest.approx(theirs, rel=1e-3)
    for ours, theirs in zip(*(report["recovery"]["perplexity_after"] for report in (one, three)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_another_number_of_processes_goes_on(tmp_path, monkeypatch):
    dense = families.make(tmp_path / "dense", "mistral")
    pruned = tmp_path / "pruned"
    families.prune(families.job_on(dense, families.recipe("none", score="magnitude")), pruned)
    recover_together(pruned, dense, tmp_path / "whole", 1)
    with monkeypatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 2)
        with pytest.raises(KeyboardInterrupt):
            recover_together(pruned, dense, tmp_path / "out", 2)
    recover_together(pruned, dense, tmp_path / "out", 3, resume=True)
    assert_alike(tmp_path / "whole", tmp_path / "out", pruned)


@pytest.mark.parametrize("method", ["laco", "scales"])
def test_a_recipe_that_recovers(tmp_path, method):
    from ckpt_prune.job.job import RecoverySamples
    from ckpt_prune.runner.plan import prepare_plan

    dense = families.make(tmp_path / "dense", "mistral")
    recipe = families.recipe("bias", target="sequential", recovery={**QUICK, "batch": 3, "method": method})

    def work(_group, out):
        samples = TokenWindows(families.windows(7))
        request = families.request_on(
            dense, recipe, None, samples.windows, training=RecoverySamples(samples, torch.float32)
        )
        return families.prune(prepare_plan(request), tmp_path / out)

    (alone,) = in_threads(1, lambda group: work(group, "one"))
    reports = in_threads(2, lambda group: work(group, "two"))
    assert reports[0] == reports[1]
    assert ("adapters" in alone, "recovery" in alone) == (method == "scales", method == "laco")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-3, atol=1e-5), name


def test_shares_of_samples_cover_every_batch_once():
    split = SampleSplit.of(10, 0.3)
    assert split.samples == 10
    shares = [slice(10 * rank // 3, 10 * (rank + 1) // 3) for rank in range(3)]
    rows = torch.tensor([7, 0, 3, 9])
    assert [rows_within(rows, share).tolist() for share in shares] == [[0], [0], [1, 3]]
