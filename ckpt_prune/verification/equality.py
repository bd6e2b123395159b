"""Comparing an output's tensors with the dense model's, bit for bit."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import DepthRecord
from ckpt_prune.model.depth import output_tensors, shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.stages.report import Report

BLOCKS = 4
"""So many are computed again, chosen at random."""


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
    prefixes = tuple(model.family.block.format(block=block) for block in range(model.blocks))
    names, dense_names = [name for name in checkpoint.tensors if not name.startswith(prefixes)], model.outside()
    if strange := set(names) ^ set(dense_names):
        return False, f"{min(strange)} is outside the blocks of one of the two models alone"
    if difference := find_difference(checkpoint, model.checkpoint, dense_names):
        return False, difference
    return True, f"{len(dense_names)} tensors outside the blocks are the dense ones, bit for bit"


def list_mapped_tensors(depth: DepthRecord | None, names: Iterable[str]) -> set[str]:
    """List the tensors that maps of gaps are absorbed in. A record names those of all experts by a `*`."""
    patterns = [gap.into for gap in ([] if depth is None else depth.gaps) if gap.into is not None]
    mapped = {name for pattern in patterns for name in names if fnmatchcase(name, pattern)}
    return mapped | {f"{name.removesuffix('weight')}bias" for name in mapped}


def read_dense_at_depth(dense: Checkpoint, report: Report) -> Checkpoint:
    """Return the dense model without the blocks that are gone, the others under their numbers in the output."""
    depth = report.depth
    if depth is None:
        return dense
    model = Model.of(dense)
    kept = depth.kept
    if depth.blocks != model.blocks or not kept or kept != sorted(set(kept)) or kept[-1] >= model.blocks:
        raise UserError(f"{REPORT} keeps blocks that the dense model has not")
    return shorten_model(model, kept).checkpoint if depth.part == "block" else model.checkpoint


def check_kept_blocks(checkpoint: Checkpoint, dense: Checkpoint, depth: DepthRecord) -> tuple[bool, str]:
    """Check that all tensors are those of `read_dense_at_depth`, except those that a map is absorbed in."""
    mapped = list_mapped_tensors(depth, checkpoint.tensors)
    if checkpoint.tensors.keys() != dense.tensors.keys():
        return False, "the tensors are not those of the dense model's blocks that stay"
    zeroed = []
    if depth.part != "block":
        model = Model.of(dense)
        zeroed = [name for gap in depth.gaps for name in output_tensors(model, gap.first, depth.part)]
    for name in zeroed:
        if bool(checkpoint.read([name])[name].any()):
            return False, f"{name} is not zero, though the {depth.part} of its block is gone"
    compared = [name for name in checkpoint.tensors if name not in mapped and name not in zeroed]
    if difference := find_difference(checkpoint, dense, compared):
        return False, difference
    if depth.part != "block":
        return True, f"{len(compared)} tensors are the dense ones, bit for bit, and {len(zeroed)} are zeros"
    maps = sum(name.endswith("weight") for name in mapped)
    more = f"; {plural(maps, 'weight')} with a map absorbed not compared" if maps else ""
    return True, (
        f"{len(compared)} tensors of the {len(depth.kept)} blocks that stay and of what is outside them are the dense "
        f"ones, bit for bit{more}"
    )


def away(ours: Tensor, made: Tensor) -> float:
    """The largest difference of two tensors in units of the largest value."""
    if ours.shape != made.shape or ours.dtype != made.dtype:
        return float("inf")
    a, b = ours.double(), made.to(torch.float64)
    most = b.abs().max().item() if b.numel() else 0.0
    return 0.0 if torch.equal(a, b) else (a - b).abs().max().item() / (most or 1.0)
