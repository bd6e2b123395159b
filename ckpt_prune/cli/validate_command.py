"""`ckpt-prune validate`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.validate import validate
from ckpt_prune.cli.command import Command

if TYPE_CHECKING:
    from ckpt_prune.onnx.records import Validations
    from ckpt_prune.runtimes.comparison import Proof


def _show(validations: "Validations | Proof", _options: dict[str, Any]) -> None:
    from ckpt_prune.cli.proof import proof_lines
    from ckpt_prune.onnx.records import Validations

    click.echo("\n".join(proof_lines(validations) if isinstance(validations, Validations) else validations.lines()))


command = Command(
    validate,
    _show,
    examples=[
        "validate OUT/onnx --text held_out.txt",
        "validate OUT-onnx --against OUT --images photos --labels labels.csv",
        "validate out.gguf --runtime llama.cpp --against OUT --text held_out.txt",
        "validate OUT --runtime mlx --text held_out.txt",
    ],
    data=lambda validations: validations.model_dump(),
)
