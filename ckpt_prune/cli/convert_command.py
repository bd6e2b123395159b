"""`ckpt-prune convert`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.convert import convert
from ckpt_prune.cli.options import echo_json, json_option, overwrite_option


@click.command("convert")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@overwrite_option
@json_option
def command(as_json: bool, **given: Any) -> None:
    """Write MODEL as the stock class of transformers that computes the same, so that it can be pruned.

    MODEL is a folder or Hub id of timm's plain vit, deit or deit3, as timm published it or in transformers'
    timm_wrapper, or of a masked autoencoder (vit_mae), of which the encoder is kept. The output is a vit, or a deit
    where there is a distillation token. Layer scales are absorbed by the projections before them. What computes
    anything else is refused with the reason.

    \b
      ckpt-prune convert timm/deit3_large_patch16_224.fb_in22k_ft_in1k -o deit3-large
      ckpt-prune prune deit3-large --recipe corp-mlp --images photos -o OUT
    """
    found = convert(**given)
    if as_json:
        echo_json(found.data())
        return
    click.echo(f"{found.output}: {found.model_type}, {found.architecture}, {found.parameters} parameters")
    for note in found.notes:
        click.echo(note)
