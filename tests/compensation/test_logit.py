from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add

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
from ckpt_prune.compensation.mixing import absorb, mix_dimensions, split_factors
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
        """As calibration does it, in float32."""
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
        own = torch.eye(d) + 0.4 * normal(heads, samples, d, d)
        x = (normal(heads, samples, tokens, d) + 0.5 * normal(heads, 1, 1, d)) @ mix @ own
        return x * torch.logspace(0, -spread, d, dtype=torch.float64)

    queries, keys = one(), one()
    kept = torch.stack([torch.randperm(d, generator=g)[:size].sort().values for _ in range(heads)])
    return Attention(queries, keys, kept)


def relative(found: Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.numpy() - expected) / max(np.linalg.norm(expected), 1e-300))


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


def test_both_ways_of_holding_the_operator_are_met():
    held = {logit_system(attention(**shape).moments(), attention(**shape).kept).kept.form for shape in SHAPES.values()}
    assert held == set(FORMS)


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


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_equals_the_dense_solve_for_any_shape(data):
    d = data.draw(st.integers(1, 6))
    shape = {
        "d": d,
        "size": data.draw(st.integers(1, d)),
        "samples": data.draw(st.integers(1, 40)),
        "tokens": data.draw(st.integers(1, 8)),
        "heads": data.draw(st.integers(1, 3)),
        "seed": data.draw(st.integers(0, 1000)),
    }
    a = attention(**shape)
    system = a.system(data.draw(st.sampled_from(FORMS)))
    strengths = absolute_logit_strength(
        data.draw(st.sampled_from([1e-3, 1e-1, 10.0])), "relative", system.diagonal_mean
    )
    M = solve_logit(system, strengths).M
    for head, kept in enumerate(a.kept.tolist()):
        expected = oracle.solve(a.samples(head), kept, strengths[head].item())
        assert np.linalg.norm(M[head].numpy() - expected) <= 1e-7 * np.linalg.norm(expected)


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


@forms
@pytest.mark.parametrize("samples", [3, 60])
def test_measured_moments_give_the_same(samples, form):
    a = attention(samples=samples, tokens=30)
    system = logit_system(a.measured(form), a.kept)
    strengths = absolute_logit_strength(1e-2, "relative", system.diagonal_mean)
    M = solve_logit(system, strengths).M
    errors = logit_error(system, M)
    for head, kept in enumerate(a.kept.tolist()):
        expected = oracle.solve(a.samples(head), kept, strengths[head].item())
        assert relative(M[head], expected) < 1e-5
        assert errors[head].item() == pytest.approx(oracle.error(a.samples(head), kept, expected), rel=1e-5)


