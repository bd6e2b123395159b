"""`ckpt-prune calibrate`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.calibrate import ForeseenStatistics, calibrate
from ckpt_prune.cli.options import (
    device_option,
    echo_json,
    family_option,
    json_option,
    model_argument,
    options_of,
    overwrite_option,
    part_option,
    trust_option,
)
from ckpt_prune.options import ActivityOptions, CalibrationOptions, ImageOptions


@click.command("calibrate")
@model_argument
@options_of(CalibrationOptions)
@options_of(ImageOptions)
@options_of(ActivityOptions)
@click.option(
    "--collect",
    metavar="KIND[,KIND...]",
    help="moments: vectors only, enough for scores and bias compensation; gram: also the Gram of every consumer's "
    "input, which rotation, ridge and the other closed forms need; logits: moments of queries and keys, for "
    "pruning q and k; centred: these also with keys less their mean over each sample, for recipes that say "
    "centre_keys; rotary: moments of rotary pairs, for recipes that prune these; linears: vectors, and with gram also "
    "Grams, of the inputs of all other linears, for masks; "
    "fisher: what errors of every layer do to the model's own output, by its gradients on 8 windows or 32 images, "
    "which recipes with allocation least-error (best-uniform, best) weigh errors by; effects: the same measured by "
    "pruning each layer alone, about blocks^2 x 3 more block runs, of small models; queries, values: with fisher and "
    "effects, the same of query heads inside KV groups and of value directions, for recipes that weigh them; taylor: "
    "importances of units by gradients of the loss on all windows, about 5 more runs of each block, for the "
    "llm-pruner recipes. [default: all but centred, rotary, queries, values and taylor that the model's family can "
    "use; effects up to 12 blocks]",
)
@click.option(
    "--shard",
    metavar="I/N",
    help="Measure only the I-th of N equal shares of the samples, on a machine of its own; `ckpt-prune statistics add` "
    "makes one of all shards.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Statistics folder to write.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything, and say what would be measured and what that takes; measure and write nothing.",
)
@overwrite_option
@family_option
@part_option
@trust_option
@device_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Run the dense MODEL over calibration text or images and write its activation statistics.

    One block is in memory at a time. The folder can be used by any recipe on the same model, and two folders measured
    on different data can be added (`ckpt-prune statistics add`). Images go through the checkpoint's own image
    processor; of a labels.csv with a column `split`, the rows `calib` are taken.

    A run that takes long begins with a line on stderr about time, memory and disk; --dry-run always has it.

    \b
      ckpt-prune calibrate MODEL --text calib.txt --samples 128 --window 2048 -o STATS
      ckpt-prune calibrate MODEL --images DIR --samples 4000 -o STATS
    """
    found = calibrate(**given)
    summary = found.summary()
    if as_json:
        echo_json(summary)
        return

    from ckpt_prune.common.formatting import human_bytes

    what = "images" if summary["modality"] == "image" else "windows"
    measured = f"{summary['samples']} {what} of {summary['window']} tokens, {summary['blocks']} blocks"
    collected = f"{'+'.join(summary['collect'])}, folds {summary['folds']}"
    if isinstance(found, ForeseenStatistics):
        click.echo(f"to be measured: {measured}, {summary['tokens']:,} tokens in all")
        click.echo(f"to be collected: {collected}")
        click.echo(f"{given['output']} will take {human_bytes(summary['bytes'])}")
        click.echo(f"it takes {found.estimate.line}")
        click.echo("everything checked, nothing written")
        return
    click.echo(f"{given['output']}: {measured}, {collected}, {human_bytes(summary['bytes'])}")
