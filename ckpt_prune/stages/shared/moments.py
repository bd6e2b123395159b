"""The source of a job's moments: none, statistics on disk, or a live stream of hidden states; and the step on it."""

from collections.abc import Mapping
from dataclasses import replace

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.step import BlockPruner, PruneStep
from ckpt_prune.measure.moment_sources import CachedMoments, DriftMoments, MomentSource, NoMoments, SequentialMoments
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.stages.rotation.moments import RotatedMoments
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint
from ckpt_prune.stages.shared.narrowed import Narrowed


def open_moments(prepared: Prepared, grams: Mapping[str, bool] | None) -> MomentSource:
    """Open a source of moments at the first block.

    Args:
        grams: space or linear module → True if live moments hold more than the least: Grams, or Grams of centred keys;
            None if no moments are needed.
    """
    recipe = prepared.recipe
    if grams is None or not recipe.needs_statistics:
        return NoMoments()
    if prepared.sequential:
        stream = prepared.live_stream(prepared.view)
        if recipe.target != "drift":
            return SequentialMoments(stream, dict(grams), true_sequential=recipe.true_sequential)
        goal = prepared.plain_view
        narrowed = prepared.facts(Narrowed)
        if narrowed is not None:
            goal = replace(goal, model=narrowed.wide)
        ends, live = prepared.ends, prepared.live_samples
        if ends is not None and (
            ends.model is not goal.model or ends.samples is not live.samples or len(ends.rows) < len(live.samples)
        ):
            ends = None
        return DriftMoments(
            stream,
            prepared.live_stream(goal),
            goal.block,
            dict(grams),
            true_sequential=recipe.true_sequential,
            seen=None if narrowed is None else narrowed.project,
            ends=ends,
        )
    assert prepared.statistics is not None
    cached = CachedMoments(prepared.statistics, prepared.model)
    return RotatedMoments(cached, prepared.basis) if isinstance(prepared.basis, RotatedCheckpoint) else cached


def prune_step(pruner: BlockPruner, grams: Mapping[str, bool] | None, prepared: Prepared) -> PruneStep:
    """Return the step that prunes blocks by moments of what reaches them, at the first block.

    `grams` are as `open_moments` takes them.
    """
    with phase("calibration"):
        return PruneStep(pruner, open_moments(prepared, grams))


def check_collected(prepared: Prepared, statistics: Statistics) -> None:
    """Refuse statistics that lack what a mask or factors of linear modules are computed from."""
    missing = [kind for kind in prepared.recipe.collect if kind not in statistics.index.collect]
    if missing and prepared.recipe.needs_moments:
        raise UserError(
            f"recipe {prepared.recipe.name} needs {' and '.join(prepared.recipe.collect)}, and {statistics.folder} has "
            f"no {' and no '.join(missing)}: calibrate with --collect {','.join(prepared.recipe.collect)}"
        )
