"""Comparing what an output keeps with the dense model's. Each stage knows in its `verify.py` what it has left alone."""

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.stages.folders import find_functions
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import check_outside_blocks, find_difference


def shape_source(dense: Checkpoint, report: Report) -> Checkpoint:
    """Return the dense model without the blocks that are gone, the others under their numbers in the output."""
    for shape in find_functions("shape_source", "verify"):
        dense = shape(dense, report)
    return dense


def moves_stream(report: Report) -> bool:
    """Return True if head and embedding may have absorbed another basis of the residual stream."""
    return any(moves(report) for moves in find_functions("moves_stream", "verify"))


def check_head(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> Finding:
    """Check that the output's head computes what the dense model's does; None if that cannot be told.

    If no tensor outside the blocks has absorbed a matrix, all of them are the dense ones. Otherwise random states are
    given to the final norm and the head of both models, and the logits are compared. How the tensors were written plays
    no part in that.
    """
    for check in reversed(list(find_functions("check_head", "verify"))):
        found: Finding | None = check(checkpoint, dense, report)
        if found is not None:
            return found
    return check_outside_blocks(match_checkpoint(checkpoint)[0], Model.of(dense))


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> Finding:
    """Check that what the output keeps of the dense model, as `shape_source` gives it, is unchanged.

    The last stage that has something to say of it says it. None if nothing can be compared.
    """
    checkpoint, family = match_checkpoint(checkpoint)
    outside = set[str]()
    if family.is_stack:  # there are the others, which may be pruned: `other parts` compares what is left
        blocks = family.blocks_prefix
        outside = {name for name in checkpoint.tensors if not name.startswith(blocks)}
    passed, detail = _check_blocks(checkpoint, dense, report, outside)
    if passed is False or moves_stream(report) or family.is_stack:
        return passed, detail
    head_passed, head_detail = check_head(checkpoint, dense, report)
    return (passed, detail) if head_passed is not False else (False, head_detail)


def _check_blocks(checkpoint: Checkpoint, dense: Checkpoint, report: Report, outside: set[str]) -> Finding:
    # A stage knows its own changes; those of all others, and of other stacks, are passed to it.
    changed = {"": outside} | {of.__module__: of(checkpoint, report) for of in find_functions("rewritten", "verify")}
    for check in reversed(list(find_functions("check_kept", "verify"))):
        others = set().union(*(names for stage, names in changed.items() if stage != check.__module__))
        found: Finding | None = check(checkpoint, dense, report, others)
        if found is not None:
            return found
    dense, _ = match_checkpoint(dense)
    compared = [name for name in checkpoint.tensors if all(name not in names for names in changed.values())]
    difference = find_difference(checkpoint, dense, compared)
    return difference is None, difference or f"{len(compared)} tensors are the dense ones, bit for bit"
