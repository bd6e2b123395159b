"""Large means and massive tokens: sums of products that float32 is too coarse for."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import fit_from_moments, squared_error
from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.measure.moments.inputs import Drift, Moments, sum_folds
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.sums import add_widest
from ckpt_prune.measure.statistics.folder import pack_symmetric, unpack_symmetric
from ckpt_prune.parallel.group import Group

WIDTH, OUTPUTS, COUNT = 24, 12, 4096


def drawn(mean: float = 0.0, massive: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Correlated tokens whose means are so many deviations away, one of them so many times as long."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(COUNT, WIDTH, generator=g) @ (torch.eye(WIDTH) + 0.2 * torch.randn(WIDTH, WIDTH, generator=g))
        + mean
    )
    x[COUNT // 3] *= massive
    return x.to(dtype)


def measure(x: Tensor, parts: int = 4) -> Moments:
    moments = Moments.zeros(WIDTH, gram=True)
    for part in x.chunk(parts):
        moments = moments.accumulate(part)
    return moments


def exact(x: Tensor) -> Moments:
    x = x.double()
    return Moments(len(x), x.sum(0), x.square().sum(0), x.abs().sum(0), (x != 0).sum(0).double(), x.T @ x)


HARD = [
    {"mean": 1e3},
    {"mean": 1e4},
    {"mean": 1e5},
    {"massive": 1e5},
    {"mean": 200.0, "dtype": torch.bfloat16},
    {"massive": 1e5, "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("case", HARD, ids=str)
def test_errors_and_fits_are_those_of_exact_sums(case: dict[str, Any]) -> None:
    x = drawn(**case)
    weight = torch.randn(OUTPUTS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = torch.arange(0, WIDTH, 2)
    ours, theirs = measure(x), exact(x)
    diagnostics, expected = diagnose(weight, ours, kept), diagnose(weight, theirs, kept)
    assert diagnostics.floor == pytest.approx(expected.floor, rel=1e-3)
    assert diagnostics.rho2 == pytest.approx(expected.rho2, rel=1e-3)
    np.testing.assert_allclose(ours.variance, theirs.variance, rtol=1e-4)
    fit, truth = fit_from_moments(weight, ours, kept), fit_from_moments(weight, theirs, kept)
    for name in ("least-squares", "rotation-scale", "centred-rotation", "affine"):
        lost = [squared_error(METHODS[name].fit(weight[:, kept], fit_input, 1.0), truth) for fit_input in (fit, truth)]
        assert lost[0] <= lost[1] * 1.001, name


def test_ordinary_tokens_are_summed_in_float32() -> None:
    assert measure(drawn(mean=3.0)).gram.dtype == torch.float32  # type: ignore[union-attr]


def test_sums_add_whatever_type_each_has() -> None:
    folds = [measure(drawn(mean=mean)) for mean in (0.0, 1e4)]
    assert [fold.gram.dtype for fold in folds] == [torch.float32, torch.float64]  # type: ignore[union-attr]
    total, expected = sum_folds(folds), exact(torch.cat([drawn(), drawn(mean=1e4)]))
    np.testing.assert_allclose(total.gram, expected.gram, rtol=1e-9)
    packed = pack_symmetric(total.gram)  # type: ignore[arg-type]
    assert torch.equal(unpack_symmetric(packed, WIDTH), total.gram)  # type: ignore[arg-type]


def test_drift_is_summed_as_its_tokens_need() -> None:
    x, delta = drawn(mean=1e4), torch.randn(COUNT, OUTPUTS, generator=torch.Generator().manual_seed(2)) + 5
    drift = Drift.zeros(OUTPUTS, WIDTH)
    for part, difference in zip(x.chunk(4), delta.chunk(4), strict=True):
        drift = drift.accumulate(difference, part)
    y, z = delta.double(), x.double()
    cross = drift.cross.double() - torch.outer(drift.sum, z.mean(0))
    expected = (y - y.mean(0)).T @ (z - z.mean(0))
    assert (cross - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("form", ["per-sample", "fourth-order"])
def test_logits_of_large_means(form: Any) -> None:
    """Logit moments of queries and keys with large means are as exact as products of Grams in float64."""
    g = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(6, 16, 4, generator=g) + offset for offset in (300.0, 100.0))
    fourth = LogitMoments.zeros(1, 4, form=form).accumulate(queries, keys).as_fourth(torch.float64).fourth
    grams = [projection.double().mT @ projection.double() for projection in (queries, keys)]
    rows, columns = torch.triu_indices(4, 4)
    A, B = (gram[:, rows, columns] for gram in grams)
    np.testing.assert_allclose(fourth[0], A.T @ B, rtol=1e-12)  # type: ignore[index]


def test_rotary_pairs_of_large_means() -> None:
    g = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(2, 1, 16, 2, 3, generator=g) + 300 for _ in "qk")
    gram = RotaryMoments.zeros(1, 3).accumulate(queries, keys).gram
    q, k = (projection.double().flatten(-2)[:, 0] for projection in (queries, keys))
    z = torch.einsum("btp,bsp->btsp", q.view(2, 16, 2, 3)[:, :, 0], k.view(2, 16, 2, 3)[:, :, 0])
    z = z + torch.einsum("btp,bsp->btsp", q.view(2, 16, 2, 3)[:, :, 1], k.view(2, 16, 2, 3)[:, :, 1])
    np.testing.assert_allclose(gram[0, ::2, ::2], torch.einsum("btsp,btsq->pq", z, z), rtol=1e-12)


class Pair(Group):
    """This process and one whose sums are given."""

    size = 2

    def __init__(self, other: Tensor) -> None:
        self._other = other

    def total(self, value: float) -> float:
        return value + float(self._other.dtype == torch.float64)

    def add(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float64
        return tensor + self._other.to(tensor.dtype)


def test_processes_add_in_the_widest_type_that_any_has() -> None:
    narrow, wide = torch.ones(2, 2), torch.full((2, 2), 1e-12, dtype=torch.float64)
    assert float(add_widest(Pair(wide), narrow)[0, 0]) == float(add_widest(Pair(narrow), wide)[0, 0]) == 1 + 1e-12
