"""`ckpt-prune verify`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.verify import verify
from ckpt_prune.cli.options import checked_model, echo_json, family_option, json_option, options_of, table
from ckpt_prune.options import SpreadOptions


@click.command("verify")
@click.argument("folder", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="MODEL",
    callback=checked_model,
    help="The dense model: also check that kept rows, or weights that a mask left, are its own, bit for bit. Of an "
    "exported folder the model that it was exported from.",
)
@click.option(
    "--statistics",
    metavar="STATS",
    type=click.Path(path_type=Path),
    help="What OUT was made from: with --against also compute some blocks again, chosen at random, and compare them.",
)
@family_option
@options_of(SpreadOptions)
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Prove that OUT is whole: it loads, is finite, agrees with its config and with the digests in ckpt_prune.json.

    Of a masked OUT, the zeros and the pattern that its report states are counted in every weight.

    Of an exported graph, alone or in OUT/onnx, the files, operators and weights, that onnxruntime loads it, and that it
    is the one that validation.json says passed.

    Loads the whole model once. Exit code 1 if a check fails.
    """
    found = verify(**given)
    if as_json:
        echo_json(found.data())
    else:
        words = {True: "ok", False: "FAILED", None: "-"}
        click.echo(table(["check", "result"], [[check.name, words[check.passed]] for check in found.checks]))
        click.echo()
        for check in found.checks:
            click.echo(f"{check.name}: {check.detail}")
    if not found.passed:
        click.get_current_context().exit(1)
