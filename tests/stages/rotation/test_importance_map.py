import math

import pytest
import torch

from ckpt_prune.stages.rotation.importance import cell_means, count_by_importance, share_of_largest


def test_cells_are_means_as_shares_of_the_mean():
    values = torch.arange(24.0).view(4, 6)
    rows, columns = (slice(0, 2), slice(2, 3), slice(3, 4)), (slice(0, 2), slice(2, 4), slice(4, 6))
    expected = [[float(values[row, column].mean()) / 11.5 for column in columns] for row in rows]
    assert cell_means(values, 3) == [pytest.approx(row, rel=1e-3) for row in expected]


def test_the_largest_hold_their_share():
    values = torch.ones(10, 30)
    values[4, 5], values[0, 29], values[9, 9] = 101, 51, 51
    assert share_of_largest(values) == pytest.approx((101 + 51 + 51) / (297 + 203))


def test_a_histogram_counts_what_stays_and_what_goes():
    """By the definition, weight by weight; the mean is 1, so that 100 is 20 decibels and 1e-9 beyond the last bar."""
    values = torch.tensor([[100.0, 10.0, 1e-9], [0.0, 1.0, 0.1]])
    values = torch.cat([values, torch.zeros(39, 3)])
    values[2:] = (values.numel() - values.sum()) / (39 * 3)
    keep = values >= 1
    counts = count_by_importance(values, keep)
    expected = {"kept": [0] * 61, "zeroed": [0] * 61}
    for value, stays in zip(values.flatten().tolist(), keep.flatten().tolist(), strict=True):
        level = max(-60.0, min(60.0, 10 * math.log10(value))) if value > 0 else -60.0
        expected["kept" if stays else "zeroed"][round((level + 60) / 2)] += 1
    assert counts == expected
    assert (counts["kept"][40], counts["kept"][35], counts["zeroed"][0]) == (1, 1, 2)
