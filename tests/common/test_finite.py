"""Whether all numbers of a tensor are finite, found out by a sum."""

import pytest
import torch

from ckpt_prune.common.finite import all_finite

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_number_among_many_is_seen(dtype):
    tensor = torch.ones(7, 33).to(dtype)
    assert all_finite(tensor)
    values = [torch.nan] if dtype == torch.float8_e4m3fn else [torch.nan, torch.inf, -torch.inf]  # it has no infinity
    for value in values:
        spoiled = tensor.clone()
        spoiled[3, 5] = torch.tensor(value).to(dtype)
        assert not all_finite(spoiled)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_sum_that_overflows_is_no_sign(dtype):
    assert all_finite(torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype))


def test_infinities_of_both_signs_are_seen():
    assert not all_finite(torch.tensor([torch.inf, -torch.inf]))
    assert all_finite(torch.zeros(0))
