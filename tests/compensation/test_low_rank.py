"""Low rank in place of selection, against alternating least squares on the logits themselves from many starts."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_prune.compensation import logit
from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.compensation.low_rank import (
    choose_low_rank,
    diagnose_low_rank,
    solve_low_rank,
    width_errors,
)
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.logits import LogitMoments
from tests.compensation.test_logit import FORMS, Attention, attention, in_folds
from tests.oracles import logits as oracle

forms = pytest.mark.parametrize("form", FORMS)


def alike(d: int, size: int, samples: int, tokens: int) -> Attention:
    """Samples of one distribution, as those of a model are nearly: where they are not, there may be several minima."""
    a = attention(d=d, size=size, samples=1, tokens=samples * tokens)
    return Attention(*(x.view(len(x), samples, tokens, d) for x in (a.queries, a.keys)), a.kept)


def penalised_error(samples: oracle.Samples, left_factor: Tensor, right_factor: Tensor, strength: float) -> float:
    P, R = left_factor.numpy(), right_factor.numpy()
    return oracle.low_rank_error(samples, P, R) + strength * float(np.sum((np.eye(len(P)) - P @ R.T) ** 2))


@forms
@pytest.mark.parametrize(("d", "size"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("value", [0.0, 0.1])
def test_it_is_the_least_of_many_starts(d, size, value, form):
    a = attention(d=d, size=size, samples=6, tokens=7, heads=2, seed=d + size)
    solution = solve_low_rank(a.moments(form), size, value, tolerance=1e-13, max_steps=1000)
    for head in range(2):
        samples = a.samples(head)
        strength = value * oracle.whole_mean(samples)
        P, R = (torch.from_numpy(factor) for factor in oracle.low_rank(samples, size, strength, starts=12))
        least, ours = (
            penalised_error(samples, *pair, strength) for pair in ((P, R), (solution.left[head], solution.right[head]))
        )
        assert ours == pytest.approx(least, rel=1e-6)
        error = oracle.low_rank_error(samples, solution.left[head].numpy(), solution.right[head].numpy())
        assert solution.errors[head].item() == pytest.approx(error, rel=1e-8)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_of_one_sample_it_is_the_truncated_svd_of_the_logits(size):
    a = attention(d=6, size=size, samples=1, tokens=11, heads=2)
    moments = a.moments()
    solution, curve = solve_low_rank(moments, size, 0.0), width_errors(moments)
    for head in range(2):
        ((Q, K),) = a.samples(head)
        tails = np.append(np.cumsum(np.linalg.svd(Q @ K.T, compute_uv=False)[:6][::-1] ** 2)[::-1], 0)
        assert solution.errors[head].item() == pytest.approx(tails[size], rel=1e-5)
        # With k dimensions dropped 6 - k stay.
        assert curve[head].tolist() == pytest.approx(tails[::-1].tolist(), rel=1e-4, abs=1e-9 * tails[0])


@forms
@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("value", [0.0, 1e-3, 1.0])
def test_no_head_is_off_by_more_than_corps_solution(form, spread, value):
    a = attention(d=6, size=3, samples=9, tokens=5, heads=4, seed=7, spread=spread)
    moments, system = a.moments(form), a.system(form)
    fits = {name: LOGIT_METHODS[name].fit(moments, system, a.kept, value, "relative") for name in ("logit", "low-rank")}
    assert bool((fits["low-rank"].errors <= fits["logit"].errors * (1 + 1e-9)).all())
    assert float(fits["low-rank"].errors.sum()) < 0.9 * float(fits["logit"].errors.sum())


def test_what_it_is_given_is_returned_where_nothing_is_better():
    """No step is made: the truncated SVD of all samples is further off than the least of this lopsided case."""
    g = torch.Generator().manual_seed(5)
    queries, keys = (torch.randn(1, 2, 4, 4, generator=g, dtype=torch.float64) for _ in range(2))
    queries[:, 0], keys[:, 1] = 30 * queries[:, 0], 30 * keys[:, 1]
    a = Attention(queries, keys, torch.tensor([[0, 1]]))
    best = solve_low_rank(a.moments(), 2, 0.0, tolerance=1e-13, max_steps=2000)
    given = (best.left, best.right)
    stopped = solve_low_rank(a.moments(), 2, 0.0, max_steps=0)
    assert stopped.errors.item() > 1.01 * best.errors.item()
    chosen = solve_low_rank(a.moments(), 2, 0.0, other=given, max_steps=0)
    assert chosen.errors.item() == pytest.approx(best.errors.item(), rel=1e-9)
    torch.testing.assert_close(chosen.left @ chosen.right.mT, best.left @ best.right.mT, rtol=1e-9, atol=1e-12)


def test_dimensions_that_are_always_zero_do_no_harm():
    a = attention(d=6, size=2)
    a.queries[..., 4:] = 0
    a.keys[..., 1] = 0
    solution = solve_low_rank(a.measured("per-sample"), 2, 1e-3)
    assert bool(solution.left.isfinite().all() and solution.right.isfinite().all())
    nothing = solve_low_rank(LogitMoments.zeros(1, 3, form="fourth-order"), 2, 1e-3)
    assert nothing.errors.tolist() == [0.0]
    assert bool(nothing.left.isfinite().all())


@forms
def test_errors_of_all_widths_are_those_before_the_search(form):
    a = attention(d=6, size=3, samples=9)
    moments = a.moments(form)
    curve = width_errors(moments)
    assert curve.shape == (2, 7)
    assert bool((curve.diff() >= 0).all())
    assert curve[:, 0].tolist() == [0, 0]
    torch.testing.assert_close(curve[:, 6], logit.full_system(moments).energy, rtol=1e-5, atol=0)
    for dropped in (1, 3, 5):
        started = solve_low_rank(moments, 6 - dropped, 0.0, max_steps=0).errors
        torch.testing.assert_close(curve[:, dropped], started, rtol=1e-6, atol=0)
        assert bool((solve_low_rank(moments, 6 - dropped, 0.0).errors <= started * (1 + 1e-9)).all())


def test_the_floor_is_what_little_strength_reaches():
    a = attention(d=6, size=3, samples=12)
    moments, system = a.moments(), a.system()
    fit = LOGIT_METHODS["low-rank"].fit(moments, system, a.kept, 1.0, "relative")
    diagnosis = diagnose_low_rank(moments, system, fit)
    torch.testing.assert_close(diagnosis.uncompensated, system.dropped_energy)
    least = solve_low_rank(moments, 3, 1e-6, tolerance=1e-12, max_steps=1000).errors
    torch.testing.assert_close(diagnosis.floor, least, rtol=0.01, atol=0)
    assert bool((diagnosis.floor <= fit.errors).all())
    torch.testing.assert_close(diagnosis.rho2, 1 - diagnosis.floor / system.dropped_energy)


@pytest.mark.parametrize("units", ["relative", "absolute"])
def test_the_choice_on_folds_is_that_of_refitting(units):
    a = alike(d=5, size=2, samples=18, tokens=4)
    by_fold, samples = in_folds(a, 3)
    folds = [part.moments() for part in by_fold]
    grid = [1e-3, 0.1, 1.0]
    choice = choose_low_rank(folds, a.kept, grid, units)
    for value in grid:
        lost = energy = 0.0
        for held_out in range(3):
            # The fit itself is held against alternating least squares above.
            fit = solve_low_rank(sum_folds([fold for f, fold in enumerate(folds) if f != held_out]), 2, value, units)
            for head in range(2):
                scored = samples[held_out][head]
                lost += oracle.low_rank_error(scored, fit.left[head].numpy(), fit.right[head].numpy())
                energy += oracle.energy(scored)
        assert choice.errors[value] == pytest.approx(lost / energy, rel=0.02)
    assert choice.value == min(grid, key=lambda value: choice.errors[value])
    with pytest.raises(ValueError, match="at least 2 folds, not 1"):
        choose_low_rank(folds[:1], a.kept, grid)
    with pytest.raises(ValueError, match="zero or more, not -1"):
        choose_low_rank(folds, a.kept, [-1.0])


@forms
def test_a_fit_to_centred_keys_spends_nothing_on_what_the_softmax_does_not_see(form):
    """The mean of the keys is larger than all the rest, in a direction of its own."""
    a = attention(d=5, size=2, samples=15, tokens=8)
    a.keys.mul_(0.3)
    a.keys[..., 0] += 40
    flat = [x.permute(1, 2, 0, 3).flatten(2).float() for x in (a.queries, a.keys)]
    moments = LogitMoments.zeros(2, 5, form=form, centred=True).accumulate(*flat)
    fits = {chosen: solve_low_rank(moments.with_keys(centred=chosen), 2, 1e-4) for chosen in (False, True)}
    for head in range(2):
        samples = oracle.centre_keys(a.samples(head))
        lost = {c: oracle.low_rank_error(samples, f.left[head].numpy(), f.right[head].numpy()) for c, f in fits.items()}
        assert lost[True] < 0.8 * lost[False]
        assert fits[True].errors[head].item() == pytest.approx(lost[True], rel=1e-3)
