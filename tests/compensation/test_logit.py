from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt_prune.compensation import logit
from ckpt_prune.compensation.logit import (
    absolute_logit_strength,
    choose_strength,
    diagnose_logit,
    logit_error,
    logit_system,
    solve_logit,
)
from ckpt_prune.compensation.mixing import absorb, mix_dimensions
from ckpt_prune.measure.moments.logits import LogitMoments
from tests import pairs
from tests.oracles import logits as oracle

FORMS = ("per-sample", "fourth-order")
GRID = (1e-6, 1e-3, 1e-1, 1.0, 1e2)


@dataclass(frozen=True)
class Attention:
    """Queries and keys (H, N, T, d) float64, and the kept dimensions (H, d')."""

    queries: Tensor
    keys: Tensor
    kept: Tensor

    def samples(self, head: int) -> oracle.Samples:
        return list(zip(self.queries[head].numpy(), self.keys[head].numpy(), strict=True))

    def moments(self, form: str = "per-sample") -> LogitMoments:
        """In float64, so that the solver can be held to more digits than float32 Grams have."""
        heads, samples, tokens, d = self.queries.shape
        rows, columns = np.triu_indices(d)
        q, k = ((x.mT @ x)[..., rows, columns].contiguous() for x in (self.queries, self.keys))
        if form == "per-sample":
            return LogitMoments(samples, samples * tokens, heads, d, q, k)
        return LogitMoments(samples, samples * tokens, heads, d, fourth=torch.einsum("hnp,hnr->hpr", q, k))

    def measured(self, form: str) -> LogitMoments:
        heads, _, _, d = self.queries.shape
        flat = (x.permute(1, 2, 0, 3).flatten(2).float() for x in (self.queries, self.keys))
        return LogitMoments.zeros(heads, d, form=form).accumulate(*flat)

    def system(self, form: str = "per-sample") -> logit.LogitSystem:
        return logit_system(self.moments(form), self.kept)

    def part(self, at: slice) -> "Attention":
        return Attention(self.queries[:, at], self.keys[:, at], self.kept)


def attention(
    d: int = 6, size: int = 4, samples: int = 30, tokens: int = 9, heads: int = 2, seed: int = 0, spread: float = 0.0
) -> Attention:
    """Correlated dimensions with means, samples that differ; `spread` makes dimensions differ by so many decades."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def one() -> Tensor:
        mix = torch.eye(d) + 0.5 * normal(heads, 1, d, d)
        sample_mix = torch.eye(d) + 0.4 * normal(heads, samples, d, d)
        x = (normal(heads, samples, tokens, d) + 0.5 * normal(heads, 1, 1, d)) @ mix @ sample_mix
        return x * torch.logspace(0, -spread, d, dtype=torch.float64)

    queries, keys = one(), one()
    kept = torch.stack([torch.randperm(d, generator=g)[:size].sort().values for _ in range(heads)])
    return Attention(queries, keys, kept)


def relative(computed: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(computed.numpy() - expected) / max(np.linalg.norm(expected), 1e-300))


SHAPES = {
    "few samples, many tokens": {"samples": 2, "tokens": 40},
    "held per sample": {"samples": 12},
    "held dense": {"samples": 60},
    "one dimension": {"size": 1},
    "all but one": {"size": 5},
    "one token": {"samples": 300, "tokens": 1},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
forms = pytest.mark.parametrize("form", FORMS)


@forms
@shapes
def test_the_system_is_the_normal_equations(shape, form):
    a = attention(**shape)
    system = a.system(form)
    M = torch.randn(a.kept.shape[0], *[a.kept.shape[1]] * 2, dtype=torch.float64)
    image, means = system.apply(M), system.diagonal_mean
    for head, kept in enumerate(a.kept.tolist()):
        G, h = oracle.kronecker(a.samples(head), kept)
        assert relative(image[head].flatten(), G @ M[head].flatten().numpy()) < 1e-12
        assert relative(system.rhs[head].flatten(), h) < 1e-11
        assert means[head].item() == pytest.approx(np.mean(np.diag(G)), rel=1e-12)
        assert system.energy[head].item() == pytest.approx(oracle.energy(a.samples(head)), rel=1e-12)
        lost = oracle.error(a.samples(head), kept, np.zeros((len(kept), len(kept))))
        nothing = sum(np.sum(oracle.lost_logits(sample, kept) ** 2) for sample in a.samples(head))
        assert system.dropped_energy[head].item() == pytest.approx(nothing, rel=1e-11)
        assert lost == pytest.approx(nothing, rel=1e-12)


@forms
@pytest.mark.parametrize("strength", [1e-4, 1e-1, 1e3])
@shapes
def test_equals_the_dense_solve(shape, strength, form):
    a = attention(**shape)
    system = a.system(form)
    strengths = absolute_logit_strength(strength, "relative", system.diagonal_mean)
    solution = solve_logit(system, strengths)
    assert solution.residual.max() <= 1e-10
    for head, kept in enumerate(a.kept.tolist()):
        assert relative(solution.M[head], oracle.solve(a.samples(head), kept, strengths[head].item())) < 1e-7


@forms
@pytest.mark.parametrize("spread", [2.0, 3.0])
def test_equals_regression_where_dimensions_differ_by_decades(spread, form):
    """The operator's condition number is about 10^(4 spread)."""
    a = attention(d=8, size=6, samples=100, spread=spread)
    system = a.system(form)
    strengths = absolute_logit_strength(1e-9, "relative", system.diagonal_mean)
    M = solve_logit(system, strengths).M
    for head, kept in enumerate(a.kept.tolist()):
        expected = oracle.regression(a.samples(head), kept, strengths[head].item())
        assert relative(M[head], expected) < 1e-5
        best = oracle.error(a.samples(head), kept, expected)
        assert oracle.error(a.samples(head), kept, M[head].numpy()) == pytest.approx(best, rel=1e-9)


