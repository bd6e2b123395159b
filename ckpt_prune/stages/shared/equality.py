"""Comparing an output's tensors with the dense model's, bit for bit."""

from collections.abc import Collection

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.progress import track
from ckpt_prune.model.model import Model

BLOCKS = 4
"""So many are computed again, chosen at random."""
_TOLERANCE = 1e-3
"""Allowed difference, as a share of a tensor's largest value: rounding of the basis, besides two roundings of its
dtype."""


def is_same(ours: Tensor, theirs: Tensor, *, or_zero: bool = False) -> bool:
    """Return whether two tensors have one dtype and equal values; with `or_zero` only where ours is not zero."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return not bool(((ours != theirs) & (ours != 0)).any()) if or_zero else torch.equal(ours, theirs)


def find_difference(
    checkpoint: Checkpoint, dense: Checkpoint, names: Collection[str], masked: Collection[str] = ()
) -> str | None:
    """Say which tensor is the first that is not the dense model's, or None. Those in `masked` may have zeros."""
    for name in track(names, "comparing", unit="tensor"):
        if name not in dense.tensors:
            return f"{name} is not a tensor of the dense model"
        ours, theirs = (side.read([name])[name] for side in (checkpoint, dense))
        if name in masked and not is_same(ours, theirs, or_zero=True):
            return f"{name} has weights that are neither zero nor the dense model's"
        if name not in masked and not is_same(ours, theirs):
            return f"{name} is not the dense model's"
    return None


def check_outside_blocks(checkpoint: Checkpoint, model: Model) -> tuple[bool, str]:
    """Check that both have the same tensors outside the blocks."""
    names, dense_names = model.outside(checkpoint.tensors), model.outside()
    if strange := set(names) ^ set(dense_names):
        return False, f"{min(strange)} is outside the blocks of one of the two models alone"
    if difference := find_difference(checkpoint, model.checkpoint, dense_names):
        return False, difference
    return True, f"{len(dense_names)} tensors outside the blocks are the dense ones, bit for bit"


def away(ours: Tensor, made: Tensor) -> float:
    """Return the largest difference of two tensors in units of the largest value."""
    if ours.shape != made.shape or ours.dtype != made.dtype:
        return float("inf")
    a, b = ours.double(), made.to(torch.float64)
    most = b.abs().max().item() if b.numel() else 0.0
    return 0.0 if torch.equal(a, b) else (a - b).abs().max().item() / (most or 1.0)


def tolerance(dtype: torch.dtype) -> float:
    """Return how far a tensor may be from what it is computed again as, in units of its largest value."""
    return _TOLERANCE + 2 * torch.finfo(dtype).eps
