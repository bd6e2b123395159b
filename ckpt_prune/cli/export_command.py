"""`ckpt-prune export`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.export import export
from ckpt_prune.cli.options import (
    echo_json,
    json_option,
    model_argument,
    options_of,
    overwrite_option,
    provider_option,
    trust_option,
)
from ckpt_prune.job.graph_settings import GraphSettings
from ckpt_prune.options import DenseOptions, ProofOptions, SpreadOptions


@click.command("export")
@model_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@options_of(GraphSettings)
@click.option(
    "--validate/--no-validate",
    "proof",
    default=True,
    show_default=True,
    help="Compare the graph in onnxruntime with PyTorch before it takes its place.",
)
@options_of(ProofOptions)
@options_of(DenseOptions)
@provider_option
@options_of(SpreadOptions)
@overwrite_option
@trust_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Write MODEL (a folder or a Hub id, any output of this tool included) as an ONNX graph that onnxruntime runs.

    OUT is complete for deployment: model.onnx, or by --dtype model_fp16.onnx, model_int8.onnx, model_q4.onnx and
    model_q4f16.onnx, with .onnx_data beside a graph of more than 1 GiB, config.json, tokenizer or image processor,
    generation config, validation.json, and a README.md with a few lines that run it. As a new folder onnx inside MODEL
    it is what the Hub's repositories have.

    Batch and length are dynamic. A model that generates text takes input_ids, attention_mask, position_ids and
    past_key_values.i.key and .value, of which the first call gives none (length 0), and returns logits and
    present.i.key and .value, which are the next call's past. With --no-cache it reads whole texts.

    The graph is compared with PyTorch in onnxruntime at several batch sizes and lengths, padded and step by step, on
    --text, by default Python's standard library, or on --images, by default noise; outside the tolerance nothing is
    written and the exit code is 1. See `ckpt-prune validate`.

    Of graphs in int8 and int4 the task's metric is compared, and --max-loss is what it may lose. Where all weights in
    few bits lose more than that, each is measured alone, and the most harmful are stored in 8 bits. --dense also
    compares with the dense model.

    Fused graphs (--optimize) have operators of onnxruntime alone. One for cuda is meant for its CUDA provider.

    This loads the WHOLE model, and once more to compare.

    \b
      ckpt-prune export OUT -o OUT/onnx --text held_out.txt
      ckpt-prune export VIT -o vit-onnx --images DIR --dtype fp32 --dtype int8
      ckpt-prune export OUT -o OUT/onnx --dtype int4 --rounding gptq --text held_out.txt --dense MODEL
      ckpt-prune export OUT -o onnx-fp16 --dtype fp16 --optimize cuda --provider cuda
    """
    exported = export(**given)
    if as_json:
        echo_json(exported.data())
    else:
        from ckpt_prune.cli.proof import exported_lines

        for line in exported_lines(exported):
            click.echo(line)
    if not exported.passed:
        click.get_current_context().exit(1)
