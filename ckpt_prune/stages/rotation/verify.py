"""Whether the ends of a rotated model are the dense ones, rotated."""

from collections.abc import Set
from typing import Any, get_args

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.names import RotationKind
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.rotation.learner import RotationSizes, WrittenRotations
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint, not_learned
from ckpt_prune.stages.shared.equality import away, check_outside_blocks, tolerance
from ckpt_prune.stages.shared.logits import compare_logits


def moves_stream(report: Report) -> bool:
    return report.rotation is not None


def not_by_blocks(report: Report) -> str | None:
    return None if report.rotation is None else "its weights were rotated"


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    if report.rotation is None:
        return None
    return None, "the weights are rotated: they are not compared with the dense model's"


def check_head(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> Finding | None:
    """Compare a rotated embedding with the dense one, rotated, and the logits."""
    if report.rotation is None:
        return None
    if report.rotation.kind not in get_args(RotationKind):
        return None, f"not compared: the report names a rotation {report.rotation.kind!r}, which is not known"
    model = Model.of(dense)
    kind: Any = report.rotation.kind
    if not RotatedCheckpoint(model, kind, not_learned).absorbs_ends:
        return check_outside_blocks(checkpoint, model)
    rotations = WrittenRotations.of_output(checkpoint.path, RotationSizes.of(kind, model))
    view = RotatedCheckpoint(model, kind, rotations)
    for name in view.starts:
        if away(checkpoint.read([name])[name], view.read([name])[name]) > tolerance(model.dtype):
            return False, f"{name} is not the dense model's, rotated"
    basis = rotations(model.blocks - 1)[0]
    assert basis is not None
    return compare_logits(checkpoint, model, basis, tied=False)
