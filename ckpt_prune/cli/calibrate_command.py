"""`ckpt-prune calibrate`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    device_option,
    echo_json,
    json_option,
    model_argument,
    options_of,
    overwrite_option,
    trust_option,
)
from ckpt_prune.options import CalibrationOptions, ImageOptions


@click.command("calibrate")
@model_argument
@options_of(CalibrationOptions)
@options_of(ImageOptions)
@click.option(
    "--collect",
    metavar="KIND[,KIND...]",
    help="moments: vectors only, enough for scores and bias compensation; gram: also the Gram of every consumer's "
    "input, which rotation, ridge and the other closed forms need; logits: moments of queries and keys, for "
    "pruning q and k; linears: vectors, and with gram also Grams, of the inputs of all other linears, for masks. "
    "[default: all that the model's family can use]",
)
@click.option(
    "--effects/--no-effects",
    help="Also measure what pruning each site alone does to the model's own output, which recipes with allocation "
    "least-error (best) weigh errors by: about blocks^2 x 3 more block runs on 8 windows or 32 images. A finished "
    "folder of the same model and samples gets them added.",
)
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="Statistics folder to write."
)
@overwrite_option
@trust_option
@device_option
@json_option
def command(
    model: str,
    collect: str | None,
    effects: bool,
    out: Path,
    overwrite: bool,
    trust: bool,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Run the dense MODEL over calibration text or images and write its activation statistics.

    One block is in memory at a time. The folder can be used by any recipe on the same model, and two folders measured
    on different data can be added (`ckpt-prune statistics add`). Images go through the checkpoint's own image
    processor; of a labels.csv with a column `split`, the rows `calib` are taken.

    \b
      ckpt-prune calibrate MODEL --text calib.txt --samples 128 --window 2048 -o STATS
      ckpt-prune calibrate MODEL --images DIR --samples 4000 -o STATS
    """
    import torch

    from ckpt_prune.calibration.choosing import chosen_samples, has_data
    from ckpt_prune.calibration.measure import everything, measure
    from ckpt_prune.calibration.statistics import with_effects
    from ckpt_prune.checkpoint.staging import refuse_inside, refuse_overlap
    from ckpt_prune.checkpoint.units import human_bytes
    from ckpt_prune.containers.checking import check_source
    from ckpt_prune.containers.opening import open_model
    from ckpt_prune.devices import resolve_device
    from ckpt_prune.errors import UserError
    from ckpt_prune.transform.effects import measure_effects

    calibration, images = CalibrationOptions(**options), ImageOptions(**options)
    if not has_data(calibration, images):
        raise UserError("calibrate needs --text FILE, or --images DIR for a vision model")
    target = resolve_device(device)
    source = open_model(model, trust=trust)
    checkpoint, family = source.checkpoint, source.family
    kinds = _kinds(collect, everything(source), family.model_type)
    if effects and "gram" not in kinds:
        raise UserError(f"--effects needs Grams: give --collect {collect},gram")
    check_source(source)
    refuse_overlap(checkpoint.path, out)
    refuse_inside(out, [images.images, images.labels, *calibration.text])
    samples = chosen_samples(source, calibration, images, trust=trust, say=lambda line: click.echo(line, err=True))
    checkpoint.check_finite()
    folds = calibration.folds or 1
    dtype = getattr(torch, calibration.compute_dtype)
    statistics = (
        _lacking_effects(out, checkpoint, samples, calibration.folds, collect and kinds)
        if effects and not overwrite
        else None
    )
    if statistics is None:
        statistics = measure(
            source,
            samples,
            out,
            seed=calibration.seed,
            folds=folds,
            collect=kinds,
            device=target,
            compute_dtype=dtype,
            overwrite=overwrite,
            announce=lambda size: click.echo(f"{out} will take {human_bytes(size)}", err=True),
        )
    if effects:
        held = statistics.index.collect
        spaces = [space for space in family.spaces if space in family.columns or "logits" in held]
        measured = measure_effects(source, statistics, samples, spaces=spaces, device=target, compute_dtype=dtype)
        statistics = with_effects(statistics, measured)
    summary = statistics.summary()
    if as_json:
        echo_json(summary)
        return
    what = "images" if summary["modality"] == "image" else "windows"
    click.echo(
        f"{out}: {summary['samples']} {what} of {summary['window']} tokens, {summary['blocks']} blocks, "
        f"{'+'.join(summary['collect'])}, folds {summary['folds']}, {human_bytes(summary['bytes'])}"
    )


def _lacking_effects(out: Path, checkpoint: Any, samples: Any, folds: int | None, collect: Any) -> Any:
    """The statistics in OUT where they are what is asked for and lack nothing but effects, or None."""
    from ckpt_prune.calibration.statistics import INDEX, Statistics

    if not (out / INDEX).is_file():
        return None
    found = Statistics(out)
    index = found.index
    same = index.model == checkpoint.fingerprint and index.data == [samples.fingerprint]
    asked = folds in (None, index.folds) and (not collect or list(collect) == index.collect)
    return found if same and asked and "gram" in index.collect and not index.effects else None


def _kinds(text: str | None, known: tuple[Any, ...], family: str) -> tuple[Any, ...]:
    """What `--collect` asks for, in a fixed order; vectors always."""
    from ckpt_prune.errors import UserError

    if text is None:
        return known
    asked = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in asked if part not in known]
    if unknown or not asked:
        raise UserError(f"--collect {text}: of a {family}, one or more of {','.join(known)} can be collected")
    return tuple(kind for kind in known if kind in asked or kind == "moments")
