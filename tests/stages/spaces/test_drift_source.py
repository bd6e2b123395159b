"""Drift measured while a model is pruned, against whole models whose earlier parts are those of the output."""

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import ckpt_prune
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import DriftMoments
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.end_states import EndStates
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.stages import FullRecipe
from tests import encoders, families
from tests.encoders import BLOCKS, Pixels
from tests.families import prune
from tests.oracles import drift
from tests.oracles.masked_model import Model
from tests.pairs import one_of
from tests.stages.whole import data_of, stock, whole

FOLDS = 2
HALF = {"heads": 0.5, "mlp": 0.4}
CASES: dict[str, tuple[str, dict[str, float]]] = {
    "llama-gqa-tied": ("llama", HALF),
    "opt-350m-like": ("opt-350m-like", HALF),
    "dinov2-swiglu": ("dinov2-swiglu", HALF),
    "dinov2-swiglu qk": ("dinov2-swiglu", {"qk": 0.5} | HALF),
}
"""Variant, and what else is pruned → what the oracle calls its sites, and ratios by space."""


def samples_of(variant: str) -> Samples:
    samples = data_of(variant)
    return Pixels(samples.values.double(), samples.tokens) if isinstance(samples, Pixels) else samples


def job_on(folder: Path, variant: str, ratios: dict[str, float], *, true_sequential: bool) -> Prepared:
    target = {"target": "sequential", "true_sequential": true_sequential}
    if variant in encoders.VARIANTS:
        recipe: FullRecipe = encoders.recipe(ratios, **target)
    else:
        recipe = families.recipe("ridge", heads=ratios["heads"], mlp=ratios["mlp"], lam=0.1, **target)
    live = LiveSamples(samples_of(variant), FOLDS, torch.float64)
    return prepare_plan(Job(families.Model.open(folder), recipe, None, live))


class Recording(DriftMoments):
    """Keeps what it handed out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[tuple[int, str], Any] = {}

    def moments(self, block, tensors, keys):
        measured = super().moments(block, tensors, keys)
        self.seen |= {(block, key): folds for key, folds in measured.items()}
        return measured


def source_of(job: Job) -> Recording:
    gram = {space: job.recipe.gram_for(space) is not None for space in job.recipe.spaces}
    true_sequential = job.recipe.true_sequential
    return Recording(
        job.live_stream(job.view),
        job.live_stream(job.plain_view),
        job.view.block,
        gram,
        true_sequential=true_sequential,
    )


def until(pruned: Model, dense: Model, block: int, space: str, *, true_sequential: bool) -> Model:
    """The pruned model up to a site, which is whole; what comes after it says nothing here."""
    mixed = copy.deepcopy(pruned)
    layers: Any = mixed.model.get_submodule(mixed.layers)
    theirs: Any = dense.model.get_submodule(dense.layers)
    if not true_sequential or space == "heads":
        layers[block] = theirs[block]
        return mixed
    for linear in (linear for group in dense.inputs[-2:] for linear in group):
        for path in linear.modules:
            owner, _, name = path.rpartition(".")
            setattr(layers[block].get_submodule(owner), name, theirs[block].get_submodule(path))
    return mixed


@pytest.mark.parametrize("true_sequential", [False, True], ids=["per block", "true sequential"])
@pytest.mark.parametrize("case", one_of(4, CASES))
def test_drift_is_that_of_the_pruned_prefix(dense, case, true_sequential, tmp_path, monkeypatch):
    """Also in the blocks themselves where sites are measured one after the other: all of them narrower than before."""
    variant, (sites, ratios) = case.partition(" ")[0], CASES[case]
    job = job_on(dense.folder(variant), variant, ratios, true_sequential=true_sequential)
    source = source_of(job)
    monkeypatch.setattr("ckpt_prune.stages.shared.moments.open_moments", lambda *_: source)
    report = prune(job, tmp_path / "out")
    assert source.seen.keys() == {(block, space) for block in range(BLOCKS) for space in ratios}
    output: PreTrainedModel = (
        ckpt_prune.load(tmp_path / "out") if report["container"]["remote_code"] else stock(tmp_path / "out", variant)
    )
    pruned, model = (whole(m.double(), variant) for m in (output, stock(dense.folder(variant), variant)))
    for (block, space), folds in source.seen.items():
        if space == "qk" or (true_sequential and space == "heads" and "qk" in ratios):
            # Queries and keys of heads that were dropped later are not in the output.
            continue
        if block == 0 and (space == "heads" or not true_sequential):
            assert all(moments.drift.energy == 0 for moments in folds)
            continue
        assert len(folds) == FOLDS
        mixed = until(pruned, model, block, space, true_sequential=true_sequential)
        expected = drift.target(model, mixed, block, drift.SITES[sites][space], samples_of(variant))
        drift.assert_measured(folds, expected)


def test_two_blocks_are_held_at_most(dense, monkeypatch):
    job = job_on(dense.folder("opt"), "opt", HALF, true_sequential=False)
    source = source_of(job)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most, build = 0, BlockFactory.build_block

    def counting(self, *args, **options):
        nonlocal most
        block = build(self, *args, **options)
        gc.collect()  # modules refer to each other in circles, and wait for the collector when nobody holds them
        alive.add(block)
        most = max(most, len(alive))
        return block

    monkeypatch.setattr(BlockFactory, "build_block", counting)
    for block in range(BLOCKS):
        tensors = job.view.block(block)
        source.moments(block, tensors, ["heads", "mlp"])
        source.advance(block, tensors)
    assert most == 2


# ---- how often blocks run ------------------------------------------------------------------------------------------


def runs(
    job: Job, spaces: list[str], monkeypatch: pytest.MonkeyPatch, ends: EndStates | None = None
) -> tuple[dict[str, float], list[Any]]:
    """How often each model's block ran to its attention and to its end, and the moments, block by block."""
    source = DriftMoments(
        job.live_stream(job.view), job.live_stream(job.plain_view), job.view.block, dict.fromkeys(spaces, True),
        true_sequential=True, ends=ends,
    )  # fmt: skip
    counts: dict[str, float] = {}
    run = HiddenStream.run

    def counting(self: HiddenStream, block: Any, index: int, states: Any, rows: Any) -> Any:
        name = "dense" if self is source.dense else "pruned"
        counts[f"{name} begun"] = counts.get(f"{name} begun", 0) + 1
        output = run(self, block, index, states, rows)
        counts[name] = counts.get(name, 0) + 1
        return output

    moments = []
    with monkeypatch.context() as patch:
        patch.setattr(HiddenStream, "run", counting)
        for block in range(BLOCKS):
            tensors = job.view.block(block)
            for stage in source.group_keys(spaces):
                moments.append(source.moments(block, tensors, stage))
                # Any change to the block makes the next stage another one.
                tensors = {name: value * 0.9 for name, value in tensors.items()}
            source.advance(block, tensors)
    batches = len(source.dense.batches) * BLOCKS
    return {name: count / batches for name, count in counts.items()}, moments


