"""Find zeros in tensors, and the N:M patterns they hold."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.progress import track

PATTERNS = {"1:4": (1, 4), "2:4": (2, 4), "4:8": (4, 8)}
"""Patterns N:M that are looked for, the tightest first: of every M consecutive weights of a row at most N stay."""

_SLICE_ELEMENTS = 2**23


@dataclass(frozen=True)
class Sparsity:
    """Zeros of one tensor.

    Attributes:
        name: on disk.
        zeros: elements that are zero, -0.0 among them.
        pattern: the tightest of `PATTERNS` that a two-dimensional tensor holds, or None.
    """

    name: str
    shape: tuple[int, ...]
    zeros: int
    pattern: str | None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def share(self) -> float:
        """Share of zeros; 0 for a tensor without elements."""
        return self.zeros / self.numel if self.numel else 0.0

    def holds(self, pattern: str) -> bool:
        """Return whether the tensor holds one of `PATTERNS`: its own, or one that follows from its own.

        A tensor that keeps at most 2 of 4 keeps at most 4 of 8, if its rows divide into groups of 8.
        """
        order = list(PATTERNS)
        fits = bool(self.shape) and self.shape[-1] % PATTERNS[pattern][1] == 0
        return self.pattern is not None and order.index(self.pattern) <= order.index(pattern) and fits


def count_zeros(name: str, tensor: Tensor) -> Sparsity:
    """Count the zeros of a tensor (any shape, any dtype, on CPU), in temporary memory of some 8 Mi elements."""
    groups = {of: 0 for _, of in PATTERNS.values() if tensor.ndim == 2 and tensor.shape[1] % of == 0}
    filled = 0
    for nonzero in _nonzero(tensor):
        filled += int(nonzero.sum())
        for of, most in groups.items():
            # One slice that breaks a pattern is enough: the others need not be looked at.
            if most < of:
                groups[of] = max(most, int(_count_in_groups(nonzero, of).max()))
    zeros = tensor.numel() - filled
    patterns = (text for text, (kept, of) in PATTERNS.items() if of in groups and groups[of] <= kept)
    return Sparsity(name, tuple(tensor.shape), zeros, next(patterns, None) if zeros else None)


def crowded_groups(tensor: Tensor, kept: int, of: int) -> int:
    """Count groups of `of` consecutive elements of a row of `tensor` (rows, columns) with more than `kept` nonzero."""
    if tensor.ndim != 2 or tensor.shape[1] % of:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has no groups of {of} in its rows")
    return sum(int((_count_in_groups(nonzero, of) > kept).sum()) for nonzero in _nonzero(tensor))


def find_zeros(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> Iterator[Sparsity]:
    """Yield zeros of the named tensors, or of all; one tensor is in memory at a time."""
    for name in track(list(checkpoint.tensors if names is None else names), "counting zeros", unit="tensor"):
        yield count_zeros(name, checkpoint.read([name])[name])


def pattern_of_all(tensors: Iterable[Sparsity]) -> str | None:
    """Return the tightest of `PATTERNS` that every tensor holds; None if there is none, or no tensor."""
    tensors = list(tensors)
    return next((text for text in PATTERNS if tensors and all(tensor.holds(text) for tensor in tensors)), None)


def share_of_all(tensors: Iterable[Sparsity]) -> float:
    tensors = list(tensors)
    return sum(tensor.zeros for tensor in tensors) / max(1, sum(tensor.numel for tensor in tensors))


def weights_by_module(names: Iterable[str], block: str, modules: Iterable[str]) -> Mapping[str, list[str]]:
    """List the weights of the blocks' linear modules, module by module; leave out modules that no block has.

    Args:
        names: of tensors on disk. The weights of a module keep this order.
        block: beginning of the names of a block's tensors, with `{block}` for its index.
        modules: paths within a block.
    """
    before, after = (re.escape(part) for part in block.split("{block}"))
    either = "|".join(re.escape(module) for module in modules)
    weight = re.compile(rf"{before}\d+{after}({either})\.weight")
    weights: dict[str, list[str]] = {module: [] for module in modules}
    for name in names:
        if match := weight.fullmatch(name):
            weights[match[1]].append(name)
    return {module: names for module, names in weights.items() if names}


def _nonzero(tensor: Tensor) -> Iterator[Tensor]:
    """Yield which elements are not zero, in slices of whole rows."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    step = max(1, _SLICE_ELEMENTS * rows.shape[0] // rows.numel())
    for first in range(0, rows.shape[0], step):
        yield rows[first : first + step] != 0


def _count_in_groups(nonzero: Tensor, of: int) -> Tensor:
    """Count true elements in each group of `of` consecutive ones, uint8, one-dimensional."""
    return nonzero.reshape(-1, of).sum(dim=1, dtype=torch.uint8)
