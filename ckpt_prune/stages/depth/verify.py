"""Whether the blocks that stay are the dense model's."""

from collections.abc import Iterable, Set
from fnmatch import fnmatchcase

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.formatting import plural
from ckpt_prune.job.records import DepthRecord
from ckpt_prune.model.depth import output_tensors
from ckpt_prune.model.descriptions import family_for_config
from ckpt_prune.model.model import Model
from ckpt_prune.stages.depth.preview import keeps_own_blocks, without
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import find_difference


def shape_source(dense: Checkpoint, report: Report) -> Checkpoint:
    """Return the dense model without the blocks that are gone, the others under their numbers in the output."""
    depth = report.depth
    if depth is None:
        return dense
    model = Model.of(dense)
    if not keeps_own_blocks(depth, model):
        raise UserError(f"{REPORT} keeps blocks that the dense model has not")
    return without(model, depth).checkpoint


def not_by_blocks(report: Report) -> str | None:
    gone = report.depth is not None and bool(report.sites)
    return "whole blocks are gone, and the others were measured without them" if gone else None


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    return None if report.depth is None else _check_kept_blocks(checkpoint, dense, report.depth, changed)


def _check_kept_blocks(checkpoint: Checkpoint, dense: Checkpoint, depth: DepthRecord, changed: Set[str]) -> Finding:
    """Check that all tensors are those of `shape_source`, except those that a map is absorbed in."""
    mapped = _list_mapped_tensors(depth, checkpoint.tensors)
    family = family_for_config(checkpoint.config)
    # Of two stacks of blocks each has a report of its own.
    prefix = family.blocks_prefix if family.modality == "pairs" else ""
    names, expected = ({name for name in side.tensors if name.startswith(prefix)} for side in (checkpoint, dense))
    if names != expected:
        return False, "the tensors are not those of the dense model's blocks that stay"
    zeroed = []
    if depth.part != "block" and not depth.left_out:
        model = Model.of(dense)
        zeroed = [name for gap in depth.gaps for name in output_tensors(model, gap.first, depth.part)]
    for name in zeroed:
        if bool(checkpoint.read([name])[name].any()):
            return False, f"{name} is not zero, though the {depth.part} of its block is gone"
    compared = [name for name in sorted(names) if name not in changed | mapped and name not in zeroed]
    if difference := find_difference(checkpoint, dense, compared):
        return False, difference
    if depth.part != "block":
        what_is_gone = f"{len(zeroed)} are zeros" if zeroed else f"{len(depth.gone)} blocks have no {depth.part}"
        return True, f"{len(compared)} tensors are the dense ones, bit for bit, and {what_is_gone}"
    maps = sum(name.endswith("weight") for name in mapped)
    more = f"; {plural(maps, 'weight')} with a map absorbed not compared" if maps else ""
    outside = "" if prefix else " and of what is outside them"
    return True, (
        f"{len(compared)} tensors of the {len(depth.kept)} blocks that stay{outside} are the dense ones, bit for "
        f"bit{more}"
    )


def rewritten(checkpoint: Checkpoint, report: Report) -> set[str]:
    return _list_mapped_tensors(report.depth, checkpoint.tensors)


def _list_mapped_tensors(depth: DepthRecord | None, names: Iterable[str]) -> set[str]:
    """List the tensors that maps of gaps are absorbed in. A record names those of all experts by a `*`."""
    patterns = [gap.into for gap in ([] if depth is None else depth.gaps) if gap.into is not None]
    mapped = {name for pattern in patterns for name in names if fnmatchcase(name, pattern)}
    return mapped | {f"{name.removesuffix('weight')}bias" for name in mapped}
