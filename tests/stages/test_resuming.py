"""An interrupted run goes on with all that it has done: what it measured, learned, pruned."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.job import RecoverySamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.recovery import scale_blocks
from ckpt_prune.stages.spaces.effects import gradients
from ckpt_prune.stages.spaces.effects.measured import measure_effects
from ckpt_prune.stages.spaces.pruner import Pruner
from tests.families import BLOCKS, contents, job_on, prune, recipe, windows
from tests.interrupting import interrupt_at
from tests.pairs import one_of

DENSE = recipe("ridge", lam=0.1)
BEST = load_recipe("best", ratio=0.3)
SCALED = load_recipe("best", ("recovery={method: scales, epochs: 3, batch: 4, held_out: 0}",), 0.3)
RECORDS = {"dense": 2 * BLOCKS + 2, "best": 3 * BLOCKS + 3, "scaled": 4 * BLOCKS + 4}
"""Entries of a whole run's journal."""


def job(sources: Any, name: str, **options: Any) -> Prepared:
    full_recipe, folds = {"dense": (DENSE, 1), "best": (BEST, 2), "scaled": (SCALED, 2)}[name]
    live = options.pop("live", windows(4, 16))
    if full_recipe.recovery is not None:
        options["training"] = RecoverySamples(TokenWindows(live), torch.float32)
    return job_on(sources.folder("llama"), full_recipe, live=live, folds=folds, **options)


