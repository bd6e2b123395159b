"""`ckpt-prune compare`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.compare import compare
from ckpt_prune.cli.options import (
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
from ckpt_prune.options import ImageOptions, SampleOptions


@click.command("compare")
@click.argument("reference", metavar="A", callback=checked_model)
@click.argument("model", metavar="B", callback=checked_model)
@options_of(SampleOptions)
@options_of(ImageOptions)
@click.option(
    "--lens",
    is_flag=True,
    help="Also compare what each model's own head makes of the states that leave every block (logit lens).",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also write one HTML file with every figure drawn."
)
@state_memory_option
@overwrite_option
@family_option
@part_option
@trust_option
@device_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Compare what leaves every block of B with what leaves that of A, usually the dense model, on the same samples.

    A and B are folders or Hub ids of the same depth and hidden size: an output of this tool, a model that another tool
    pruned, quantised or trained and saved as plain weights. Both run side by side, a block of each in memory at a time.

    MSE is the mean squared difference of hidden states; relative error the squared difference over A's squared
    length; cosine the mean over tokens; CKA linear centred kernel alignment, which no rotation of the states changes.
    The last line is what their outputs are apart: KL(A || B) in nats, or of a model without a head the relative error
    of its last hidden states. Where B's hidden states are rotated, A's are turned alike. Hidden states beyond
    --state-memory go to files in the temporary folder.

    \b
      ckpt-prune compare MODEL OUT --text wiki.test.raw --samples 32 --window 512
      ckpt-prune compare MODEL OUT --images DIR --lens --plot compared.html
    """
    found = compare(**given)
    if as_json:
        echo_json(found.data())
        return

    from ckpt_prune.reporting.comparison import columns, rows, verdict

    click.echo(table(["block", *(name for name, _ in columns(found))], rows(found)))
    click.echo(f"\n{verdict(found)}")
    if given["plot"] is not None:
        click.echo(f"drawn in {given['plot']}")