PRE_NORM, POST_NORM = "opt", "opt-350m-like"


@pytest.mark.parametrize(
    ("variant", "spaces", "expected"),
    [
        (PRE_NORM, ["heads", "mlp"], {"dense begun": 1, "dense": 1, "pruned begun": 3, "pruned": 2}),
        (PRE_NORM, ["mlp"], {"dense begun": 1, "dense": 1, "pruned begun": 2, "pruned": 2}),
        (PRE_NORM, ["heads"], {"dense begun": 1, "dense": 1, "pruned begun": 2, "pruned": 1}),
        (PRE_NORM, ["mlp", "heads"], {"dense begun": 2, "pruned begun": 3, "pruned": 2}),
        (PRE_NORM, ["qk", "heads", "mlp"], {"dense begun": 1, "dense": 1, "pruned begun": 4, "pruned": 2}),
        (POST_NORM, ["heads", "mlp"], {"dense begun": 2, "pruned begun": 3, "pruned": 2}),
    ],
    ids=["both", "mlp", "heads", "mlp first", "qk too", "post-norm"],
)
def test_the_dense_block_runs_once_where_its_output_serves_what_is_left(dense, variant, spaces, expected, monkeypatch):
    """And what is measured is bit for bit what it is where every stage runs it again."""
    job = job_on(dense.folder(variant), variant, HALF, true_sequential=True)
    counts, moments = runs(job, spaces, monkeypatch)
    # The first block is run once more on one of all batches, which shows its structure.
    probe = 1 / (len(source_of(job).dense.batches) * BLOCKS)
    expected = {name: count + probe * name.startswith("pruned") for name, count in expected.items()}
    assert {name: counts[name] for name in expected} == pytest.approx(expected)
    monkeypatch.setattr(DriftMoments, "group_keys", lambda self, keys: [[key] for key in keys])
    again, every = runs(job, spaces, monkeypatch)
    alone = len([space for space in spaces if space != "qk"]) + 1
    assert again["dense begun"] == pytest.approx(alone + probe)
    for ours, theirs in zip(moments, every, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"qk"}:
            for a, b in zip(ours[key], theirs[key], strict=True):
                assert torch.equal(a.gram, b.gram)
                assert torch.equal(a.drift.cross, b.drift.cross)
                assert torch.equal(a.drift.sum, b.drift.sum)
                assert a.drift.energy == b.drift.energy


