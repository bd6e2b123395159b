"""Where the moments of a job come from: nowhere, statistics on disk, or a live stream of hidden states."""

from collections.abc import Mapping
from dataclasses import replace

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import CachedMoments, DriftMoments, MomentSource, NoMoments, SequentialMoments
from ckpt_prune.stages.rotation.moments import RotatedMoments
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint


def open_moments(prepared: Prepared, grams: Mapping[str, bool] | None) -> MomentSource:
    """Open a source of moments at the first block.

    Args:
        prepared: the job.
        grams: space or linear module → whether live moments hold more than the least: Grams, or Grams of centred keys;
            None if no moments are needed.
    """
    recipe = prepared.recipe
    if grams is None or not recipe.needs_moments:
        return NoMoments()
    if prepared.sequential:
        stream = prepared.live_stream(prepared.view)
        if recipe.target != "drift":
            return SequentialMoments(stream, dict(grams), true_sequential=recipe.true_sequential)
        goal = prepared.plain_view
        if prepared.wide is not None:
            goal = replace(goal, model=prepared.wide)
        return DriftMoments(
            stream,
            prepared.live_stream(goal),
            goal.block,
            dict(grams),
            true_sequential=recipe.true_sequential,
            seen=prepared.narrow,
        )
    assert prepared.statistics is not None
    cached = CachedMoments(prepared.statistics, prepared.model)
    return RotatedMoments(cached, prepared.basis) if isinstance(prepared.basis, RotatedCheckpoint) else cached
