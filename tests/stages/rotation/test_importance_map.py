import pytest
import torch

from ckpt_prune.stages.rotation.importance import cell_means, importance_map, share_of_largest


def test_cells_are_means_as_shares_of_the_mean():
    values = torch.arange(24.0).view(4, 6)
    rows, columns = (slice(0, 2), slice(2, 3), slice(3, 4)), (slice(0, 2), slice(2, 4), slice(4, 6))
    expected = [[float(values[row, column].mean()) / 11.5 for column in columns] for row in rows]
    assert cell_means(values, 3) == [pytest.approx(row, rel=1e-3) for row in expected]


def test_a_small_or_empty_matrix_is_as_it_is():
    assert cell_means(torch.tensor([[1.0, 3.0]]), 9) == [[0.5, 1.5]]
    assert cell_means(torch.zeros(3, 2)) == [[0.0, 0.0]] * 3
    assert share_of_largest(torch.zeros(3, 2)) == 0


def test_the_largest_hold_their_share():
    values = torch.ones(10, 30)
    values[4, 5], values[0, 29], values[9, 9] = 101, 51, 51
    assert share_of_largest(values) == pytest.approx((101 + 51 + 51) / (297 + 203))


def test_what_a_report_says():
    values = torch.ones(48, 24)
    found = importance_map("o.weight", values, 2 * values)
    assert (found["weight"], found["rows"], found["columns"]) == ("o.weight", 48, 24)
    assert found["before"] == found["after"] == [[1.0] * 24] * 24
    assert found["largest_before"] == pytest.approx(12 / 1152)
