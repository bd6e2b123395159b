"""Newton steps on masked weights, against whole models in float64 (`oracles.snows`)."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ckpt_prune.options.training import SnowsSettings
from ckpt_prune.stages.recovery.newton import search_line, solve_by_products
from ckpt_prune.stages.recovery.snows import OperationsError, fit_group, module_groups
from ckpt_prune.stages.recovery.training import SampleSplit
from tests.oracles import laco, snows
from tests.oracles.masked_model import Model as Whole

from .twins import SAMPLES, Twins, Weights, settings

BLOCK = 1
VARIANTS = ("vit", "opt", "llama")
ALL = torch.arange(SAMPLES)


class Group:
    """One group of linears of block 1, masked; before it the pruned model's weights, behind it the dense one's."""

    def __init__(self, twins: Twins, at: int, behind: int, part: int = SAMPLES) -> None:
        self.twins, self.at, self.behind = twins, at, behind
        self.dense_weights, masked = twins.disk(), twins.disk(twins.pruned())
        stream = twins.stream(masked, sizes={part, SAMPLES % part or part, 1, 2})
        for block in range(BLOCK):
            stream.advance(block, twins.block(block, masked))
        groups = module_groups(stream.factory, BLOCK)
        self.names, later = list(groups[at]), [name for own in groups[at + 1 :] for name in own]
        self.tensors: Weights = twins.block(BLOCK, masked) | {name: self.dense_weights[name] for name in later}
        paths = [[path for own in group.values() for path in own] for group in groups]
        dense = {name: self.dense_weights[name] for name in self.names}
        self.error = OperationsError(stream, BLOCK, self.tensors, dense, paths, at, behind + 1, part)

    def whole(self, weights: Weights) -> Whole:
        """The pruned model with block 1 as it is here, but for these weights."""
        model = self.twins.pruned()
        laco.put(model, BLOCK, {name: tensor.double() for name, tensor in self.tensors.items()})
        snows.put(model, BLOCK, list(weights), weights)
        return model

    def oracle(self) -> float:
        dense = self.whole({name: self.dense_weights[name] for name in self.names})
        return snows.error(dense, self.whole(self.error.keep()), BLOCK, self.at, self.behind, self.twins.data)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("at", "behind"), [(0, 3), (1, 2), (2, 7), (3, 0)])
def test_the_error_is_that_of_the_operations_of_the_whole_model(twins: Callable[[str], Twins], variant, at, behind):
    group = Group(twins(variant), at, behind)
    assert group.error.loss(ALL) == pytest.approx(group.oracle(), rel=1e-10)
    step = torch.randn(len(group.error.values()), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 10
    group.error.move(step)
    assert group.error.loss(ALL) == pytest.approx(group.oracle(), rel=1e-10)


@pytest.mark.parametrize("variant", VARIANTS[:2])  # a Llama's norms round to float32
@pytest.mark.parametrize("part", [SAMPLES, 4])
def test_products_with_the_hessian_are_differences_of_gradients(twins: Callable[[str], Twins], variant, part):
    """A difference over 2h is off by h² times a third derivative, and by the rounding of a gradient over h."""
    error, h = Group(twins(variant), 0, 3, part).error, 1e-5
    start = error.values()
    vector = torch.randn(len(start), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with error.quadratic(ALL) as (gradient, product):
        exact = product(vector)
    ends = []
    for sign in (1, -1):
        error.move(start + sign * h * vector - error.values())
        with error.quadratic(ALL) as (at_end, _):
            ends.append(at_end)
        error.move(start - error.values())
    torch.testing.assert_close(exact, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
    slope = (error_at(error, start + h * vector) - error_at(error, start - h * vector)) / (2 * h)
    assert float(gradient @ vector) == pytest.approx(slope, rel=1e-5)


def error_at(error: OperationsError, values: Tensor) -> float:
    error.move(values - error.values())
    return error.loss(ALL)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ridge", [0.01, 1e-4])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_without_operations_behind_it_is_masked_least_squares(twins: Callable[[str], Twins], variant, ridge, at):
    group = Group(twins(variant), at, 0)
    with group.error.quadratic(ALL) as (gradient, product):
        group.error.move(-solve_by_products(lambda v: product(v) + ridge * v, gradient, 1e-13, 10_000))
    (X, made) = snows.operations(group.whole({}), BLOCK, group.twins.data)[at]
    for name, weight in group.error.keep().items():
        expected = snows.least_squares(
            group.dense_weights[name], group.tensors[name], X.flatten(0, -2), made.shape[-1], ridge
        )
        assert torch.equal(weight == 0, group.tensors[name] == 0)
        torch.testing.assert_close(weight, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("batch", [3, 128])
def test_the_error_on_samples_that_are_held_out_never_rises(twins: Callable[[str], Twins], batch):
    group, split = Group(twins("opt"), 2, 3, part=1), SampleSplit.of(SAMPLES, 0.2)
    chosen = settings(method="snows", batch=batch, epochs=2)
    error = group.error
    before = copy.deepcopy(error.keep())
    start, end = fit_group(error, split, chosen, SnowsSettings.model_validate({"iterations": 20}))
    assert end < start
    assert error.loss(split.measured) == pytest.approx(end, rel=1e-12)
    assert all(torch.equal(w == 0, before[name] == 0) for name, w in error.keep().items())
    uphill = Group(twins("opt"), 2, 3, part=1).error
    held = uphill.values()
    uphill.quadratic = error.quadratic  # gradients of other weights: their steps need not help
    assert fit_group(uphill, split, chosen, SnowsSettings.model_validate({"iterations": 1}))[1] <= start
    assert uphill.loss(split.measured) <= start
    assert len(held) == len(uphill.values())


def test_conjugate_gradients_solve_and_stop_where_it_curves_down():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(12, 12, dtype=torch.float64, generator=generator)
    A, b = root @ root.T + torch.eye(12), torch.randn(12, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(solve_by_products(A.matmul, b, 1e-12, 100), torch.linalg.solve(A, b))
    assert float((A @ solve_by_products(A.matmul, b, 0.1, 100) - b).norm()) <= 0.1 * float(b.norm())
    assert torch.equal(solve_by_products(lambda v: -v, b, 1e-12, 100), b)
    bent = torch.diag(torch.linspace(-1, 10, 12, dtype=torch.float64))
    assert float(solve_by_products(bent.matmul, b, 1e-12, 100) @ b) > 0


def test_a_line_is_searched_from_the_whole_step_down():
    assert search_line(lambda share: (share - 1) ** 2, 1.0, -2.0) == 1.0
    assert search_line(lambda share: (share - 0.45) ** 2, 0.45**2, -0.9) == pytest.approx(0.9**2)
    assert search_line(lambda share: share, 0.0, 1.0) == 0.0
    assert search_line(lambda share: float("nan"), 1.0, -1.0) == 0.0
