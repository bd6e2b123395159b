"""Whether weights are scaled as the report says."""

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Check, Finding
from ckpt_prune.stages.report import Report


def checks(checkpoint: Checkpoint, report: Report | None) -> list[Check]:
    scaled = [] if report is None else report.entries.get("scale", [])
    there = all(each["weight"] in checkpoint.tensors for each in scaled)
    return [Check("scales", there, f"{len(scaled)} scaled weights are there")] if scaled else []


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> Finding | None:
    return (None, "weights were scaled: they are not compared") if report.entries.get("scale") else None
