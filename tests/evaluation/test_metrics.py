"""Metrics are those of scikit-learn and scipy, and 0 where these have none."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ckpt_prune.evaluation.metrics import METRICS


def pairs(least: int, most: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(least, most), st.integers(least, most)), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.one_of(pairs(0, 1), pairs(0, 3)))
def test_classes(pairs):
    predicted, true = torch.tensor(pairs).T
    assume(len(torch.tensor(pairs).unique()) > 1)  # of one class scikit-learn warns
    assert METRICS["accuracy"](predicted, true) == pytest.approx(accuracy_score(true, predicted))
    assert METRICS["matthews"](predicted, true) == pytest.approx(matthews_corrcoef(true, predicted), abs=1e-12)
    one = f1_score(true == 1, predicted == 1, zero_division=0)
    assert METRICS["f1"](predicted, true) == pytest.approx(one)


@settings(max_examples=40, deadline=None)
@given(pairs(-9, 9))
def test_numbers(pairs):
    a, b = torch.tensor(pairs, dtype=torch.float64).T
    assume(len(a.unique()) > 1 and len(b.unique()) > 1)
    assert METRICS["pearson"](a, b) == pytest.approx(pearsonr(a, b).statistic, abs=1e-9)
    assert METRICS["spearman"](a, b) == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)


@pytest.mark.parametrize("metric", ["matthews", "pearson", "spearman"])
def test_what_does_not_vary_goes_together_with_nothing(metric):
    assert METRICS[metric](torch.tensor([1, 1, 1]), torch.tensor([0, 1, 2])) == 0
