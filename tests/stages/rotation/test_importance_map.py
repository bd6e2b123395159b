import pytest
import torch

from ckpt_prune.stages.rotation.importance import cell_means, share_of_largest


def test_cells_are_means_as_shares_of_the_mean():
    values = torch.arange(24.0).view(4, 6)
    rows, columns = (slice(0, 2), slice(2, 3), slice(3, 4)), (slice(0, 2), slice(2, 4), slice(4, 6))
    expected = [[float(values[row, column].mean()) / 11.5 for column in columns] for row in rows]
    assert cell_means(values, 3) == [pytest.approx(row, rel=1e-3) for row in expected]


def test_the_largest_hold_their_share():
    values = torch.ones(10, 30)
    values[4, 5], values[0, 29], values[9, 9] = 101, 51, 51
    assert share_of_largest(values) == pytest.approx((101 + 51 + 51) / (297 + 203))
