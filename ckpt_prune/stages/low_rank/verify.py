"""Whether products of two factors are as far from the dense weights as the report says."""

from collections.abc import Set

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.common.progress import track
from ckpt_prune.model.factors import factor_names
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.stages.low_rank.records import FactoredRecord
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.shared.equality import find_difference

_PRODUCT_TOLERANCE = 1e-6
"""Allowed difference, as a share of a weight's norm. Sums in another order differ by far less."""


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    """Compare products of factors with the dense weights, and all other tensors."""
    if not report.factored:
        return None
    dense, _ = match_checkpoint(dense)
    factors = {name for linear in report.factored for name in factor_names(linear.weight)}
    others = [name for name in checkpoint.tensors if name not in factors and name not in changed]
    if difference := find_difference(checkpoint, dense, others):
        return False, difference
    for linear in track(report.factored, "comparing factors", unit="tensor"):
        if fault := _find_factor_fault(linear, checkpoint, dense):
            return False, f"{linear.weight} {fault}"
    return True, (
        f"{len(report.factored)} products of two factors are as far from the dense weights as {REPORT} says; "
        f"{len(others)} other tensors are the dense ones, bit for bit"
    )


def _find_factor_fault(linear: FactoredRecord, checkpoint: Checkpoint, dense: Checkpoint) -> str | None:
    """Say how the factors of a weight differ from its record; None if they do not."""
    down, up = factor_names(linear.weight)
    if not {down, up} <= checkpoint.tensors.keys():
        return "has no two factors"
    if linear.weight not in dense.tensors or dense.tensors[linear.weight].shape != (linear.rows, linear.columns):
        return f"of the dense model has not the shape {[linear.rows, linear.columns]}"
    factors = checkpoint.read([down, up])
    shapes = [list(factors[name].shape) for name in (up, down)]
    if shapes != [[linear.rows, linear.rank], [linear.rank, linear.columns]]:
        return f"has factors of {shapes[0]} and {shapes[1]}, its report of rank {linear.rank}"
    weight = dense.read([linear.weight])[linear.weight].double()
    error = torch.linalg.norm(factors[up].double() @ factors[down].double() - weight) / torch.linalg.norm(weight)
    if linear.change is not None and abs(error.item() - linear.change) > _PRODUCT_TOLERANCE:
        return f"is {error:.4g} of its norm away from the product of its factors, {REPORT} says {linear.change:.4g}"
    return None