@forms
def test_the_two_forms_agree(form):
    a = attention(samples=50)
    one, other = a.system("per-sample"), a.system(form)
    strengths = absolute_logit_strength(1e-3, "relative", one.diagonal_mean)
    torch.testing.assert_close(solve_logit(one, strengths).M, solve_logit(other, strengths).M, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("samples", [5, 100])
def test_systems_add(samples):
    a = attention(samples=samples)
    parts = [logit_system(a.part(at).moments(), a.kept) for at in (slice(0, 2), slice(2, None))]
    whole, together = a.system(), reduce(add, parts)
    M = torch.randn_like(whole.rhs)
    assert together.kept.samples == samples
    for name in ("rhs", "query_gram", "key_gram", "dropped_energy", "energy"):
        torch.testing.assert_close(getattr(together, name), getattr(whole, name), rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(together.apply(M), whole.apply(M), rtol=1e-11, atol=1e-9)


# ---- no strength, or no need of one ----------------------------------------------------------------------------


@forms
@pytest.mark.parametrize(("samples", "tokens"), [(1, 9), (1, 3), (4, 2), (3, 1), (2, 6)])
def test_strength_zero_on_a_singular_operator_gives_a_minimum(samples, tokens, form):
    a = attention(d=8, size=5, samples=samples, tokens=tokens)
    solution = solve_logit(a.system(form), torch.zeros(2))
    assert solution.residual.max() <= 1e-6
    for head, kept in enumerate(a.kept.tolist()):
        lost = oracle.error(a.samples(head), kept, np.zeros((5, 5)))
        found = oracle.error(a.samples(head), kept, solution.M[head].numpy())
        assert found == pytest.approx(oracle.floor(a.samples(head), kept), rel=1e-7, abs=1e-9 * lost)


@forms
@pytest.mark.parametrize(("samples", "tokens"), [(1, 3), (3, 2), (6, 2), (2, 4)])
def test_rounding_of_measured_moments_does_no_harm_there(samples, tokens, form):
    """In float32 a singular operator has small eigenvalues of either sign; the least strength hides them. Floor: 0."""
    a = attention(d=12, size=8, samples=samples, tokens=tokens)
    system = logit_system(a.measured(form), a.kept)
    M = solve_logit(system, absolute_logit_strength(logit.NEAR_ZERO, "relative", system.diagonal_mean)).M
    assert M.norm(dim=(1, 2)).max() < 10
    for head, kept in enumerate(a.kept.tolist()):
        lost = oracle.error(a.samples(head), kept, np.zeros((8, 8)))
        assert oracle.floor(a.samples(head), kept) < 1e-12 * lost
        assert oracle.error(a.samples(head), kept, M[head].numpy()) < 1e-7 * lost
    assert (diagnose_logit(system).rho2 > 1 - 1e-5).all()


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


def test_of_many_minima_the_one_of_least_weighted_norm():
    a = attention(d=8, size=5, samples=2, tokens=3)
    solution = solve_logit(a.system(), torch.zeros(2))
    for head, kept in enumerate(a.kept.tolist()):
        assert np.linalg.matrix_rank(oracle.kronecker(a.samples(head), kept)[0]) < 25
        assert relative(solution.M[head], oracle.least_weighted(a.samples(head), kept)) < 1e-6


def test_dimensions_that_are_always_zero_are_left_alone():
    """As where an earlier pruning padded a head with zeros."""
    a = attention(d=6, size=4)
    a.queries[0, :, :, a.kept[0, 1]] = 0
    a.keys[1, :, :, a.kept[1, 2]] = 0
    M = solve_logit(a.system(), torch.zeros(2)).M
    assert M[0, 1].norm() < 1e-14 * M[0].norm()
    assert M[1, :, 2].norm() < 1e-14 * M[1].norm()
    for head, kept in enumerate(a.kept.tolist()):
        found = oracle.error(a.samples(head), kept, M[head].numpy())
        assert found == pytest.approx(oracle.floor(a.samples(head), kept), rel=1e-8)


def test_a_head_without_anything_to_solve_leaves_the_others_alone():
    a = attention(heads=3)
    dropped = [j for j in range(6) if j not in a.kept[1].tolist()]
    a.keys[1][..., dropped] = 0
    solution = solve_logit(a.system(), torch.full((3,), 0.1))
    assert not solution.M[1].any()
    assert solution.steps.tolist()[1] == 0
    assert solution.residual[1] == 0
    alone = Attention(a.queries[[0, 2]], a.keys[[0, 2]], a.kept[[0, 2]])
    assert torch.equal(solution.M[[0, 2]], solve_logit(alone.system(), torch.full((2,), 0.1)).M)


def test_heads_of_zeros():
    a = attention()
    zero = Attention(torch.zeros_like(a.queries), a.keys, a.kept)
    system = zero.system()
    assert not solve_logit(system, torch.zeros(2)).M.any()
    found = diagnose_logit(system)
    assert found.floor.tolist() == [0, 0]
    assert found.rho2.tolist() == [1, 1]


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


@forms
def test_moments_may_come_from_inference_mode(form):
    a = attention()
    with torch.inference_mode():
        moments = a.measured(form)
    system = logit_system(moments, a.kept)
    expected = solve_logit(logit_system(a.measured(form), a.kept), torch.ones(2))
    assert torch.equal(solve_logit(system, torch.ones(2)).M, expected.M)
    assert choose_strength([moments, moments], a.kept, [1.0]).value == 1.0


def test_solving_again_gives_the_same_bits():
    a = attention(samples=100)
    first, second = (solve_logit(a.system(), torch.full((2,), 0.5)) for _ in range(2))
    assert torch.equal(first.M, second.M)
    assert torch.equal(first.residual, second.residual)


# ---- errors and diagnostics ------------------------------------------------------------------------------------


@forms
@shapes
def test_error_is_that_of_explicit_logits(shape, form):
    a = attention(**shape)
    size = a.kept.shape[1]
    M = torch.randn(2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = logit_error(a.system(form), M)
    for head, kept in enumerate(a.kept.tolist()):
        assert found[head].item() == pytest.approx(oracle.error(a.samples(head), kept, M[head].numpy()), rel=1e-10)


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
    found = diagnose_logit(system)
    errors = logit_error(
        system, solve_logit(system, absolute_logit_strength(10.0**exponent, "relative", system.diagonal_mean)).M
    )
    slack = 1e-9 * found.uncompensated
    assert (found.floor <= errors + slack).all()
    assert (errors <= found.uncompensated + slack).all()
    assert ((found.rho2 >= 0) & (found.rho2 <= 1)).all()
    for head, kept in enumerate(a.kept.tolist()):
        lost = oracle.error(a.samples(head), kept, np.zeros((size, size)))
        floor = oracle.floor(a.samples(head), kept)
        assert found.uncompensated[head].item() == pytest.approx(lost, rel=1e-9)
        assert found.floor[head].item() == pytest.approx(floor, rel=1e-6, abs=1e-8 * lost)
        assert found.rho2[head].item() == pytest.approx(1 - floor / lost, abs=1e-6)


@forms
def test_diagnostics_of_measured_moments(form):
    a = attention(samples=40)
    found = diagnose_logit(logit_system(a.measured(form), a.kept))
    for head, kept in enumerate(a.kept.tolist()):
        assert found.floor[head].item() == pytest.approx(oracle.floor(a.samples(head), kept), rel=1e-4)


@forms
def test_all_information_in_the_kept_dimensions(form):
    """Q_P = Q_S X and K_P = K_S Y: then Q_P K_Pᵀ = Q_S X Yᵀ K_Sᵀ, and M = X Yᵀ loses nothing."""
    a = attention(d=7, size=4, samples=40)
    g = torch.Generator().manual_seed(2)
    X, Y = (torch.randn(2, 4, 3, dtype=torch.float64, generator=g) for _ in range(2))
    for head, kept in enumerate(a.kept.tolist()):
        out = oracle.dropped(kept, 7)
        a.queries[head][..., out] = a.queries[head][..., kept] @ X[head]
        a.keys[head][..., out] = a.keys[head][..., kept] @ Y[head]
    system = a.system(form)
    errors = []
    for value in (1e-2, 1e-4, 1e-8, 0.0):
        M = solve_logit(system, absolute_logit_strength(value, "relative", system.diagonal_mean)).M
        errors.append(
            [oracle.error(a.samples(h), a.kept[h].tolist(), M[h].numpy()) / system.dropped_energy[h] for h in (0, 1)]
        )
    assert (np.diff(errors, axis=0) < 0).all()
    assert max(errors[-1]) < 1e-15
    torch.testing.assert_close(M, X @ Y.mT, rtol=1e-7, atol=1e-7)
    found = diagnose_logit(system)
    assert (found.rho2 > 1 - 1e-9).all()
    measured = logit_system(a.measured(form), a.kept)
    M = solve_logit(measured, absolute_logit_strength(1e-8, "relative", measured.diagonal_mean)).M
    assert (logit_error(measured, M) < 1e-5 * measured.dropped_energy).all()
    for head, kept in enumerate(a.kept.tolist()):
        assert oracle.error(a.samples(head), kept, M[head].numpy()) < 1e-7 * system.dropped_energy[head]


@forms
def test_nothing_dropped(form):
    a = attention(d=5, size=5)
    system = a.system(form)
    M = solve_logit(system, torch.zeros(2)).M
    assert not M.any()
    assert logit_error(system, M).tolist() == [0, 0]
    found = diagnose_logit(system)
    assert (found.uncompensated.tolist(), found.floor.tolist(), found.rho2.tolist()) == ([0, 0], [0, 0], [1, 1])
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
    held = [form] * 3 if form != "both" else ["per-sample", "fourth-order", "per-sample"]
    folds = [part.moments(f) for part, f in zip(parts, held, strict=True)]
    choice = choose_strength(folds, a.kept, GRID, units)
    expected = {value: oracle.held_out(by_fold, a.kept.tolist(), value, units == "relative") for value in GRID}
    assert list(choice.errors) == list(GRID)
    assert choice.errors == pytest.approx(expected, rel=1e-6)
    assert choice.value == min(expected, key=expected.get)
    for value in GRID[1:3]:
        assert choose_strength(folds, a.kept, [value], units).errors[value] == pytest.approx(expected[value], rel=1e-6)


def test_little_data_wants_more_strength():
    few, many = (
        choose_strength(
            [part.moments() for part in in_folds(attention(samples=n, tokens=t), 3)[0]], attention().kept, GRID
        )
        for n, t in ((3, 2), (120, 20))
    )
    assert few.value > many.value


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


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 1000))
def test_factors_multiply_to_the_whole_and_share_it_evenly(heads, size, seed):
    M = torch.randn(heads, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    left, right = split_factors(M)
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(left @ right.mT, identity + M, rtol=1e-10, atol=1e-10)
    even = left.mT @ left
    torch.testing.assert_close(even, right.mT @ right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(even, torch.diag_embed(even.diagonal(dim1=1, dim2=2)), rtol=1e-9, atol=1e-9)


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
    found = absorb(query, key, query_bias, key_bias, *mix_dimensions(M, kept, d))
    assert [None if t is None else (tuple(t.shape), t.dtype) for t in found] == [
        ((heads * size, hidden), torch.float64),
        ((heads * size, hidden), torch.float64),
        ((heads * size,), torch.float64) if biases[0] else None,
        ((heads * size,), torch.float64) if biases[1] else None,
    ]
    x = normal(11, hidden, seed=6)

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight.double().T + (0 if bias is None else bias.double())

    old_q, old_k = project(query, query_bias), project(key, key_bias)
    new_q, new_k = project(found[0], found[2]), project(found[1], found[3])
    for head in range(heads):
        at = head * d + kept[head]
        expected = old_q[:, at] @ (torch.eye(size) + M[head]) @ old_k[:, at].T
        own = slice(head * size, (head + 1) * size)
        torch.testing.assert_close(new_q[:, own] @ new_k[:, own].T, expected, rtol=1e-9, atol=1e-9)


def test_with_nothing_dropped_the_absorbed_logits_are_the_old():
    a = attention(d=5, size=5)
    query, key, bias = normal(10, 7, seed=1), normal(10, 7, seed=2), normal(10, seed=3)
    M = solve_logit(a.system(), torch.zeros(2)).M
    new_query, new_key, new_bias, none = absorb(query, key, bias, None, *mix_dimensions(M, a.kept, 5))
    assert none is None
    x = normal(6, 7, seed=4)
    for head in range(2):
        own = slice(head * 5, head * 5 + 5)
        old = (x @ query[own].T + bias[own]) @ (x @ key[own].T).T
        new = (x @ new_query[own].T + new_bias[own]) @ (x @ new_key[own].T).T
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)


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
        old, own = slice(head * d, (head + 1) * d), slice(head * 4, (head + 1) * 4)
        difference = q[..., old] @ k[..., old].mT - narrow_q[..., own] @ narrow_k[..., own].mT
        assert predicted[head].item() == pytest.approx(difference.square().sum().item(), rel=1e-4)
        assert predicted[head] < system.dropped_energy[head]
