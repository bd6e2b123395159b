"""Statistics for a dense recipe that is given data: measured first, in a scratch folder beside the output."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckpt_prune.calibration.measure import measure
from ckpt_prune.calibration.statistics import with_effects
from ckpt_prune.transform.budgets import at_size
from ckpt_prune.transform.effects import measure_effects
from ckpt_prune.transform.job import Job


def measures_first(job: Job) -> bool:
    """Whether the unpruned model is measured on the job's data before anything is pruned."""
    if job.live is None or job.statistics is not None or not job.recipe.needs_moments:
        return False
    rotation = job.recipe.rotation
    shared = rotation is not None and rotation.kind == "shared" and job.recipe.rotation_needs_moments
    return shared or job.recipe.allocation == "least-error" or not job.sequential


@contextmanager
def measured(job: Job, beside: Path, *, seed: int) -> Iterator[Job]:
    """The job with all the moments it needs.

    A recipe that is sequential, needs no moments or has its statistics is passed on as it is; for a dense one, for one
    rotation of all blocks and for widths of the least error, the unpruned model is measured on the job's data, and the
    statistics live as long as the context.

    Args:
        job: a checked job.
        beside: the folder that the scratch folder is made in.
        seed: of the samples, for the record.
    """
    if not measures_first(job) or job.live is None:
        yield at_size(job)
        return
    scratch = Path(tempfile.mkdtemp(prefix=".ckpt-prune-statistics-", dir=beside))
    try:
        statistics = measure(
            job.checkpoint,
            job.family,
            job.live.samples,
            scratch / "statistics",
            seed=seed,
            folds=job.live.folds,
            collect=job.recipe.collect,
            device=job.device,
            compute_dtype=job.live.compute_dtype,
            allocate=job.live.allocate,
        )
        if job.recipe.weighed_by_effect:
            effects = measure_effects(
                job.checkpoint,
                job.family,
                statistics,
                job.live.samples,
                spaces=list(job.recipe.spaces),
                device=job.device,
                compute_dtype=job.live.compute_dtype,
                allocate=job.live.allocate,
            )
            statistics = with_effects(statistics, effects)
        yield at_size(replace(job, statistics=statistics))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
