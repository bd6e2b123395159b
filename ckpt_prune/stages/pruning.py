"""The step of stages that prune blocks by moments."""

from ckpt_prune.common.phases import phase
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import PruneStep
from ckpt_prune.stages.moments import open_moments


def prune_step(stage: Stage, prepared: Prepared) -> PruneStep:
    """Return the step of a stage that has a pruner, at the first block."""
    pruner = stage.pruner(prepared)
    assert pruner is not None
    with phase("calibration"):
        return PruneStep(pruner, open_moments(prepared, stage.grams(prepared)))
