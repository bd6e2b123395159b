"""Estimates of a run: memory and disk from sizes, time from the first block, run on one sample.

Time of a recipe = time of `ridge` times the recipe's own `time` (tools/time_recipes.py). Recipes without that key get
no estimate of time. `ridge` is: every block run once on every sample with the Grams of its inputs, unless statistics
are given, and one solve as wide as its widest input. Recipes that decide widths on some of the samples alone take less.
Times are those of the processor, which other work on the machine does not lengthen.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.common.formatting import format_duration, human_bytes
from ckpt_prune.common.memory import available_bytes, resident_bytes
from ckpt_prune.job.job import Job
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.measure.samples.choose import DEFAULT_WINDOWS
from ckpt_prune.measure.samples.samples import SampleRange, Samples, TokenWindows
from ckpt_prune.measure.statistics.measurement import count_statistics_bytes
from ckpt_prune.measure.streams.hidden_stream import TOKENS_PER_BATCH
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.runner.run_job import preview_job
from ckpt_prune.stages.spaces.measure_dense import choose_samples, plan_end_states

WORTH_SAYING = 20.0
"""Seconds from which on a run starts with an estimate."""
LIBRARIES = 160 * 2**20
"""Bytes that libraries take once they compute."""
_BACKWARD = 3
"""Time of a run and a pass back through it, as a multiple of the run."""
_SHARE = 4
"""A solve is timed at a width that is this many times smaller, if it is large: it grows with the cube of the width."""
_LARGE = 1024
"""Narrower matrices are multiplied at a lower speed."""


@dataclass(frozen=True)
class Estimate:
    """Time, memory and disk of a run.

    Attributes:
        seconds: wall time, if nothing else runs on this machine; None if it is not known.
        peak_bytes: of memory.
        disk_bytes: of what is written, scratch included.
    """

    seconds: float | None
    peak_bytes: int
    disk_bytes: int

    @property
    def line(self) -> str:
        spent = "" if self.seconds is None else f"about {format_duration(self.seconds)}, "
        size = f"{human_bytes(self.peak_bytes)} of memory and {human_bytes(self.disk_bytes)} of disk"
        return size if self.seconds is None else f"{spent}{size}, where nothing else runs on this machine"

    @property
    def warning(self) -> str | None:
        """The warning before a run that is long or needs more memory than is free; None for any other."""
        free = available_bytes()
        if free is not None and self.peak_bytes > free + (resident_bytes() or 0):
            return (
                f"this takes {self.line}, and only {human_bytes(free)} of memory are free: close other programs, or "
                "see by --dry-run what fewer --samples take"
            )
        return f"this takes {self.line}" if self.seconds is not None and self.seconds >= WORTH_SAYING else None

    def data(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else round(self.seconds, 3)
        return {"seconds": seconds, "peak_bytes": self.peak_bytes, "disk_bytes": self.disk_bytes}


def estimate_job(preview: Prepared) -> Estimate:
    """Return what a prune will take, by what `preview_job` tells of its output.

    If there is nothing to measure on, the default number of windows stands for it.
    """
    job = preview.job
    recipe, model = job.recipe, job.model
    samples = DEFAULT_WINDOWS if job.samples is None else len(job.samples)
    tokens = model.tokens if job.samples is None else job.samples.tokens
    live, measured = recipe.needs_moments and job.statistics is None, 0
    if live:
        folds = job.live.folds if job.live is not None else 4 if recipe.needs_folds else 1
        measured = count_statistics_bytes(model, collect=recipe.collect, folds=folds, samples=samples)
    part = samples
    if job.live is not None and preview.measures_first:
        chosen = choose_samples(preview, job.live)
        part, kept = len(chosen.samples), plan_end_states(preview, chosen, Path())
        measured += 0 if kept is None else kept.bytes
    # Before the first block is timed: what that leaves behind is used again.
    # A site's own and the part that stays; where folds are held out, those of folds, too.
    grams = 0 if "gram" not in recipe.collect else 5 if recipe.needs_folds else 2
    peak = _peak(model, samples if live else 0, tokens, _dtype(job), grams)
    seconds = None
    multiple = _multiple(recipe)
    if multiple is not None and job.plan is None and not recipe.has("export"):
        run = time_run(model, job.device, _dtype(job), job.samples) if live else 0.0
        if run is not None:
            # Only what follows the choice of widths takes all samples: as long as `ridge`, or twice that with drift.
            on_all = min(multiple, 2.0 if preview.recipe.target == "drift" else 1.0)
            runs = on_all * samples + (multiple - on_all) * part
            seconds = model.blocks * (run * runs + multiple * time_solve(model, job.device))
    return Estimate(seconds, peak, preview.output.cost.bytes + (measured if preview.measures_first else 0))


def estimate_plan(job: Job, plan: Plan) -> Estimate:
    """Return what a prune by a plan of a job will take: what a solve by statistics does."""
    estimate = estimate_job(preview_job(replace(job, plan=plan)))
    if job.statistics is None:
        return estimate
    return replace(estimate, seconds=job.model.blocks * time_solve(job.model, job.device))


def estimate_calibration(
    model: Model,
    samples: Samples,
    collect: Sequence[Collect],
    folds: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Estimate:
    """Return what `calibrate` will take."""
    size = count_statistics_bytes(model, collect=collect, folds=folds, samples=len(samples))
    peak = _peak(model, len(samples), samples.tokens, dtype, 5 if "gram" in collect else 0)
    run = time_run(model, device, dtype, samples)
    runs = 1 + (_BACKWARD if {"fisher", "taylor"} & set(collect) else 0)
    seconds = None if run is None else model.blocks * run * len(samples) * runs
    return Estimate(seconds, peak, size)


def time_run(model: Model, device: torch.device, dtype: torch.dtype, samples: Samples | None) -> float | None:
    """Return the seconds that the first block with spaces takes for one sample, with the Grams of its inputs.

    As many samples are run as run together. If there are none, that is a window of the model's context; there is none
    for images and sounds.
    """
    family = model.family
    if samples is None and family.modality != "text":
        return None
    one: Samples = TokenWindows(torch.zeros(1, model.tokens, dtype=torch.long)) if samples is None else samples
    view = ModelView(model, device, container=container_of(model) if model.has_remote_code else None)
    block = model.spaced_blocks.start
    count = min(len(one), max(1, TOKENS_PER_BATCH // one.tokens))
    stream, tensors = view.stream(SampleRange(one, 0, count), dtype), view.block(block)
    grams = dict.fromkeys(family.inputs, True)
    stream.observe(block, tensors, grams)  # once to warm up
    start = _clock(device)
    stream.observe(block, tensors, grams)
    return (_clock(device) - start) / count


def time_solve(model: Model, device: torch.device) -> float:
    """Return the seconds of a solve for the widest input of that block."""
    width = _widest(model)
    part = min(width, max(_LARGE, width // _SHARE))
    gram = torch.eye(part, dtype=torch.float64, device=device)
    torch.linalg.cholesky(gram)  # once to warm up
    start = _clock(device)
    torch.linalg.cholesky(gram)
    gram @ gram
    return (_clock(device) - start) * (width / part) ** 3


def _clock(device: torch.device) -> float:
    """Return seconds: of each of the processor's threads, or those that pass while an accelerator works."""
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else time.perf_counter()


