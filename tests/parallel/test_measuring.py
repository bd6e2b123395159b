"""Moments that several processes measure together are those of one."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.stages.spaces.effects.gradients import add_gradients
from ckpt_prune.stages.spaces.effects.measured import measure_effects
from tests import families
from tests.contract.models import CASES
from tests.parallel.threads import in_threads


def make_model(place: Path, kind: str) -> Path:
    """A tiny model of a family."""
    return next(case for case in CASES if case.model_type == kind).write(place / "dense")


def measure(folder: Path, out: Path, size: int, *, folds: int = 2, samples: int = 7, collect=("moments", "gram")):
    """A statistics folder that so many processes have made together."""
    chosen = TokenWindows(families.windows(samples))

    def work(_group) -> Statistics:
        how = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
        return measure_statistics(Model.open(folder), chosen, out, seed=0, folds=folds, collect=collect, **how)

    return in_threads(size, work)[-1]


def fields_of(moments) -> dict[str, object]:
    if dataclasses.is_dataclass(moments):
        return {field.name: getattr(moments, field.name) for field in dataclasses.fields(moments)}
    names = ("samples", "tokens", "queries", "keys", "fourth", "centred", "gram")
    return {name: getattr(moments, name) for name in names if hasattr(moments, name)}


def assert_alike(a: Statistics, b: Statistics) -> None:
    assert a.index.model_copy(update={"files": {}}) == b.index.model_copy(update={"files": {}})
    for block in range(a.index.blocks):
        ours, theirs = a.read_moments(block), b.read_moments(block)
        assert ours.keys() == theirs.keys()
        for name, folds in ours.items():
            for x, y in zip(folds, theirs[name], strict=True):
                for field, value in fields_of(x).items():
                    other = fields_of(y)[field]
                    if isinstance(value, torch.Tensor):
                        assert torch.allclose(value, other, rtol=1e-5, atol=1e-4), (name, field)
                    else:
                        assert value == other, (name, field)


def test_as_one_process_would_and_the_same_bytes_again(tmp_path):
    folder = families.make(tmp_path / "dense")
    one = measure(folder, tmp_path / "one", 1)
    three = measure(folder, tmp_path / "three", 3)
    assert_alike(one, three)
    assert measure(folder, tmp_path / "again", 3).index.files == three.index.files


def test_shares_that_are_folds_give_the_very_bytes_of_one_process(tmp_path):
    folder = families.make(tmp_path / "dense")
    one = measure(folder, tmp_path / "one", 1, folds=4, samples=8)
    assert measure(folder, tmp_path / "two", 2, folds=4, samples=8).index.digest == one.index.digest


@pytest.mark.parametrize(
    ("kind", "collect"),
    [
        ("opt", ("moments", "gram", "logits", "centred")),
        ("llama", ("moments", "rotary", "linears", "taylor")),
        ("mixtral", ("moments", "gram")),
    ],
)
def test_every_kind_of_moments(tmp_path, kind, collect):
    folder = make_model(tmp_path, kind)
    one, two = (measure(folder, tmp_path / str(size), size, folds=1, collect=collect) for size in (1, 2))
    assert_alike(one, two)
    for block in range(one.index.blocks):
        for name, taylor in one.read_taylor(block).items():
            assert torch.allclose(taylor.first, two.read_taylor(block)[name].first, rtol=1e-4)
            assert torch.allclose(taylor.second, two.read_taylor(block)[name].second, rtol=1e-4)


def test_grams_of_single_samples_keep_their_order(tmp_path):
    folder = make_model(tmp_path, "opt")
    one, two = (measure(folder, tmp_path / str(n), n, samples=3, collect=("moments", "logits")) for n in (1, 2))
    names = [name for name in one.read_moments(0) if "q_proj" in name]
    assert names
    for name in names:
        for x, y in zip(one.read_moments(0)[name], two.read_moments(0)[name], strict=True):
            assert x.form == y.form == "per-sample"
            assert torch.allclose(x.queries, y.queries, rtol=1e-5)
            assert torch.allclose(x.keys, y.keys, rtol=1e-5)


def test_effects_that_processes_share_out_are_those_of_one(tmp_path):
    folder = families.make(tmp_path / "dense")
    model, chosen = Model.open(folder), TokenWindows(families.windows(4))
    how = {"device": torch.device("cpu"), "compute_dtype": torch.float32}

    def work(group, statistics: Statistics):
        spaces = list(model.family.consumers)
        effects = measure_effects(model, statistics, chosen, spaces=spaces, **how)
        return effects, add_gradients(model, statistics, chosen, **how).index

    results = []
    for size in (1, 2):
        statistics = measure(folder, tmp_path / str(size), 1, folds=2, samples=4)
        results.append(in_threads(size, lambda group, copied=statistics: work(group, copied))[-1])
    assert results[0] == results[1]
    assert results[0][1].predicted


def test_too_few_samples_and_a_failure_of_one_leave_nothing(tmp_path):
    folder = families.make(tmp_path / "dense")
    with pytest.raises(UserError, match=r"^4 processes cannot share 3 samples"):
        measure(folder, tmp_path / "out", 4, samples=3)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
