"""`ckpt-prune recover`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import (
    after_option,
    checked_model,
    device_option,
    echo_json,
    json_option,
    options_of,
    overwrite_option,
    state_memory_option,
    table,
    trust_option,
)
from ckpt_prune.options import ImageOptions, TrainingOptions
from ckpt_prune.planning.recovery_recipe import RecoverySettings

MOST_SAMPLES = 2048
"""Samples where none are asked for, as in the paper, or all there are."""


@click.command("recover")
@click.argument("pruned", callback=checked_model)
@click.option("--dense", required=True, metavar="MODEL", help="The dense model that PRUNED was made from.")
@options_of(TrainingOptions)
@options_of(ImageOptions)
@options_of(RecoverySettings)
@state_memory_option
@after_option
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same job.")
@overwrite_option
@trust_option
@device_option
@json_option
def command(
    pruned: str,
    dense: str,
    state_memory: float,
    after: str | None,
    out: Path,
    resume: bool,
    overwrite: bool,
    trust: bool,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Train what PRUNED has left until each of its blocks does what the dense MODEL's does, and write it as OUT.

    PRUNED is a folder or a Hub id: an output of this tool of any kind, or a model that another tool pruned, of the
    same depth and hidden size as MODEL. Shapes and dtypes stay, zeros stay zeros, everything but the linear modules of
    the blocks stays as it is. No labels are used, and one dense and one pruned block are in memory at a time (LaCo:
    Layer-wise Compensation for Pruned Large Language Models).

    Of the samples (--samples, by default 2048 or all there are) a share is not trained on. It decides, block by block,
    which epoch's weights are kept: the old ones where none is better.

    The output appears only when it is complete. An interrupted run leaves OUT.partial, for --resume.

    \b
      ckpt-prune recover PRUNED --dense MODEL --text train.txt -o OUT
      ckpt-prune recover PRUNED --dense MODEL --text train.txt --only attention --layers 0:8 -o OUT
      ckpt-prune recover PRUNED --dense VIT --images DIR --samples 512 --epochs 5 -o OUT
    """
    from ckpt_prune.checkpoint.staging import check_output, partial_of, refuse_overlap

    # Before torch is imported, what can be told without it.
    if Path(dense).is_dir():
        refuse_overlap(Path(dense), out)
    if Path(pruned).is_dir():
        check_output(Path(pruned), out, resume=resume, overwrite=overwrite)

    from ckpt_prune.calibration.choosing import chosen_samples, has_data
    from ckpt_prune.calibration.states import StateMemory
    from ckpt_prune.calibration.text import read_text
    from ckpt_prune.cli.rendering import LAYER_HEADERS, layer_rows, recovery_lines
    from ckpt_prune.cli.resuming import resumable
    from ckpt_prune.containers.opening import open_model
    from ckpt_prune.devices import resolve_device
    from ckpt_prune.errors import UserError
    from ckpt_prune.transform.asked import asked_after, training_dtype
    from ckpt_prune.transform.publish import wanted_names
    from ckpt_prune.transform.recover import (
        RecoveryRequest,
        check_models,
        check_same_reader,
        recover,
        settle_recovery,
    )

    def say(line: str) -> None:
        click.echo(line, err=True)

    training, images = TrainingOptions(**options), ImageOptions(**options)
    if not has_data(training, images):
        raise UserError("recover needs --text FILE, or --images DIR for a vision model")
    settings = _settings(options)
    target, dtype = resolve_device(device), training_dtype(training)
    ours, theirs = open_model(pruned, trust=trust), open_model(dense, trust=trust)
    refuse_overlap(theirs.checkpoint.path, out)
    inputs = [images.images, images.labels, *training.text]
    check_output(
        ours.checkpoint.path,
        out,
        resume=resume,
        overwrite=overwrite,
        inputs=inputs,
        wants=wanted_names(ours.checkpoint),
    )
    check_models(ours, theirs)
    samples = chosen_samples(theirs, training, images, trust=trust, most=MOST_SAMPLES, say=say)
    check_same_reader(ours, theirs, read_text(training.text) if training.text else "", trust=trust)
    request = RecoveryRequest(
        ours,
        theirs,
        settings,
        samples,
        seed=training.seed,
        compute_dtype=dtype,
        device=target,
        allocate=StateMemory(int(state_memory * 2**30), partial_of(out)),
        after=asked_after(after, ours),
    )
    settled = settle_recovery(request)
    with resumable(out):
        report = recover(
            settled, out, resume=resume, overwrite=overwrite, announce=lambda line: click.echo(line, err=True)
        )
    if as_json:
        echo_json(report.data())
        return
    click.echo(table(LAYER_HEADERS, layer_rows(report.layers)))
    for line in recovery_lines(report):
        click.echo(line)
    click.echo(f"written to {out}")


def _settings(options: Mapping[str, Any]) -> Any:
    """How blocks are trained, from the options of a command.

    Raises:
        UserError: a value that means nothing.
    """
    from pydantic import ValidationError

    from ckpt_prune.errors import UserError
    from ckpt_prune.planning.recovery_recipe import RecoverySettings

    try:
        return RecoverySettings(**{name: options[name] for name in RecoverySettings.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{option} {first['input']}: {first['msg'].removeprefix('Value error, ')}") from error
