"""How far tensors that are computed again may be from those of an output."""

import pytest
import torch

from ckpt_prune.stages.shared.equality import away


@pytest.mark.parametrize(
    ("ours", "made", "expected"),
    [
        ([4.0, 2.0], [4.0, 2.5], 0.125),
        ([4.0, 2.0], [-4.0, 2.0], 2.0),
        ([0.0, 3.0], [0.0, 0.0], 3.0),
        ([0.0], [0.0], 0.0),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_differences_count_in_units_of_the_largest_value_that_was_made(
    ours: list[float], made: list[float], expected: float
) -> None:
    assert away(torch.tensor(ours), torch.tensor(made)) == expected


def test_tensors_of_other_types_are_not_the_same() -> None:
    assert away(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)) == float("inf")
