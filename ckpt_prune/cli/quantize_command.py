"""`ckpt-prune quantize`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import quantize
from ckpt_prune.cli.command import Command
from ckpt_prune.cli.evaluate_command import result_text
from ckpt_prune.show.section import Table
from ckpt_prune.show.terminal import print_table

if TYPE_CHECKING:
    from ckpt_prune.gguf.export import ExportedGguf
    from ckpt_prune.runner.quantize import QuantizedModel


def _show(quantized: "QuantizedModel | ExportedGguf", _options: dict[str, Any]) -> None:
    from ckpt_prune.common.formatting import human_bytes, plural
    from ckpt_prune.runner.quantize import QuantizedModel

    if not isinstance(quantized, QuantizedModel):
        click.echo("\n".join(quantized.lines()))
        return
    record = quantized.record
    errors = [weight.error or 0.0 for weight in record.weights]
    worst = max(record.weights, key=lambda weight: weight.error or 0.0)
    size = ["bytes", human_bytes(record.before), human_bytes(record.after), f"{record.after / record.before:.1%}"]
    click.echo(print_table(Table(["", "before", "after", "share"], [size])))
    click.echo(f"{plural(len(errors), 'weight')} as {record.words}")
    click.echo(
        f"rounding changed {sum(errors) / len(errors):.3%} of a weight's energy on average, {max(errors):.3%} of "
        f"{worst.weight}"
    )
    click.echo(f"written to {quantized.path}")
    for result in quantized.evaluations:
        click.echo(result_text(result))


command = Command(
    quantize,
    _show,
    examples=[
        "quantize OUT --text wikitext2 -o OUT4 --format int4",
        "quantize MODEL -o OUT8 --format int8 --group-size channel",
        "quantize OUT --format gguf --type q4_k_m --text wikitext2 -o out.gguf",
    ],
)
