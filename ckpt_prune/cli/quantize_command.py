"""`ckpt-prune quantize`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.quantize import quantize
from ckpt_prune.cli.options import echo_json, json_option, model_argument, overwrite_option, table
from ckpt_prune.stages.quantize.scheme import BITS


@click.command("quantize")
@model_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--format", type=click.Choice(list(BITS)), required=True, help="What weights are stored as.")
@click.option(
    "--group-size",
    metavar="N|channel",
    help="Columns that share a scale: 32, 64 or 128, or channel for whole rows. [default: channel for int8; for int4 "
    "the largest that divides every weight]",
)
@click.option(
    "--statistics",
    type=click.Path(path_type=Path),
    help="Statistics of MODEL (`ckpt-prune calibrate MODEL --collect moments,gram,linears`): round by GPTQ, so that "
    "later columns make up for earlier ones, in place of rounding to nearest.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same job.")
@overwrite_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Write MODEL (a folder or a Hub id, any output with a stock class included) with weights of 8 or 4 bits.

    The linear weights of the blocks are rounded to nearest, symmetric, each group of columns with the scale that
    changes it least; with --statistics by GPTQ. Embeddings, norms and heads stay as they are. OUT is in the form of
    compressed-tensors (pack-quantized), which transformers loads where that package is installed, and which vLLM reads.
    One block is in memory at a time, with --statistics also its Grams. Zeros stay zeros. An interrupted run leaves
    OUT.partial, for --resume.

    `verify OUT --against MODEL` proves it, `evaluate OUT --against MODEL` says what it cost.

    \b
      ckpt-prune quantize OUT -o OUT4 --format int4
      ckpt-prune quantize MODEL -o OUT8 --format int8
    """
    made = quantize(**given)
    if as_json:
        echo_json(made.data())
        return
    from ckpt_prune.common.formatting import human_bytes, plural

    record = made.record
    errors = [each.error or 0.0 for each in record.weights]
    worst = max(record.weights, key=lambda each: each.error or 0.0)
    share = f"{record.after / record.before:.1%}"
    click.echo(
        table(
            ["", "before", "after", "share"],
            [["bytes", human_bytes(record.before), human_bytes(record.after), share]],
        )
    )
    click.echo(f"{plural(len(errors), 'weight')} as {record.scheme.words}")
    click.echo(
        f"rounding changed {sum(errors) / len(errors):.3%} of a weight's energy on average, {max(errors):.3%} of "
        f"{worst.weight}"
    )
    click.echo(f"written to {made.path}")
