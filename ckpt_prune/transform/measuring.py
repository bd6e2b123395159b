"""Statistics for a request that is given data and needs them: measured first, in a scratch folder."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckpt_prune.calibration.measure import measure
from ckpt_prune.calibration.statistics import Statistics, with_effects
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.report.stages import Stages
from ckpt_prune.transform.effects import measure_effects
from ckpt_prune.transform.request import LiveSamples, Request
from ckpt_prune.transform.settle import Settled, settle


@contextmanager
def measured(settled: Settled, beside: Path, stages: Stages | None = None) -> Iterator[Settled]:
    """The job with all the moments it needs, its widths decided.

    A recipe that is sequential, needs no moments or has its statistics is passed on as it is. The unpruned model is
    measured on the live samples for a dense recipe, for one rotation of all blocks and for widths of the least error;
    the statistics live as long as the context.

    Args:
        settled: what to do.
        beside: the folder that the scratch folder is made in.
        stages: of the run, to which measuring is added.

    Raises:
        UserError: what is decided by what was measured does not fit together.
    """
    request = settled.request
    if not request.measures_first or request.live is None:
        yield settled
        return
    with disk_failures(beside):
        scratch = Path(tempfile.mkdtemp(prefix=".ckpt-prune-statistics-", dir=beside))
    try:
        with (stages or Stages(request.device)).stage("measuring"):
            statistics = _measure(request, request.live, scratch / "statistics")
        yield settle(replace(request, statistics=statistics))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _measure(request: Request, live: LiveSamples, folder: Path) -> Statistics:
    """Moments of the unpruned model, and effects where widths are weighed by them."""
    statistics = measure(
        request.model,
        live.samples,
        folder,
        seed=live.seed,
        folds=live.folds,
        collect=request.recipe.collect,
        device=request.device,
        compute_dtype=live.compute_dtype,
        allocate=live.allocate,
    )
    if not request.recipe.weighed_by_effect:
        return statistics
    effects = measure_effects(
        request.model,
        statistics,
        live.samples,
        spaces=list(request.recipe.spaces),
        device=request.device,
        compute_dtype=live.compute_dtype,
        allocate=live.allocate,
    )
    return with_effects(statistics, effects)