def _multiple(recipe: Recipe) -> float | None:
    """Return the time of a recipe in units of `ridge`: its own, or that of the first shipped one like it."""
    if recipe.time is not None:
        return recipe.time

    def traits(each: Recipe) -> tuple[object, ...]:
        return tuple(stage.key for stage in each.stages if stage.prunes), each.allocation, each.target

    for count in (3, 2, 1):
        for each in _timed_recipes():
            if traits(each)[:count] == traits(recipe)[:count]:
                return each.time
    return None


@cache
def _timed_recipes() -> tuple[Recipe, ...]:
    """Return the shipped recipes whose time is known; to read them all takes a third of a second."""
    return tuple(each for each in map(load_recipe, shipped_recipes()) if each.time is not None)


def _dtype(job: Job) -> torch.dtype:
    data = job.live or job.training
    return torch.float32 if data is None else data.compute_dtype


def _peak(model: Model, samples: int, tokens: int, dtype: torch.dtype, grams: int) -> int:
    """Return bytes of memory: four blocks (read, pruned, the next and the last), all hidden states, float64 Grams."""
    block = sum(model.checkpoint.tensors[name].nbytes for name in model.weights(model.spaced_blocks.start))
    states = samples * tokens * model.dimension("hidden") * dtype.itemsize
    return (resident_bytes() or 0) + LIBRARIES + 4 * block + states + grams * 8 * _widest(model) ** 2


def _widest(model: Model) -> int:
    return max(model.checkpoint.tensors[name].shape[-1] for name in model.weights(model.spaced_blocks.start))
