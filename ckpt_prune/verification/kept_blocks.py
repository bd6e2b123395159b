"""Comparing an output whose blocks are gone with the dense model's blocks that stay."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from ckpt_prune.architectures.depth import outputs_of, shortened
from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import DepthRecord


def dense_at_depth(dense: Checkpoint, depth: DepthRecord) -> Checkpoint:
    """The dense model's blocks that stay, under their numbers in the output.

    Raises:
        UserError: the record does not fit the model.
    """
    model = Model.of(dense)
    kept = depth.kept
    if depth.blocks != model.blocks or not kept or kept != sorted(set(kept)) or kept[-1] >= model.blocks:
        raise UserError(f"{REPORT} keeps blocks that the dense model has not")
    return shortened(model, kept).checkpoint if depth.part == "block" else model.checkpoint


def zeroed_parts(dense: Checkpoint, depth: DepthRecord) -> list[str]:
    """Names of the tensors that are zeros because a part of a block is gone."""
    model = Model.of(dense)
    return [name for gap in depth.gaps if depth.part != "block" for name in outputs_of(model, gap.first, depth.part)]


def mapped_tensors(depth: DepthRecord | None, names: Iterable[str]) -> set[str]:
    """Those of an output's tensors that maps of gaps are absorbed in: of experts all, which a record says by a `*`."""
    into = [gap.into for gap in ([] if depth is None else depth.gaps) if gap.into is not None]
    mapped = {name for each in into for name in names if fnmatchcase(name, each)}
    return mapped | {f"{name.removesuffix('weight')}bias" for name in mapped}


def kept_blocks(checkpoint: Checkpoint, dense: Checkpoint, depth: DepthRecord) -> tuple[bool, str]:
    """Every tensor is the dense model's, but for those that the report says a map is absorbed in.

    Args:
        checkpoint: the output.
        dense: as `dense_at_depth` gives it.
        depth: the output's record.
    """
    mapped = mapped_tensors(depth, checkpoint.tensors)
    if checkpoint.tensors.keys() != dense.tensors.keys():
        return False, "the tensors are not those of the dense model's blocks that stay"
    zeroed = zeroed_parts(dense, depth)
    for name in zeroed:
        if bool(checkpoint.read([name])[name].any()):
            return False, f"{name} is not zero, though the {depth.part} of its block is gone"
    compared = [name for name in checkpoint.tensors if name not in mapped and name not in zeroed]
    for name in track(compared, "comparing", unit="tensor"):
        ours, theirs = checkpoint.read([name])[name], dense.read([name])[name]
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            return False, f"{name} is not the dense model's tensor of the block that stays"
    if depth.part != "block":
        return True, f"{len(compared)} tensors are the dense ones, bit for bit, and {len(zeroed)} are zeros"
    maps = sum(name.endswith("weight") for name in mapped)
    more = f"; {plural(maps, 'weight')} with a map absorbed not compared" if maps else ""
    return True, (
        f"{len(compared)} tensors of the {len(depth.kept)} blocks that stay and of what is outside them are the dense "
        f"ones, bit for bit{more}"
    )
