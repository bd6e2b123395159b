"""Factors of rotary pairs, their moments and scores: against complex numbers and every pair of tokens written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.compensation.logit import absolute_logit_strength
from ckpt_prune.compensation.rotary import (
    absorb_factors,
    choose_factors,
    diagnose_factors,
    factor_errors,
    pair_rows,
    rotary_system,
    solve_factors,
)
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.scoring.rotary_scores import DAMP, ROTARY_SCORES, bare_errors, refitted_errors
from tests.oracles import rotary as oracle

GROUPS, SHARED, TOKENS = 2, 2, 5
HEADS = GROUPS * SHARED


def drawn(pairs: int, samples: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Queries (samples, heads, tokens, pairs) and keys of fewer heads, complex; neighbours depend on each other."""
    generator = np.random.default_rng(seed)

    def states(heads: int) -> np.ndarray:
        parts = generator.normal(size=(2, samples, heads, TOKENS, pairs))
        parts[..., 1:] += 0.8 * parts[..., :-1]
        return (parts[0] + 1j * parts[1]).astype(np.complex64).astype(np.complex128)

    return states(HEADS), states(GROUPS)


def moments_of(queries: np.ndarray, keys: np.ndarray) -> RotaryMoments:
    def split(states: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.stack([states.real, states.imag], 3))

    return RotaryMoments.zeros(HEADS, queries.shape[-1]).accumulate(split(queries), split(keys))


