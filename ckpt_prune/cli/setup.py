"""What commands share between their options and the library: devices, windows and jobs."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from pydantic import ValidationError

from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.calibration.images import ImageSamples, choose_images, find_images, load_processor
from ckpt_prune.calibration.samples import Samples, TokenWindows
from ckpt_prune.calibration.states import Allocate
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.calibration.text import (
    calibration_windows,
    frame_length,
    framed,
    load_tokenizer,
    read_text,
    token_stream,
)
from ckpt_prune.checkpoint.jsonfile import read_object
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.units import human_bytes, human_count
from ckpt_prune.cli.options import CalibrationOptions, ImageOptions, SampleOptions
from ckpt_prune.containers.remote import remote_class
from ckpt_prune.errors import UserError
from ckpt_prune.filenames import REPORT
from ckpt_prune.planning.plan import Plan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.recovery_recipe import RecoverySettings
from ckpt_prune.sparsity.patterns import UNSTRUCTURED
from ckpt_prune.transform.budgets import at_size
from ckpt_prune.transform.job import Job, LiveSamples, RecoverySamples

SOLVED = 1e-6
"""Relative residual below which a logit solve is as good as the float32 moments it was made from."""
DEFAULT_WINDOWS, MOST_IMAGES = 128, 4000
"""Samples where none are asked for: windows, and at most so many of the images there are (CORP's number)."""


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


def open_source(model: str, *, trust: bool = False) -> Checkpoint:
    """Open a checkpoint to be measured or pruned.

    Args:
        model: a folder or a Hub id.
        trust: accept one that asks for code of its own; the code is not run.

    Raises:
        UserError: not a checkpoint, or it asks for remote code and is not trusted.
    """
    checkpoint = Checkpoint.open(model)
    try:
        remote_class(checkpoint.config, checkpoint.path)
    except UserError as error:
        if not trust:
            raise UserError(f"{error}; where you have read and trust it, say --trust-remote-code") from error
        config = {key: value for key, value in checkpoint.config.items() if key != "auto_map"}
        return replace(checkpoint, config=config)
    return checkpoint


def has_data(calibration: SampleOptions, images: ImageOptions) -> bool:
    """Whether there is something to calibrate on.

    Raises:
        UserError: both text and images.
    """
    if calibration.text and images.images is not None:
        raise UserError("give --text or --images, not both")
    if images.images is None and images.labels is not None:
        raise UserError("--labels goes with --images")
    return bool(calibration.text) or images.images is not None


def chosen_samples(
    checkpoint: Checkpoint,
    family: Family,
    calibration: SampleOptions,
    images: ImageOptions,
    *,
    trust: bool = False,
    most: int | None = None,
) -> Samples:
    """The calibration samples that options ask for; says on stderr what could not be read.

    Args:
        checkpoint: whose tokenizer or image processor reads them.
        family: its description.
        calibration: which windows, or how many images.
        images: which images.
        trust: run the image processor's own code.
        most: samples where none are asked for: so many, or all there are if these are fewer. By default 128 windows,
            and at most 4000 images.

    Raises:
        UserError: data of the wrong kind, unreadable or too little, or a window longer than the model's context.
    """
    if family.modality == "image":
        if images.images is None:
            raise UserError(f"{checkpoint.path} reads images: give --images DIR")
        if calibration.window is not None or calibration.bos != "auto":
            raise UserError("--window and --bos are for text: they do not go with --images")
        return _images(checkpoint, family, calibration, images, trust, most or MOST_IMAGES)
    if images.images is not None:
        raise UserError(f"{checkpoint.path} reads text: give --text FILE")
    window = calibration.window or family.tokens(parse_config(checkpoint.config))
    limit = checkpoint.config.get("max_position_embeddings")
    if limit is not None and window > limit:
        raise UserError(f"--window {window} is longer than the model's context of {limit} tokens")
    tokenizer = load_tokenizer(checkpoint.path)
    # A causal model reads one long text; an encoder reads each window between its own opening and closing tokens.
    if not family.causal and calibration.bos != "auto":
        raise UserError("--bos is for causal language models: an encoder reads each window between its own tokens")
    frame = 0 if family.causal else frame_length(tokenizer)
    stream = token_stream(tokenizer, read_text(calibration.text), bos=calibration.bos if family.causal else "never")
    available = len(stream) // (window - frame) if window > frame else 0
    windows = calibration_windows(
        stream,
        samples=calibration.samples or (DEFAULT_WINDOWS if most is None else max(1, min(most, available))),
        window=window - frame,
        seed=calibration.seed,
        choose=calibration.choose,
    )
    return TokenWindows(framed(windows, tokenizer) if frame else windows)


def _images(
    checkpoint: Checkpoint, family: Family, calibration: SampleOptions, options: ImageOptions, trust: bool, most: int
) -> Samples:
    assert options.images is not None
    processor = load_processor(checkpoint.path, trust_remote_code=trust)
    found = find_images(options.images, labels=options.labels, split="calib")
    count = calibration.samples or min(len(found.paths), most)
    chosen = choose_images(found, samples=count, seed=calibration.seed, choose=calibration.choose)
    tokens = partial(family.image_tokens, parse_config(checkpoint.config))
    samples = ImageSamples(chosen, processor, tokens=tokens, max_corrupt=options.max_corrupt)
    if samples.skipped:
        named = ", ".join(samples.skipped[:3]) + (", ..." if len(samples.skipped) > 3 else "")
        click.echo(f"{len(samples.skipped)} of {count} images do not decode and are left out: {named}", err=True)
    return samples


def live_samples(
    checkpoint: Checkpoint,
    family: Family,
    recipe: Recipe,
    calibration: CalibrationOptions,
    images: ImageOptions,
    *,
    allocate: Allocate,
    trust: bool = False,
) -> LiveSamples:
    """The samples and how a job is to measure on them."""
    samples = chosen_samples(checkpoint, family, calibration, images, trust=trust)
    folds = calibration.folds or (min(4, len(samples)) if recipe.needs_folds else 1)
    if folds > len(samples):
        raise UserError(f"{folds} folds of {len(samples)} samples: every fold needs at least one")
    return LiveSamples(samples, folds, getattr(torch, calibration.compute_dtype), allocate)


def training_samples(
    checkpoint: Checkpoint,
    family: Family,
    recipe: Recipe,
    calibration: CalibrationOptions,
    images: ImageOptions,
    live: LiveSamples | None,
    *,
    allocate: Allocate,
    after: frozenset[int],
    trust: bool = False,
) -> RecoverySamples:
    """What the blocks of a recipe with recovery are trained on: as many samples as it says, else the calibration's.

    Raises:
        UserError: as `chosen_samples`, or a type that cannot be trained in.
    """
    assert recipe.recovery is not None
    own = recipe.recovery.samples
    samples = live.samples if live is not None else None
    if samples is None or own is not None:
        wanted = calibration if own is None else calibration.model_copy(update={"samples": own})
        samples = chosen_samples(checkpoint, family, wanted, images, trust=trust)
    return RecoverySamples(samples, training_dtype(calibration), allocate, after)


def training_dtype(calibration: SampleOptions) -> torch.dtype:
    """The type that blocks in training run in.

    Raises:
        UserError: float16, whose gradients underflow.
    """
    if calibration.compute_dtype == "float16":
        raise UserError("--compute-dtype float16: gradients underflow in it; recovery runs in float32 or bfloat16")
    dtype: torch.dtype = getattr(torch, calibration.compute_dtype)
    return dtype


def recovery_settings(options: Mapping[str, Any]) -> RecoverySettings:
    """How blocks are trained, from the options of a command.

    Raises:
        UserError: a value that means nothing.
    """
    try:
        return RecoverySettings(**{name: options[name] for name in RecoverySettings.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{option} {first['input']}: {first['msg'].removeprefix('Value error, ')}") from error


def asked_after(after: str | None, family: Family, blocks: int) -> frozenset[int]:
    """Numbers of blocks that `--perplexity-after` names: with commas between, or all.

    Raises:
        UserError: not numbers, more than there are, or the model has no perplexity.
    """
    if after is None:
        return frozenset()
    if not family.causal:
        raise UserError(f"--perplexity-after is for causal language models, which a {family.model_type} is not")
    if after.strip() == "all":
        return frozenset(range(blocks + 1))
    parts = [part.strip() for part in after.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 and int(part) <= blocks for part in parts):
        raise UserError(
            f"--perplexity-after {after}: expected numbers of blocks from 0 to {blocks} with commas between, or all"
        )
    return frozenset(map(int, parts))


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Say on Ctrl-C, or after a crash, that the work so far is kept, where it is."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, UserError) and out.with_name(f"{out.name}.partial").exists():
            click.echo(
                f"{out}.partial keeps the blocks that are done: the same command with --resume continues", err=True
            )
        raise


def build_job(
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
    statistics: Path | None = None,
    live: LiveSamples | None = None,
    device: torch.device,
    plan: Plan | None = None,
    diagnostics: bool = False,
    training: RecoverySamples | None = None,
) -> Job:
    """A checked job."""
    opened = Statistics(statistics) if statistics else None
    job = Job(checkpoint, recipe, opened, live, device, plan, diagnostics, training=training)
    job.check()
    sized = at_size(job)
    if sized is not job:
        sized.check()  # what depends on the ratio
    return sized


def kept_line(job: Job) -> str:
    """Units kept per block, under which ratio or for which size."""
    asked = job.recipe.size or (job.asked.size if job.asked is not None else None)
    if asked is not None and all(
        width[space] == job.family.units(job.config, space) for width in job.widths for space in width
    ):
        return f"nothing is dropped: the model is within {asked.words} as it is"
    kept = []
    for space in job.widths[0]:
        widths = sorted({width[space] for width in job.widths})
        span = str(widths[0]) if len(widths) == 1 else f"{widths[0]} to {widths[-1]}"
        units = job.family.units(job.config, space)
        told = f"ratio {job.recipe.ratio_of(space):g}"
        if job.recipe.allocation == "least-error":
            told = f"the size of {told}" if asked is None else asked.words
        kept.append(f"{space} {span}/{units} ({told})")
    return f"kept per block: {', '.join(kept)}"


def report_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an output of this tool says of itself; nothing for other checkpoints."""
    path = checkpoint.path / REPORT
    return read_object(path) if path.is_file() else {}


def masked_before(checkpoint: Checkpoint) -> str | None:
    """The mask that a checkpoint was made with, or None."""
    mask = report_of(checkpoint).get("mask")
    return mask_name(mask["method"], mask["pattern"]) if mask else None


def mask_lines(report: dict[str, Any]) -> list[str]:
    """What a mask did, and the rotations before it."""
    lines = []
    rotation, linears = report["rotation"], report["linears"]
    if rotation is not None:
        before, after = (sum(e[f"entropy_{when}"] for e in rotation["learned"]) for when in ("before", "after"))
        steps = sorted({entry["steps"] for entry in rotation["learned"]})
        span = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        # Nothing is left to concentrate where every weight is zero.
        change = f" ({after / before - 1:+.1%})" if before > 0 else ""
        lines.append(
            f"rotation {rotation['kind']}: entropy of {rotation['importance']} importance {before:.0f} -> {after:.0f} "
            f"nats{change}, {span} steps"
        )
    if linears:
        zeros, total = sum(e["zeros"] for e in linears), sum(e["rows"] * e["columns"] for e in linears)
        how = mask_name(report["mask"]["method"], report["mask"]["pattern"])
        lines.append(f"masked by {how}: {zeros / total:.2%} zeros in {len(linears)} weights of {human_count(total)}")
        errors = [e["error"] for e in linears if e["error"] is not None]
        if errors:
            lines.append(f"mean error of the outputs on the calibration samples {sum(errors) / len(errors):.4f}")
        asked = report["recipe"]["mask"]["damp"]
        damped = [e for e in linears if e["damp"] is not None and e["damp"] > asked]
        if damped:
            named = ", ".join(e["weight"] for e in damped[:3]) + (", ..." if len(damped) > 3 else "")
            lines.append(
                f"{len(damped)} of {len(linears)} Hessians were singular with damping {asked:g} and took up to "
                f"{max(e['damp'] for e in damped):g}: use more samples ({named})"
            )
    return lines


def recovery_lines(report: dict[str, Any]) -> list[str]:
    """What recovery did, as far as one line each can say."""
    recovery, layers = report.get("recovery"), report.get("layers") or []
    if not recovery or not layers:
        return []

    def mean(key: str, form: str) -> str:
        known = [layer[key] for layer in layers if layer[key] is not None]
        return format(math.fsum(known) / len(known), form) if len(known) == len(layers) else "not finite"

    done = sum(layer["recovered"] for layer in layers)
    lines = [
        f"recovered {done} of {len(layers)} blocks; means over blocks on "
        f"{_counted(recovery['data']['held_out'], 'held-out sample')}: squared error "
        f"{mean('mse_before', '.4g')} -> {mean('mse_after', '.4g')}, CKA {mean('cka_before', '.4f')} -> "
        f"{mean('cka_after', '.4f')}"
    ]
    broken = [str(layer["block"]) for layer in layers if layer["mse_after"] is None]
    if broken:
        lines.append(f"the hidden states after block {broken[0]} are not finite: what follows cannot be recovered")
    idle = [str(x["block"]) for x in layers if x["epochs"] and not x["recovered"] and not x["diverged"]]
    if idle:
        lines.append(
            f"no epoch was better than the old weights in {_counted(len(idle), 'block')} ({', '.join(idle)}), with lr "
            f"{recovery['settings']['lr']:.3g} and less: use more samples or epochs"
        )
    last = layers[-1]
    if None not in (last["mse_before"], last["mse_after"]) and last["mse_after"] > last["mse_before"]:
        lines.append(
            "after the last block the squared error is larger than without recovery: measure what it is worth with "
            "`ckpt-prune evaluate`, or use more samples"
        )
    lost = [str(layer["block"]) for layer in layers if layer["diverged"]]
    if lost:
        lines.append(
            f"training diverged in {_counted(len(lost), 'block')} ({', '.join(lost)}) and was taken back there: use a "
            f"smaller lr than {recovery['settings']['lr']:.3g}"
        )
    asked = recovery["perplexity_after"]
    if asked:
        curve = ", ".join(f"{_perplexity(entry['perplexity'])} with {entry['blocks']}" for entry in asked)
        lines.append(
            f"perplexity on {_counted(recovery['data']['held_out'], 'held-out window')} of "
            f"{recovery['data']['window']} tokens: {curve} blocks recovered"
        )
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _perplexity(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3f}"


def mask_name(method: str, pattern: str) -> str:
    """A mask in a line: its method, and its pattern where it has one."""
    return method if pattern == UNSTRUCTURED else f"{method} {pattern}"


def few_tokens(job: Job, *, errors: str) -> str | None:
    """A warning where the calibration tokens are too few for the fits to be more than memory, or None.

    Args:
        job: what was measured on how much.
        errors: where they stand: above or below.
    """
    tokens = job.statistics.index.tokens if job.statistics else 0
    if job.live is not None and not tokens:
        tokens = len(job.live.samples) * job.live.samples.tokens
    widths = [
        max(width[space] for width in job.widths) * job.family.unit_columns(job.config, space)
        for space in job.recipe.spaces
        if job.recipe.needs_gram(space)
    ]
    if job.recipe.mask is not None and job.recipe.mask.method == "sparsegpt":
        widths = [job.checkpoint.tensors[job.family.tensor(0, module)].shape[1] for module in job.family.linears]
    if not widths or tokens >= 2 * max(widths):
        return None
    return (
        f"{tokens} calibration tokens for {max(widths)} inputs of a projection: "
        f"the errors {errors} are a fit, not a prediction; use more samples"
    )


def cost_rows(job: Job) -> list[list[str]]:
    """Parameters, bytes and FLOPs before and after, for a table."""
    rows = []
    before: dict[str, Any] = job.before.model_dump()
    after: dict[str, Any] = job.after.model_dump()
    for key, show in (("parameters", human_count), ("bytes", human_bytes), ("flops", human_count)):
        name = f"FLOPs / {before['tokens']} tokens" if key == "flops" else key
        rows.append([name, show(before[key]), show(after[key]), f"{after[key] / before[key]:.1%}"])
    return rows


def warning_lines(sites: list[dict[str, Any]]) -> list[str]:
    """What a user should know of single sites: solves that stopped short, and compensation that does not help.

    The latter is what cross-validation over folds says: on samples that the fit has not seen.
    """
    lines = [
        f"the logits of block {s['block']} are not solved to the end (relative residual {s['residual']:.1g}): "
        "use more samples or a larger lambda"
        for s in sites
        if (s["residual"] or 0.0) > SOLVED
    ]
    known = [s for s in sites if s["error_held_out"] is not None and s["method"] != "none"]
    if not known:
        return lines
    for space in dict.fromkeys(s["space"] for s in known):
        errors = [s["error_held_out"] for s in known if s["space"] == space]
        lines.append(f"{space}: mean error on held-out folds, compensated, {sum(errors) / len(errors):.4f}")
    worse = [f"{s['space']} of block {s['block']}" for s in known if s["error_held_out"] > s["error_uncompensated"]]
    if worse:
        named = ", ".join(worse[:5]) + (f" and {len(worse) - 5} more" if len(worse) > 5 else "")
        lines.append(f"compensation does not help on held-out samples at {named}: use more samples or a larger lambda")
    return lines