@pytest.fixture(scope="module")
def whole(sources, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of runs that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    for name in RECORDS:
        prune(job(sources, name), folder / name)
    assert sorted(path.name for path in folder.iterdir()) == sorted(RECORDS)
    return {name: contents(folder / name) for name in RECORDS}


def stop_before_entry(settled: Prepared, out: Path, record: int, **options: Any) -> None:
    """A run that ends just before this entry of its journal."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, Journal, "record", record)
        with pytest.raises(KeyboardInterrupt):
            prune(settled, out, **options)


@pytest.mark.parametrize(
    ("name", "record"), one_of(8, [(name, n + 1) for name, most in RECORDS.items() for n in range(most)])
)
def test_nothing_is_done_twice_and_the_bytes_are_those_of_one_run(sources, tmp_path, whole, name, record, monkeypatch):
    out = tmp_path / "out"
    stop_before_entry(job(sources, name), out, record)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    records, observed, solved, fitted, messages = [], [], [], [], []
    for owner, method, seen in (
        (Journal, "record", records),
        (HiddenStream, "observe", observed),
        (Pruner, "block", solved),
        (scale_blocks, "fit_scales", fitted),
    ):
        watch(monkeypatch, owner, method, seen)
    prune(job(sources, name), out, resume=True, announce=messages.append)
    assert contents(out) == whole[name]
    assert len(records) == RECORDS[name] - record + 1
    assert len(observed) == max(0, BLOCKS - record + 1)
    assert len(fitted) == (name == "scaled" and record <= 3 * BLOCKS + 4)
    assert len(messages) == 1 + len(fitted)
    assert list(tmp_path.iterdir()) == [out]


def test_a_pass_back_that_was_interrupted_is_made_again(sources, tmp_path, whole):
    """It has to start at the last block; what it had written counts for nothing."""
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, gradients, "write_fisher", 2)
        with pytest.raises(KeyboardInterrupt):
            prune(job(sources, "best"), out)
    measured = Statistics(tmp_path / "out.partial" / "measured")
    assert not measured.index.fisher
    assert len(list(measured.folder.glob("fisher-*"))) == 1
    prune(job(sources, "best"), out, resume=True)
    assert contents(out) == whole["best"]


def watch(patch: pytest.MonkeyPatch, owner: object, method: str, seen: list[Any]) -> None:
    original = getattr(owner, method)
    patch.setattr(owner, method, lambda *args, **options: seen.append(args) or original(*args, **options))


def test_other_data_is_another_job_before_anything_is_measured(sources, tmp_path, monkeypatch):
    stop_before_entry(job(sources, "dense"), tmp_path / "out", BLOCKS + 3)
    files = contents(tmp_path)
    monkeypatch.setattr(HiddenStream, "__init__", lambda *_a, **_k: pytest.fail("measured"))
    with pytest.raises(UserError, match="was begun by a different job"):
        prune(job(sources, "dense", live=windows(4, 16, seed=6)), tmp_path / "out", resume=True)
    assert contents(tmp_path) == files


def test_measured_effects_are_taken_over_to_the_last_bit(sources, tmp_path):
    """However many blocks an interrupted run has measured."""
    request = job(sources, "best")
    statistics = sources.statistics("llama", folds=2)
    options: dict[str, Any] = {"spaces": ["heads", "mlp"], "device": request.device}
    options["compute_dtype"] = request.live.compute_dtype

    def measure(journal: Journal) -> dict[str, list[tuple[int, float]]]:
        return measure_effects(request.model, statistics, request.live.samples, **options, journal=journal)

    first = Journal(tmp_path, "job")
    expected = measure(first)
    for count in range(BLOCKS + 1):
        notes = {f"effects {block}": first.notes[f"effects {block}"] for block in range(count)}
        assert measure(Journal(tmp_path, "job", notes=notes)) == expected


# ---- what is finished ----------------------------------------------------------------------------------------------


def test_a_finished_output_of_the_same_job_is_left_alone(sources, tmp_path, whole, monkeypatch):
    out, messages = tmp_path / "out", []
    prune(job(sources, "best"), out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    monkeypatch.setattr(Staging, "__init__", lambda *_a, **_k: pytest.fail("begun"))
    report = prune(job(sources, "best"), out, resume=True, announce=messages.append)
    assert messages == [f"{out} is finished: nothing is left to do"]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    assert contents(out) == whole["best"]
    assert report["job"] == job(sources, "best").job.digest


def test_a_finished_output_of_another_job_is_refused(sources, tmp_path):
    out = tmp_path / "out"
    prune(job(sources, "dense"), out)
    for other in (job(sources, "best"), job(sources, "dense", diagnostics=True)):
        with pytest.raises(UserError, match="out exists; --overwrite replaces it, or give another -o"):
            prune(other, out, resume=True)


def test_a_run_that_lacks_the_swap_alone_only_makes_it(sources, tmp_path, whole, monkeypatch):
    """Also without what was measured, which is deleted just before."""
    out, messages = tmp_path / "out", []
    with monkeypatch.context() as patch:
        interrupt_at(patch, Path, "rename", 1)
        with pytest.raises(KeyboardInterrupt):
            prune(job(sources, "dense"), out)
    assert not (tmp_path / "out.partial/measured").exists()
    monkeypatch.setattr(HiddenStream, "__init__", lambda *_a, **_k: pytest.fail("measured"))
    prune(job(sources, "dense"), out, resume=True, announce=messages.append)
    assert messages == [f"resuming {out}.partial: all done but putting it in its place"]
    assert contents(out) == whole["dense"]


def test_a_swap_that_a_kill_interrupted_is_completed_by_resuming(sources, tmp_path):
    out = tmp_path / "out"
    prune(job(sources, "dense"), out)
    aside = tmp_path / ".out.ckpt_prune-replaced"
    shutil.copytree(out, aside)
    (aside / "notes.txt").write_text("mine")
    prune(job(sources, "dense"), out, resume=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert list(tmp_path.iterdir()) == [out]


# ---- old outputs ---------------------------------------------------------------------------------------------------


def test_overwriting_keeps_what_its_user_put_there(sources, tmp_path):
    """Overwriting a real output replaces every name that this tool writes, and keeps what the user added."""
    out, messages = tmp_path / "out", []
    prune(job(sources, "dense"), out)
    before = contents(out)
    (out / "notes.txt").write_text("mine")
    (out / "graph").mkdir()
    (out / "graph/ckpt_prune_onnx.json").write_text("{}")
    prune(job(sources, "dense"), out, overwrite=True, announce=messages.append)
    assert contents(out) == before | {"notes.txt": b"mine", "graph/ckpt_prune_onnx.json": b"{}"}
    assert messages == [f"{out / 'graph'} was exported from the output that is replaced: export it again"]