def keep_ends(job: Job, folder: Path) -> EndStates:
    """The states behind every block of the dense model."""
    stream, samples = job.live_stream(job.plain_view), job.live.samples
    ends = EndStates(job.model, samples, range(len(samples)), folder, torch.float64)
    for block in range(BLOCKS):
        stream.advance(block, job.plain_view.block(block))
        ends.write(block, stream.states)
    return ends


@pytest.mark.parametrize(
    ("variant", "spaces", "begun"),
    [(PRE_NORM, ["mlp"], 0), (PRE_NORM, ["qk", "mlp"], 0), (PRE_NORM, ["heads", "mlp"], 1), (POST_NORM, ["mlp"], 1)],
    ids=["mlp", "qk too", "heads too", "post-norm"],
)
def test_dense_blocks_whose_output_is_known_do_not_run(dense, variant, spaces, begun, monkeypatch, tmp_path):
    """Unless the stream inside them is asked for. The moments are the same bit for bit."""
    job = job_on(dense.folder(variant), variant, HALF, true_sequential=True)
    _, expected = runs(job, spaces, monkeypatch)
    counts, found = runs(job, spaces, monkeypatch, keep_ends(job, tmp_path))
    assert counts.get("dense begun", 0) == begun
    for ours, theirs in zip(found, expected, strict=True):
        for key in ours.keys() - {"qk"}:
            for a, b in zip(ours[key], theirs[key], strict=True):
                assert torch.equal(a.gram, b.gram)
                assert torch.equal(a.drift.cross, b.drift.cross)
                assert a.drift.energy == b.drift.energy > 0 or a.drift.energy == b.drift.energy == 0


def test_blocks_of_which_nothing_goes_do_not_run_before_the_first_other(dense, monkeypatch, tmp_path):
    """The next block's input has the same bits as if these blocks had run."""
    job = job_on(dense.folder(PRE_NORM), PRE_NORM, HALF, true_sequential=True)
    ends, gram, ran = keep_ends(job, tmp_path), {"mlp": True}, []
    sources = [
        DriftMoments(
            job.live_stream(job.view), job.live_stream(job.plain_view), job.view.block, gram,
            true_sequential=True, ends=known,
        )
        for known in (ends, None)
    ]  # fmt: skip
    run = HiddenStream.run
    monkeypatch.setattr(HiddenStream, "run", lambda self, *args: (ran.append(self), run(self, *args))[1])
    first = sources[0]
    for block, changes in enumerate([False, True, False]):
        tensors = job.view.block(block)
        if changes:
            tensors = {name: value * 0.9 for name, value in tensors.items()}
        for source in sources:
            source.advance(block, tensors)
        assert torch.equal(first.stream.states, sources[1].stream.states)
        assert torch.equal(first.dense.states, sources[1].dense.states)
        assert (first.stream in ran) == (block > 0)
        assert first.dense not in ran
        ran.clear()


def test_states_that_are_not_kept_are_refused(dense, tmp_path):
    job = job_on(dense.folder("opt"), "opt", HALF, true_sequential=True)
    ends = replace(keep_ends(job, tmp_path), rows=range(2, 4))
    states = torch.arange(24.0).view(6, 2, 2)
    ends.write(0, states)
    assert torch.equal(ends.read(0), states[2:4])
    assert torch.equal(ends.read(0, range(3, 4)), states[3:4])
    with pytest.raises(ValueError, match="not of"):
        ends.read(0, range(1, 3))


def test_what_the_dense_stream_has_passed_is_refused(dense):
    job = job_on(dense.folder("opt"), "opt", HALF, true_sequential=True)
    source, tensors = source_of(job), job.view.block(0)
    source.group_keys(["heads", "mlp"])
    source.moments(0, tensors, ["heads"])
    with pytest.raises(ValueError, match="already passed block 0"):
        source.moments(0, tensors, ["heads"])
    source.advance(0, tensors)
    source.moments(1, job.view.block(1), ["heads"])
