"""Choices from products of parameters: fewer tests where the same code serves many values."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows that hold every pair of values of every two axes.

    Greedy: each next row is the first of the product that holds most of the pairs still missing.
    """
    values = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in values)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in sorted(chosen)]


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)}


def dealt(first: Iterable[Any], second: Sequence[Any], each: int = 1) -> list[tuple[Any, Any]]:
    """Return each value of the first axis with `each` values of the second, in turn. Every value of both occurs.

    Values of the first that stand side by side get different ones.
    """
    turn = itertools.cycle(second)
    pairs = [(one, next(turn)) for one in first for _ in range(each)]
    assert len(pairs) >= len(second), "the second axis is longer"
    return pairs


def choose_cases(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[ParameterSet]:
    """Return parameters: some are tested always, the others with `--thorough`.

    Args:
        values: tuples where a test takes several.
        keep: of a value, whether it is always tested: others go through the same code.
    """
    cases = []
    for value in values:
        marks = () if keep(value) else (pytest.mark.thorough,)
        cases.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return cases


def one_of(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the first of every `count` values: the others go through the same code."""
    return list(values)[::count]


def every(count: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Return values as parameters; tested always is the first of every `count`."""
    turn = itertools.count()
    return choose_cases(values, lambda _: next(turn) % count == 0)


def first_of_each(values: Iterable[Any], kind: Callable[[Any], Hashable]) -> list[ParameterSet]:
    """Return values as parameters; tested always is the first of every kind."""
    met: set[Hashable] = set()
    return choose_cases(values, lambda value: not (kind(value) in met or met.add(kind(value))))
