"""Comparing an output whose residual stream is sliced with the dense model: what stands outside the blocks."""

import torch

from ckpt_prune.architectures.fitting import fitted
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import HiddenRecord


def kept_ends(checkpoint: Checkpoint, dense: Checkpoint, hidden: HiddenRecord) -> tuple[bool, str]:
    """Embedding, final norm and head are the dense model's, every sub-layer having a basis of its own.

    Args:
        checkpoint: the output.
        dense: what it was made from.
        hidden: the output's record.
    """
    dense, family = fitted(dense)
    blocks = range(family.dimension(parse_config(dense.config), "layers"))
    inside = tuple(family.block.format(block=block) for block in blocks)
    ours, theirs = ([name for name in each.tensors if not name.startswith(inside)] for each in (checkpoint, dense))
    if sorted(ours) != sorted(theirs):
        return False, "the tensors outside the blocks are not those of the dense model"
    for name in track(ours, "comparing", unit="tensor"):
        pair = [each.read([name])[name] for each in (checkpoint, dense)]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            return False, f"{name} is outside the blocks and is not the dense model's"
    return True, (
        f"{len(ours)} tensors outside the blocks are the dense ones, bit for bit; those inside have absorbed bases and "
        "are not compared"
    )
