"""Check weights that were rounded after they were pruned."""

from collections.abc import Set

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.stages.report import Report


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    if report.quantize is None:
        return None
    return None, "quantize changed weights that stay: they are not compared with the dense model's"
