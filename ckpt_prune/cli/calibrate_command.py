"""`ckpt-prune calibrate`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    CalibrationOptions,
    device_option,
    echo_json,
    json_option,
    options_of,
    overwrite_option,
)


@click.command("calibrate")
@click.argument("model")
@options_of(CalibrationOptions)
@click.option(
    "--collect",
    default="moments,gram",
    show_default=True,
    help="moments: vectors only, enough for scores and bias compensation; gram: also the Gram of every consumer's "
    "input, which rotation, ridge and the other closed forms need.",
)
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="Statistics folder to write."
)
@overwrite_option
@device_option
@json_option
def command(model: str, collect: str, out: Path, overwrite: bool, device: str, as_json: bool, **options: Any) -> None:
    """Run the dense MODEL over calibration text and write its activation statistics.

    One block is in memory at a time. The folder can be used by any recipe on the same model, and two folders measured
    on different text can be added (`ckpt-prune statistics add`).

    \b
      ckpt-prune calibrate MODEL --text calib.txt --samples 128 --window 2048 -o STATS
    """
    import torch

    from ckpt_prune.architectures.family import family_of
    from ckpt_prune.calibration.measure import measure
    from ckpt_prune.checkpoint.reading import Checkpoint
    from ckpt_prune.checkpoint.staging import refuse_overlap
    from ckpt_prune.checkpoint.units import human_bytes
    from ckpt_prune.cli.setup import chosen_windows, resolve_device
    from ckpt_prune.errors import UserError
    from ckpt_prune.transform.layout import check_source

    kinds = tuple(part.strip() for part in collect.split(",") if part.strip())
    if not kinds or set(kinds) - {"moments", "gram"}:
        raise UserError(f"--collect {collect}: expected moments or moments,gram")
    calibration = CalibrationOptions(**options)
    if not calibration.text:
        raise UserError("calibrate needs --text FILE")
    target = resolve_device(device)
    checkpoint = Checkpoint.open(model)
    family = family_of(checkpoint.config)
    check_source(checkpoint, family)
    refuse_overlap(checkpoint.path, out)
    windows = chosen_windows(checkpoint, calibration)
    checkpoint.check_finite()
    statistics = measure(
        checkpoint,
        family,
        windows,
        out,
        seed=calibration.seed,
        folds=calibration.folds or 1,
        collect=("moments", "gram") if "gram" in kinds else ("moments",),
        device=target,
        compute_dtype=getattr(torch, calibration.compute_dtype),
        overwrite=overwrite,
    )
    summary = statistics.summary()
    if as_json:
        echo_json(summary)
        return
    click.echo(
        f"{out}: {summary['samples']} windows of {summary['window']} tokens, {summary['blocks']} blocks, "
        f"{'+'.join(summary['collect'])}, folds {summary['folds']}, {human_bytes(summary['bytes'])}"
    )
