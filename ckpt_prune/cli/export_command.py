"""`ckpt-prune export`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.cli.options import echo_json, json_option, options_of, overwrite_option, provider_option, trust_option
from ckpt_prune.cli.proof import ProofOptions
from ckpt_prune.planning.export_recipe import GraphSettings


@click.command("export")
@click.argument("model")
@click.option("-o", "--output", "out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@options_of(GraphSettings)
@click.option(
    "--validate/--no-validate",
    "proof",
    default=True,
    show_default=True,
    help="Compare the graph in onnxruntime with PyTorch before it takes its place.",
)
@options_of(ProofOptions)
@provider_option
@overwrite_option
@trust_option
@json_option
def command(
    model: str,
    out: Path,
    proof: bool,
    provider: Any,
    overwrite: bool,
    trust: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write MODEL (a folder or a Hub id, any output of this tool included) as an ONNX graph that onnxruntime runs.

    OUT is complete for deployment: model.onnx, with model.onnx.data beside it above 1 GiB of weights, config.json,
    tokenizer or image processor, generation config, validation.json, and a README.md with a few lines that run it.
    It may be a new folder inside MODEL, as in the Hub's repositories.

    Batch and length are dynamic. A model that generates text takes input_ids, attention_mask, position_ids and
    past_key_values.i.key and .value, of which the first call gives none (length 0), and returns logits and
    present.i.key and .value, which are the next call's past. With --no-cache it reads whole texts.

    The graph is compared with PyTorch in onnxruntime at several batch sizes and lengths, padded and step by step, on
    --text, by default Python's standard library, or on --images, by default noise; outside the tolerance nothing is
    written and the exit code is 1. See `ckpt-prune validate`.

    Fused graphs (--optimize) have operators of onnxruntime alone. One for cuda is meant for its CUDA provider.

    This loads the WHOLE model, and once more to compare.

    \b
      ckpt-prune export OUT -o OUT/onnx --text held_out.txt
      ckpt-prune export VIT -o vit-onnx --images DIR
      ckpt-prune export OUT -o onnx-fp16 --dtype fp16 --optimize cuda --provider cuda
    """
    from ckpt_prune.checkpoint.staging import refuse_inside
    from ckpt_prune.cli.exporting import write_graph
    from ckpt_prune.cli.proof import proof_samples
    from ckpt_prune.containers.opening import open_checkpoint
    from ckpt_prune.exporting.folder import GraphWriter
    from ckpt_prune.exporting.session import provider_for

    settings = GraphSettings(**{name: options[name] for name in GraphSettings.model_fields})
    source = open_checkpoint(model, trust=trust)
    refuse_inside(out, [options["images"], options["labels"], *options["text"]])
    writer = GraphWriter(source, out, settings, overwrite=overwrite)
    samples = None
    if proof:
        asked = ProofOptions(**{name: options[name] for name in ProofOptions.model_fields})
        samples = proof_samples(source.path, writer.task, asked, trust=trust)
    outcome = write_graph(
        writer,
        samples,
        provider=provider or provider_for(settings.optimize),
        tolerance=settings.tolerance,
        trust=trust,
    )
    if as_json:
        echo_json(outcome.json())
    else:
        for line in outcome.lines():
            click.echo(line)
    click.get_current_context().exit(0 if outcome.passed else 1)