# ---- no strength, or no need of one ----------------------------------------------------------------------------


@forms
@pytest.mark.parametrize(("samples", "tokens"), [(1, 9), (1, 3), (4, 2), (3, 1), (2, 6)])
def test_strength_zero_on_a_singular_operator_gives_a_minimum(samples, tokens, form):
    a = attention(d=8, size=5, samples=samples, tokens=tokens)
    solution = solve_logit(a.system(form), torch.zeros(2))
    assert solution.residual.max() <= 1e-6
    for head, kept in enumerate(a.kept.tolist()):
        lost = oracle.error(a.samples(head), kept, np.zeros((5, 5)))
        error = oracle.error(a.samples(head), kept, solution.M[head].numpy())
        assert error == pytest.approx(oracle.floor(a.samples(head), kept), rel=1e-7, abs=1e-9 * lost)


@forms
@pytest.mark.parametrize(("samples", "tokens"), [(1, 3), (3, 2), (1, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_a_quadratic_that_rounding_bends_down_is_left_in_time(seed, samples, tokens, form):
    """Without strength too, what is found is no worse than M = 0."""
    a = attention(d=12, size=8, samples=samples, tokens=tokens, seed=seed)
    system = logit_system(a.measured(form), a.kept)
    M = solve_logit(system, torch.zeros(2)).M
    gain = (M * (2 * system.rhs - system.apply(M))).sum((1, 2))
    assert (gain >= 0).all()


def test_a_quadratic_without_a_minimum_is_not_followed():
    system = attention(samples=60).system()
    downwards = replace(system, kept=LogitMoments(60, 540, 2, 4, fourth=-system.kept.fourth))
    solution = solve_logit(downwards, torch.zeros(2))
    assert not solution.M.any()
    assert (solution.steps.tolist(), solution.residual.tolist()) == ([0, 0], [1, 1])


def test_dimensions_that_are_always_zero_are_left_alone():
    """Dimensions that are always zero, as in a padded head, get no correction, and the error is still the least."""
    a = attention(d=6, size=4)
    a.queries[0, :, :, a.kept[0, 1]] = 0
    a.keys[1, :, :, a.kept[1, 2]] = 0
    M = solve_logit(a.system(), torch.zeros(2)).M
    assert M[0, 1].norm() < 1e-14 * M[0].norm()
    assert M[1, :, 2].norm() < 1e-14 * M[1].norm()
    for head, kept in enumerate(a.kept.tolist()):
        error = oracle.error(a.samples(head), kept, M[head].numpy())
        assert error == pytest.approx(oracle.floor(a.samples(head), kept), rel=1e-8)


def test_samples_that_are_alike_take_one_step():
    """Then the operator is one Kronecker product, which the preconditioner inverts, λ included."""
    a = attention(samples=1, tokens=20)
    alike = Attention(a.queries.repeat(1, 7, 1, 1), a.keys.repeat(1, 7, 1, 1), a.kept)
    system = alike.system()
    for value in (0.0, 1e-3, 10.0):
        solution = solve_logit(system, absolute_logit_strength(value, "relative", system.diagonal_mean))
        assert solution.steps.tolist() == [1, 1]
        assert solution.residual.max() <= 1e-10


def test_giving_up_is_told_and_never_worse_than_nothing():
    a = attention(samples=100)
    system = a.system()
    errors = [system.dropped_energy]
    for limit in (1, 2, 4):
        solution = solve_logit(system, torch.zeros(2), max_steps=limit)
        assert solution.steps.tolist() == [limit, limit]
        assert solution.residual.min() > 1e-10
        errors.append(logit_error(system, solution.M))
    for before, after in pairwise(errors):
        assert (after < before).all()


# ---- errors and diagnostics ------------------------------------------------------------------------------------


@forms
@shapes
def test_error_is_that_of_explicit_logits(shape, form):
    a = attention(**shape)
    size = a.kept.shape[1]
    M = torch.randn(2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors = logit_error(a.system(form), M)
    for head, kept in enumerate(a.kept.tolist()):
        assert errors[head].item() == pytest.approx(oracle.error(a.samples(head), kept, M[head].numpy()), rel=1e-10)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 8),
    st.floats(-6, 3),
    st.integers(0, 1000),
    st.sampled_from(FORMS),
)
def test_the_floor_is_least_and_nothing_most(size, samples, tokens, exponent, seed, form):
    a = attention(size=size, samples=samples, tokens=tokens, seed=seed)
    system = a.system(form)
    diagnosis = diagnose_logit(system)
    errors = logit_error(
        system, solve_logit(system, absolute_logit_strength(10.0**exponent, "relative", system.diagonal_mean)).M
    )
    slack = 1e-9 * diagnosis.uncompensated
    assert (diagnosis.floor <= errors + slack).all()
    assert (errors <= diagnosis.uncompensated + slack).all()
    assert ((diagnosis.rho2 >= 0) & (diagnosis.rho2 <= 1)).all()
    for head, kept in enumerate(a.kept.tolist()):
        lost = oracle.error(a.samples(head), kept, np.zeros((size, size)))
        floor = oracle.floor(a.samples(head), kept)
        assert diagnosis.uncompensated[head].item() == pytest.approx(lost, rel=1e-9)
        assert diagnosis.floor[head].item() == pytest.approx(floor, rel=1e-6, abs=1e-8 * lost)
        assert diagnosis.rho2[head].item() == pytest.approx(1 - floor / lost, abs=1e-6)


@forms
def test_nothing_dropped(form):
    a = attention(d=5, size=5)
    system = a.system(form)
    M = solve_logit(system, torch.zeros(2)).M
    assert not M.any()
    assert logit_error(system, M).tolist() == [0, 0]
    diagnosis = diagnose_logit(system)
    assert (diagnosis.uncompensated.tolist(), diagnosis.floor.tolist(), diagnosis.rho2.tolist()) == (
        [0, 0],
        [0, 0],
        [1, 1],
    )
    choice = choose_strength([a.part(slice(0, 9)).moments(form), a.part(slice(9, 30)).moments(form)], a.kept, [1, 3, 2])
    assert choice.value == 3
    assert set(choice.errors.values()) == {0.0}


# ---- strength --------------------------------------------------------------------------------------------------


def in_folds(a: Attention, count: int) -> tuple[list[Attention], list[list[oracle.Samples]]]:
    size = a.queries.shape[1] // count
    parts = [a.part(slice(i * size, (i + 1) * size)) for i in range(count)]
    return parts, [[part.samples(head) for head in range(len(a.kept))] for part in parts]


@pytest.mark.parametrize(
    ("form", "samples", "units"), pairs.pairwise([*FORMS, "both"], [6, 12, 60], ["relative", "absolute"])
)
def test_chooses_what_refitting_chooses(form, samples, units):
    a = attention(samples=samples, tokens=4)
    parts, by_fold = in_folds(a, 3)
    fold_forms = [form] * 3 if form != "both" else ["per-sample", "fourth-order", "per-sample"]
    folds = [part.moments(f) for part, f in zip(parts, fold_forms, strict=True)]
    choice = choose_strength(folds, a.kept, GRID, units)
    expected = {value: oracle.held_out(by_fold, a.kept.tolist(), value, units == "relative") for value in GRID}
    assert list(choice.errors) == list(GRID)
    assert choice.errors == pytest.approx(expected, rel=1e-6)
    assert choice.value == min(expected, key=expected.get)
    for value in GRID[1:3]:
        assert choose_strength(folds, a.kept, [value], units).errors[value] == pytest.approx(expected[value], rel=1e-6)


@pytest.mark.parametrize(
    ("folds", "grid", "message"), [(1, GRID, "2 folds"), (3, [], "one value"), (3, [1.0, -1.0], "zero or more")]
)
def test_refusals(folds: int, grid: Sequence[float], message: str):
    a = attention()
    with pytest.raises(ValueError, match=message):
        choose_strength([part.moments() for part in in_folds(a, folds)[0]], a.kept, grid)


@pytest.mark.parametrize("kept", [torch.arange(3)[None], torch.empty(2, 0, dtype=torch.int64), torch.ones(2, 7).long()])
def test_kept_sets_that_do_not_fit_are_refused(kept):
    with pytest.raises(ValueError, match="kept dimensions must be"):
        logit_system(attention().moments(), kept)


def test_strength_in_units():
    a = attention()
    system = a.system()
    means = [oracle.diagonal_mean(a.samples(head), kept) for head, kept in enumerate(a.kept.tolist())]
    assert absolute_logit_strength(0.25, "relative", system.diagonal_mean).tolist() == pytest.approx(
        [0.25 * m for m in means]
    )
    assert absolute_logit_strength(0.25, "absolute", system.diagonal_mean).tolist() == [0.25, 0.25]
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="zero or more"):
            absolute_logit_strength(bad, "absolute", system.diagonal_mean)


# ---- folding ---------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_absorbed_projections_give_the_compensated_logits(size, biases, dtype):
    heads, d, hidden = 2, 5, 7
    query, key = (normal(heads * d, hidden, seed=s, dtype=dtype) for s in (1, 2))
    query_bias, key_bias = (
        normal(heads * d, seed=s, dtype=dtype) if b else None for s, b in zip((3, 4), biases, strict=True)
    )
    kept = torch.stack([torch.randperm(d, generator=torch.Generator().manual_seed(h))[:size] for h in range(heads)])
    M = normal(heads, size, size, seed=5)
    absorbed = absorb(query, key, query_bias, key_bias, *mix_dimensions(M, kept, d))
    assert [None if t is None else (tuple(t.shape), t.dtype) for t in absorbed] == [
        ((heads * size, hidden), torch.float64),
        ((heads * size, hidden), torch.float64),
        ((heads * size,), torch.float64) if biases[0] else None,
        ((heads * size,), torch.float64) if biases[1] else None,
    ]
    x = normal(11, hidden, seed=6)

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight.double().T + (0 if bias is None else bias.double())

    old_q, old_k = project(query, query_bias), project(key, key_bias)
    new_q, new_k = project(absorbed[0], absorbed[2]), project(absorbed[1], absorbed[3])
    for head in range(heads):
        at = head * d + kept[head]
        expected = old_q[:, at] @ (torch.eye(size) + M[head]) @ old_k[:, at].T
        span = slice(head * size, (head + 1) * size)
        torch.testing.assert_close(new_q[:, span] @ new_k[:, span].T, expected, rtol=1e-9, atol=1e-9)


def test_end_to_end_the_absorbed_logits_have_the_predicted_error():
    """From inputs and weights to moments, to M, to weights that absorb M: their logits are off as was predicted."""
    heads, d, hidden, samples, tokens = 2, 6, 16, 25, 8
    query, key = normal(heads * d, hidden, seed=1), normal(heads * d, hidden, seed=2)
    query_bias, key_bias = normal(heads * d, seed=3), normal(heads * d, seed=4)
    x = normal(samples, tokens, hidden, seed=5)
    q, k = x @ query.T + query_bias, x @ key.T + key_bias
    moments = LogitMoments.zeros(heads, d, form="per-sample").accumulate(q, k)
    kept = moments.logit_energy().topk(4, dim=1).indices.sort(dim=1).values
    system = logit_system(moments, kept)
    M = solve_logit(system, absolute_logit_strength(1e-3, "relative", system.diagonal_mean)).M
    new = absorb(query, key, query_bias, key_bias, *mix_dimensions(M, kept, d))
    narrow_q, narrow_k = x @ new[0].T + new[2], x @ new[1].T + new[3]
    predicted = logit_error(system, M)
    for head in range(heads):
        old, narrow = slice(head * d, (head + 1) * d), slice(head * 4, (head + 1) * 4)
        difference = q[..., old] @ k[..., old].mT - narrow_q[..., narrow] @ narrow_k[..., narrow].mT
        assert predicted[head].item() == pytest.approx(difference.square().sum().item(), rel=1e-4)
        assert predicted[head] < system.dropped_energy[head]
