import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_prune.evaluation.metrics import METRICS
from tests.oracles import labels as oracle


def figure(metric: str, predicted: list, true: list) -> float:
    kind = torch.float64 if metric in ("pearson", "spearman") else torch.int64
    return METRICS[metric](torch.tensor(predicted, dtype=kind), torch.tensor(true, dtype=kind))  # type: ignore[index]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=12))
def test_two_classes(pairs):
    predicted, true = ([pair[side] for pair in pairs] for side in (0, 1))
    assert figure("accuracy", predicted, true) == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    assert figure("f1", predicted, true) == pytest.approx(oracle.f1(predicted, true))
    assert figure("matthews", predicted, true) == pytest.approx(oracle.matthews(predicted, true), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_matthews_of_many_classes(pairs):
    predicted, true = ([pair[side] for pair in pairs] for side in (0, 1))
    assert figure("matthews", predicted, true) == pytest.approx(oracle.matthews_of_many(predicted, true), abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=12))
def test_numbers(pairs):
    a, b = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    assert figure("pearson", a, b) == pytest.approx(oracle.pearson(a, b), abs=1e-9)
    ranks = [[sum(y < x for y in row) + (row.count(x) + 1) / 2 for x in row] for row in (a, b)]
    assert figure("spearman", a, b) == pytest.approx(oracle.pearson(*ranks), abs=1e-9)