def parts_of(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    return [
        oracle.parts([(q[head], k[head // SHARED]) for q, k in zip(queries, keys, strict=True)])
        for head in range(HEADS)
    ]


def test_moments_are_the_gram_of_what_pairs_give_the_logits() -> None:
    queries, keys = drawn(3)
    moments = moments_of(queries, keys)
    assert (moments.samples, moments.tokens, moments.heads, moments.pairs) == (3, 3 * TOKENS, HEADS, 3)
    for head, products in enumerate(parts_of(queries, keys)):
        z = np.stack([products.real, -products.imag], 2).reshape(len(products), -1)
        np.testing.assert_allclose(moments.gram[head], z.T @ z, rtol=1e-5, atol=1e-5 * np.abs(z.T @ z).max())


@settings(max_examples=25)
@given(data=st.data())
def test_factors_are_least_squares_on_the_logits_and_never_worse_than_none(data: st.DataObject) -> None:
    pairs = data.draw(st.integers(2, 5))
    count = data.draw(st.integers(1, pairs))
    value = data.draw(st.sampled_from([0.0, 1e-3, 0.1, 10.0]))
    queries, keys = drawn(pairs, samples=2, seed=data.draw(st.integers(0, 99)))
    kept = [sorted(data.draw(st.permutations(range(pairs)))[:count]) for _ in range(GROUPS)]
    system = rotary_system(moments_of(queries, keys), torch.tensor(kept))
    factors = solve_factors(system, absolute_logit_strength(value, "relative", system.diagonal_mean))
    errors = factor_errors(system, factors)
    assert bool((errors <= system.dropped_energy + 1e-9 * system.energy).all())
    for head, products in enumerate(parts_of(queries, keys)):
        stay = kept[head // SHARED]
        energy = float(np.sum(products.real.sum(1) ** 2))
        strength = value * oracle.diagonal_mean(products, stay)
        expected = oracle.factors(products, stay, strength)
        c = 1 + factors[head, :, 0].numpy() + 1j * factors[head, :, 1].numpy()
        if value:
            np.testing.assert_allclose(c, expected, rtol=1e-3, atol=1e-3)
        for ours, theirs in (
            (errors[head], oracle.error(products, stay, c)),
            (errors[head], oracle.error(products, stay, expected)),
            (system.dropped_energy[head], oracle.error(products, stay, np.ones(count))),
            (system.energy[head], energy),
        ):
            assert abs(float(ours) - theirs) <= 1e-4 * max(energy, theirs)
    # The floor is reached without strength; relative errors lie between it and those without factors.
    diagnosis = diagnose_factors(system, errors)
    assert bool((diagnosis.floor <= errors + 1e-9).all())
    assert bool(((diagnosis.rho2 >= 0) & (diagnosis.rho2 <= 1)).all())


def test_pairs_that_are_zero_cost_nothing_and_change_nothing() -> None:
    queries, keys = drawn(4)
    keys[..., [0, 2]] = 0
    moments, kept = moments_of(queries, keys), torch.tensor([[1, 3]] * GROUPS)
    system = rotary_system(moments, kept)
    factors = solve_factors(system, absolute_logit_strength(0.0, "relative", system.diagonal_mean))
    assert float(system.dropped_energy.max()) == 0 == float(factors.abs().max())
    assert float(factor_errors(system, factors).max()) == 0
    # They go first, whichever score ranks.
    for name, score in ROTARY_SCORES.items():
        rows = torch.ones(GROUPS, 4, 2, 3)
        rows[:, [0, 2]] = 0
        ranked = score.function(torch.ones(GROUPS, 4, SHARED, 2, 3), rows, moments)
        assert ranked.shape == (GROUPS, 4)
        assert {tuple(sorted(group_scores.argsort()[:2].tolist())) for group_scores in ranked} == {(0, 2)}, name


def test_greedy_removal_is_that_of_all_refits_tried_out() -> None:
    queries, keys = drawn(4, seed=3)
    moments, parts = moments_of(queries, keys), parts_of(queries, keys)
    scores = ROTARY_SCORES["obs"].function(torch.zeros(0), torch.zeros(GROUPS, 0), moments)
    curves = refitted_errors(moments, scores)
    for group in range(GROUPS):
        heads = [group * SHARED + index for index in range(SHARED)]
        # Ridge at the strength that ranks, which counts what goes as well: λ (‖Ŵ − W‖² + ‖W_D‖²).
        mean = np.mean([np.mean(np.sum(np.abs(parts[head]) ** 2, axis=0)) / 2 for head in heads])
        strength, remaining, order = DAMP * float(mean), list(range(4)), []

        def cost(head: int, stay: list[int], strength: float = strength) -> float:
            if not stay:
                return float(np.sum(parts[head].real.sum(1) ** 2)) + strength * 4
            c = oracle.factors(parts[head], stay, strength)
            kept = oracle.error(parts[head], stay, c)
            return kept + strength * (float(np.sum(np.abs(c - 1) ** 2)) + 4 - len(stay))

        for gone in range(4):
            tried = {pair: sum(cost(h, [p for p in remaining if p != pair]) for h in heads) for pair in remaining}
            least = min(tried, key=lambda pair: tried[pair])
            order.append(least)
            remaining.remove(least)
            for head in heads:
                assert float(curves[head, gone + 1]) == pytest.approx(cost(head, remaining), rel=1e-3)
        assert scores[group].argsort().tolist() == order
    assert float(curves[:, 0].abs().max()) == 0


def test_bare_errors_are_of_the_sum_of_what_goes() -> None:
    queries, keys = drawn(4, seed=5)
    moments, scores = moments_of(queries, keys), torch.tensor([[3.0, 1, 2, 4], [1, 2, 3, 4]])
    errors = bare_errors(moments, scores)
    for head, products in enumerate(parts_of(queries, keys)):
        order = scores[head // SHARED].argsort().tolist()
        lost = [float(np.sum(products[:, order[:count]].real.sum(1) ** 2)) for count in range(5)]
        np.testing.assert_allclose(errors[head], np.maximum.accumulate(lost), rtol=1e-4)


def test_the_strength_is_chosen_by_held_out_logits() -> None:
    queries, keys = drawn(4, samples=4, seed=7)
    kept, grid = torch.tensor([[0, 2], [1, 3]]), [1e-4, 0.1, 1.0]
    folds = [moments_of(queries[at : at + 2], keys[at : at + 2]) for at in (0, 2)]
    choice = choose_factors(folds, kept, grid)
    for value in grid:
        lost = energy = 0.0
        for scored, train in ((slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2))):
            pairs = zip(parts_of(queries[scored], keys[scored]), parts_of(queries[train], keys[train]), strict=True)
            for head, (products, others) in enumerate(pairs):
                stay = kept[head // SHARED].tolist()
                c = oracle.factors(others, stay, value * oracle.diagonal_mean(others, stay))
                lost += oracle.error(products, stay, c)
                energy += float(np.sum(products.real.sum(1) ** 2))
        assert choice.errors[value] == pytest.approx(lost / energy, rel=1e-3)
    assert choice.value == min(grid, key=lambda value: choice.errors[value])


@pytest.mark.parametrize("layout", ["halves", "neighbours"])
@pytest.mark.parametrize("biased", [False, True])
def test_factors_turn_the_rows_of_the_pairs_that_stay(layout: str, biased: bool) -> None:
    pairs, kept = 3, torch.tensor([[0, 2], [1, 2]])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(HEADS * 2 * pairs, *([] if biased else [4]), generator=generator, dtype=torch.float64)
    factors = torch.randn(HEADS, 2, 2, generator=generator, dtype=torch.float64)
    absorbed = absorb_factors(rows, factors, kept, pairs, SHARED, layout)  # type: ignore[arg-type]
    assert absorbed.shape == (HEADS * 4, *rows.shape[1:])
    for head in range(HEADS):
        before = oracle.as_complex(rows[head * 6 : (head + 1) * 6].numpy().T, layout)[..., kept[head // SHARED]]
        c = (1 + factors[head, :, 0] + 1j * factors[head, :, 1]).numpy()
        after = oracle.as_complex(absorbed[head * 4 : (head + 1) * 4].numpy().T, layout)
        np.testing.assert_allclose(after, before * c)
    # Without factors they are the rows themselves.
    bare = absorb_factors(rows, None, kept, pairs, SHARED, layout)  # type: ignore[arg-type]
    lines = pair_rows(kept, pairs, SHARED, layout)  # type: ignore[arg-type]
    assert torch.equal(bare, rows[lines.flatten(1).sort().values.flatten()])


def test_what_cannot_be_is_refused() -> None:
    moments = moments_of(*drawn(3))
    for wrong in (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(GROUPS, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"kept pairs must be \(KV heads, 1 to 3\)"):
            rotary_system(moments, wrong)
    system = rotary_system(moments, torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match="lambda must be zero or more"):
        absolute_logit_strength(-1.0, "relative", system.diagonal_mean)
    assert torch.equal(
        absolute_logit_strength(3.0, "absolute", system.diagonal_mean), torch.full((HEADS,), 3.0, dtype=torch.float64)
    )
    for name in ("obs", "logit-energy"):
        with pytest.raises(ValueError, match="needs moments"):
            ROTARY_SCORES[name].function(torch.zeros(0), torch.zeros(0), None)
