"""Directions of values, against the textbook and a search from random starts."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt_prune.compensation.values import ROUNDING, ValueBasis, by_direction, by_head, principal_values
from tests.oracles import values

ROUNDED = 1e-5
"""Share of an energy that the ridge on second moments may add."""


def drawn(seed: int, groups: int, per_group: int, size: int, outputs: int, tokens: int = 60):
    """Columns (outputs, groups · per_group · size) and inputs of as many, which differ in scale and hang together."""
    generator = np.random.default_rng(seed)
    width = groups * per_group * size
    mixed = generator.standard_normal((tokens, width)) @ generator.standard_normal((width, width))
    return generator.standard_normal((outputs, width)), mixed * np.exp(generator.standard_normal(width))


def turn_of(W, X, groups: int, size: int) -> ValueBasis:
    W, X = torch.from_numpy(W), torch.from_numpy(X)
    return principal_values(W, X.T @ X, groups, size)


def heads_of(W, X, groups: int, size: int):
    """Query heads of every KV head: (columns, inputs) each."""
    columns = np.split(np.arange(W.shape[1]), W.shape[1] // size)
    per_group = len(columns) // groups
    return [[(W[:, at], X[:, at]) for at in columns[g * per_group : (g + 1) * per_group]] for g in range(groups)]


def ridge(heads) -> float:
    """The energy that the ridge on the second moment of a KV head adds: it bounds what any direction's may gain."""
    moment, metric = sum(x.T @ x for _, x in heads), sum(w.T @ w for w, _ in heads)
    return 1.01 * ROUNDING * np.mean(np.diag(moment)) * np.trace(metric)


SHAPES = {
    "seed": st.integers(0, 999),
    "groups": st.integers(1, 3),
    "per_group": st.integers(1, 3),
    "size": st.integers(1, 4),
    "outputs": st.integers(1, 6),
}


@settings(max_examples=30, deadline=None)
@given(**SHAPES)
def test_with_all_directions_nothing_changes(seed, groups, per_group, size, outputs):
    W, X = drawn(seed, groups, per_group, size, outputs)
    turn, inputs = turn_of(W, X, groups, size), torch.from_numpy(X)
    turned = turn.inputs(inputs)
    np.testing.assert_allclose(
        turn.turn_columns(torch.from_numpy(W)) @ turned.T, W @ X.T, rtol=1e-6, atol=1e-6 * abs(W @ X.T).max()
    )
    torch.testing.assert_close(inputs @ turn.basis(X.shape[1]).T, turned)
    torch.testing.assert_close(turn.gram(inputs.T @ inputs), turned.T @ turned)


@settings(max_examples=30, deadline=None)
@given(**SHAPES)
def test_it_is_the_textbook_basis(seed, groups, per_group, size, outputs):
    W, X = drawn(seed, groups, per_group, size, outputs)
    turn = turn_of(W, X, groups, size)
    for group, heads in enumerate(heads_of(W, X, groups, size)):
        Q, P, strengths = values.directions([w for w, _ in heads], [x for _, x in heads])
        np.testing.assert_allclose(turn.strengths[group], strengths, rtol=0, atol=ridge(heads))
        for keep in range(1, size):
            if strengths[keep - 1] > 1.01 * strengths[keep] + 1e-3 * strengths[0]:
                product = turn.columns[group][:, :keep] @ turn.values[group][:keep]
                np.testing.assert_allclose(product, P[:, :keep] @ Q[:, :keep].T, atol=1e-2)


@settings(max_examples=25, deadline=None)
@given(**(SHAPES | {"per_group": st.just(1)}))
@example(seed=454, groups=3, per_group=1, size=2, outputs=4)
def test_what_is_lost_is_the_tail_of_the_spectrum(seed, groups, per_group, size, outputs):
    """Every KV head loses the tail of its own spectrum, and no choice of coordinates loses less, even when refitted."""
    W, X = drawn(seed, groups, per_group, size, outputs)
    turn = turn_of(W, X, groups, size)
    for group, ((w, x),) in enumerate(heads_of(W, X, groups, size)):
        for keep in range(1, size + 1):
            Q, P = turn.values[group][:keep].T.numpy(), turn.columns[group][:, :keep].numpy()
            lost, tail = values.lost(w, x, Q, P), float(turn.strengths[group][keep:].sum())
            assert lost == pytest.approx(tail, abs=ridge([(w, x)]))
            for S in map(list, combinations(range(size), keep)):
                refitted = np.linalg.lstsq(x[:, S], x @ w.T, rcond=None)[0]
                assert lost <= np.sum((x @ w.T - x[:, S] @ refitted) ** 2) + ridge([(w, x)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", [1, 2])
def test_no_other_directions_lose_less(seed, keep):
    W, X = drawn(seed, 1, 1, 4, 5)
    turn = turn_of(W, X, 1, 4)
    tail, total = float(turn.strengths[0, keep:].sum()), float(turn.strengths.sum())
    assert tail == pytest.approx(values.least(W, X, keep), abs=10 * ROUNDED * total)


def test_values_and_columns_go_apart():
    """v and o, as an attention has them: what o reads of narrow values is what it read through the first directions."""
    groups, per_group, size, keep = 2, 3, 4, 2
    W, X = drawn(0, groups, per_group, size, 5)
    turn = turn_of(W, X, groups, size)
    V, b = torch.randn(groups * size, 7, dtype=torch.float64), torch.randn(groups * size, dtype=torch.float64)
    narrow, bias = turn.narrow_values(V, keep), turn.narrow_values(b, keep)
    columns = turn.turn_columns(torch.from_numpy(W))[
        :, [j for g in range(2) for j in range(g * 12, g * 12 + keep * per_group)]
    ]
    read = by_head(columns, groups, keep)
    torch.testing.assert_close(by_direction(read, groups, keep), columns)
    hidden = torch.randn(7, dtype=torch.float64)
    for head in range(groups * per_group):
        kept_rows = slice(head // per_group * keep, (head // per_group + 1) * keep)
        all_rows = slice(head // per_group * size, (head // per_group + 1) * size)
        Q, P = turn.values[head // per_group][:keep], turn.columns[head // per_group][:, :keep]
        expected = (
            torch.from_numpy(W)[:, head * size : (head + 1) * size] @ P @ Q @ (V[all_rows] @ hidden + b[all_rows])
        )
        output = read[:, head * keep : (head + 1) * keep] @ (narrow[kept_rows] @ hidden + bias[kept_rows])
        torch.testing.assert_close(output, expected)


def test_values_that_are_always_zero_have_any_directions():
    W, X = drawn(0, 2, 1, 3, 4)
    X[:, :3] = 0
    turn = turn_of(W, X, 2, 3)
    assert all(bool(torch.isfinite(factor).all()) for factor in (turn.values, turn.columns))
    torch.testing.assert_close(turn.columns @ turn.values, torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
