"""What a process says of the error that ended it."""

import pytest
import torch

from ckpt_prune.benchmarking.worker import _reason
from ckpt_prune.common.errors import UserError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (UserError("no such model"), "no such model"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("tried to\n  allocate"), "out of memory (tried to allocate)"),
        (ValueError("a\nb"), "ValueError: a b"),
        (KeyError(), "KeyError"),
        (RuntimeError("x" * 400), "RuntimeError: " + "x" * 300),
    ],
)
def test_reasons_are_one_line(error, said):
    assert _reason(error) == said
