"""Whether weights are scaled as the report says."""

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Check
from ckpt_prune.stages.report import Report


def checks(checkpoint: Checkpoint, report: Report | None) -> list[Check]:
    scaled = [] if report is None else report.entries.get("scale", [])
    there = all(each["weight"] in checkpoint.tensors for each in scaled)
    return [Check("scales", there, f"{len(scaled)} scaled weights are there")] if scaled else []


def rewritten(checkpoint: Checkpoint, report: Report) -> set[str]:
    return {each["weight"] for each in report.entries.get("scale", ())}
