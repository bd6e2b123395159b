"""`ckpt-prune validate`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.validate import validate
from ckpt_prune.cli.options import (
    checked_model,
    echo_json,
    json_option,
    options_of,
    provider_option,
    trust_option,
)
from ckpt_prune.options import SpreadOptions, ValidateOptions


@click.command("validate")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--against",
    metavar="MODEL",
    callback=checked_model,
    help="The checkpoint that DIR was exported from. [default: the one that DIR lies in, or beside]",
)
@click.option(
    "--metric-only",
    is_flag=True,
    help="Measure what is lost of the task's metric, and nothing else. DIR may be a graph of another tool's, whose "
    "allowance --max-loss says. Nothing is written.",
)
@options_of(ValidateOptions)
@provider_option
@options_of(SpreadOptions)
@trust_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Prove that the graph in DIR computes in onnxruntime what MODEL computes in PyTorch.

    Checks the files' digests, runs onnx.checker, compares inputs and outputs with the model's, and runs both on the
    same text or images: in several batch sizes and lengths, with padding, and, where the graph has a cache, in chunks
    and step by step as text is generated. PyTorch computes in float32 with the checkpoint's own values. Then the task's
    own metric in both: perplexity (of masked tokens for BERT), top-1, or the cosine of features.

    Loads the whole model once. What came out is printed and kept in DIR/validation.json. Exit code 1 if anything is
    outside the tolerance, with a table of where.

    \b
      ckpt-prune validate OUT/onnx --text held_out.txt
      ckpt-prune validate OUT-onnx --against OUT --images photos --labels labels.csv
      ckpt-prune validate theirs/model_quantized.onnx --against MODEL --metric-only --max-loss 2% --text held_out.txt
    """
    found = validate(**given)
    if as_json:
        echo_json(found.model_dump())
    else:
        from ckpt_prune.cli.proof import proof_lines

        click.echo("\n".join(proof_lines(found)))
    if not found.passed:
        click.get_current_context().exit(1)
