"""What commands share between their options and the library: devices, windows and jobs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.text import calibration_windows, load_tokenizer, read_text, token_stream
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.cli.options import CalibrationOptions
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import Plan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.transform.job import Job, LiveText


def resolve_device(text: str) -> torch.device:
    """The device a `--device` names; auto takes a GPU where there is one.

    Raises:
        UserError: not a device, or CUDA that is not there.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UserError(f"--device {text}: expected auto, cpu, cuda or cuda:0, cuda:1, ...")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UserError(f"--device {text}: this machine has {count} usable CUDA devices: say --device cpu")
    return torch.device(text)


def with_container(overrides: tuple[str, ...], container: str | None) -> tuple[str, ...]:
    """`--container` as one more change of the recipe."""
    return overrides if container is None else (*overrides, f"container={container}")


def default_window(checkpoint: Checkpoint) -> int:
    """The model's context length, at most 2048."""
    return min(2048, int(checkpoint.config.get("max_position_embeddings", 2048)))


def chosen_windows(checkpoint: Checkpoint, options: CalibrationOptions) -> Tensor:
    """The calibration windows, (samples, window) int64.

    Raises:
        UserError: unreadable or too short text, or a window longer than the model's context.
    """
    window = options.window or default_window(checkpoint)
    limit = checkpoint.config.get("max_position_embeddings")
    if limit is not None and window > limit:
        raise UserError(f"--window {window} is longer than the model's context of {limit} tokens")
    stream = token_stream(load_tokenizer(checkpoint.path), read_text(options.text), bos=options.bos)
    return calibration_windows(stream, samples=options.samples, window=window, seed=options.seed, choose=options.choose)


def live_text(checkpoint: Checkpoint, recipe: Recipe, options: CalibrationOptions) -> LiveText:
    """The windows and how a job is to measure on them."""
    folds = options.folds or (4 if recipe.needs_folds else 1)
    windows = chosen_windows(checkpoint, options)
    if folds > len(windows):
        raise UserError(f"{folds} folds of {len(windows)} windows: every fold needs at least one")
    return LiveText(windows, folds, getattr(torch, options.compute_dtype))


def build_job(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    statistics: Path | None = None,
    live: LiveText | None = None,
    device: torch.device,
    plan: Plan | None = None,
    diagnostics: bool = False,
) -> Job:
    """A checked job."""
    opened = Statistics(statistics) if statistics else None
    job = Job(checkpoint, recipe, opened, live, device, plan, diagnostics)
    job.check()
    return job


def kept_line(job: Job) -> str:
    """Units kept per block, under which ratio."""
    kept = []
    for space in job.widths[0]:
        widths = sorted({width[space] for width in job.widths})
        span = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
        units = job.family.units(job.config, space)
        kept.append(f"{space} {span}/{units} (ratio {job.recipe.ratio_of(space):g})")
    return f"kept per block: {', '.join(kept)}"


def few_tokens(job: Job, *, errors: str) -> str | None:
    """A warning where the calibration tokens are too few for the fits to be more than memory, or None.

    Args:
        job: what was measured on how much.
        errors: where they stand: above or below.
    """
    tokens = job.statistics.index.tokens if job.statistics else job.live.windows.numel() if job.live else 0
    widths = [
        max(width[space] for width in job.widths) * job.family.unit_columns(job.config, space)
        for space in job.recipe.spaces
        if job.recipe.needs_gram(space)
    ]
    if not widths or tokens >= 2 * max(widths):
        return None
    return (
        f"{tokens} calibration tokens for {max(widths)} inputs of a projection: "
        f"the errors {errors} are a fit, not a prediction; use more samples"
    )


def cost_rows(job: Job) -> list[list[str]]:
    """Parameters, bytes and FLOPs before and after, for a table."""
    from ckpt_prune.checkpoint.units import human_bytes, human_count

    rows = []
    before: dict[str, Any] = job.before.model_dump()
    after: dict[str, Any] = job.after.model_dump()
    for key, show in (("parameters", human_count), ("bytes", human_bytes), ("flops", human_count)):
        name = f"FLOPs / {before['tokens']} tokens" if key == "flops" else key
        rows.append([name, show(before[key]), show(after[key]), f"{after[key] / before[key]:.1%}"])
    return rows
