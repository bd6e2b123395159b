"""`ckpt-prune convert`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import convert
from ckpt_prune.cli.command import Command

if TYPE_CHECKING:
    from ckpt_prune.conversion.stock_checkpoint import Conversion


def _show(conversion: "Conversion", _options: dict[str, Any]) -> None:
    for line in conversion.proof.lines() if conversion.proof else ():
        click.echo(line)
    if not conversion.passed:
        click.echo(f"nothing is written to {conversion.output}; --no-validate leaves the comparison out")
        return
    parameters = f"{conversion.parameters} parameters"
    click.echo(f"{conversion.output}: {conversion.model_type}, {conversion.architecture}, {parameters}")
    for note in conversion.notes:
        click.echo(note)


command = Command(
    convert,
    _show,
    examples=[
        "convert timm/deit3_large_patch16_224.fb_in22k_ft_in1k -o deit3-large",
        "convert facebook/vit-mae-base -o vit-base",
        "convert model-q8_0.gguf -o model",
        "convert lora-adapter -o merged",
    ],
)
