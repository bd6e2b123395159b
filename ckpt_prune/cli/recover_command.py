"""`ckpt-prune recover`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.recover import recover
from ckpt_prune.cli.options import (
    after_option,
    checked_model,
    device_option,
    echo_json,
    family_option,
    json_option,
    options_of,
    overwrite_option,
    part_option,
    state_memory_option,
    table,
    trust_option,
)
from ckpt_prune.job.training_settings import LoraSettings, RecoverySettings
from ckpt_prune.options import ImageOptions, TrainingOptions


@click.command("recover")
@click.argument("pruned", callback=checked_model)
@click.option(
    "--dense",
    metavar="MODEL",
    callback=checked_model,
    help="The dense model that PRUNED was made from; --method lora needs none.",
)
@options_of(TrainingOptions)
@options_of(ImageOptions)
@options_of(RecoverySettings)
@options_of(LoraSettings)
@state_memory_option
@after_option
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run of the same job.")
@overwrite_option
@family_option
@part_option
@trust_option
@device_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Train what PRUNED has left until each of its blocks does what the dense MODEL's does, and write it as OUT.

    PRUNED is a folder or a Hub id: an output of this tool of any kind, or a model that another tool pruned, of the
    same depth and hidden size as MODEL. Shapes and dtypes stay, zeros stay zeros, everything but the linear modules of
    the blocks stays as it is. No labels are used, and one dense and one pruned block are in memory at a time (LaCo:
    Layer-wise Compensation for Pruned Large Language Models).

    Of the samples (--samples, by default 2048, of scales 32, or all there are) a share is not trained on. It decides,
    block by block, which epoch's weights are kept: the old ones where none is better.

    With --method scales every linear module of the blocks gets a factor for each input and each output, fitted to what
    the dense model predicts (not to its hidden states), and multiplied into the weights. These are few numbers: 32
    windows and one epoch, in steps of one sample, serve. One block is in memory at a time.

    With --method lora adapters are trained on the linear modules of all blocks at once, by peft, on the next token (or
    on the images' classes), and merged; the whole model is in memory. What was zero is zero again after merging, and
    the weights of the epoch that is best on held-out samples are kept as they are stored, if any is better.

    The output appears only when it is complete. An interrupted run leaves OUT.partial, for --resume. It continues with
    the next block, or with scales or adapters that are fitted; what was half fitted is fitted again.

    \b
      ckpt-prune recover PRUNED --dense MODEL --text train.txt -o OUT
      ckpt-prune recover PRUNED --dense MODEL --text train.txt --only attention --layers 0:8 -o OUT
      ckpt-prune recover PRUNED --dense MODEL --method scales --text train.txt -o OUT
      ckpt-prune recover PRUNED --method lora --text train.txt --epochs 2 -o OUT
      ckpt-prune recover PRUNED --dense VIT --images DIR --samples 512 --epochs 5 -o OUT
    """
    recovered = recover(**given)
    if as_json:
        echo_json(recovered.data())
        return

    from ckpt_prune.cli.rendering import LAYER_HEADERS, adapter_lines, layer_rows, recovery_lines

    if recovered.report.adapters is not None and given["method"] != "laco":
        for line in adapter_lines(recovered.report.adapters):
            click.echo(line)
        click.echo(f"written to {recovered.path}")
        return
    click.echo(table(LAYER_HEADERS, layer_rows(recovered.report.layers)))
    for line in recovery_lines(recovered.report):
        click.echo(line)
    click.echo(f"written to {recovered.path}")
