"""`ckpt-prune export`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import export
from ckpt_prune.cli.command import Command

if TYPE_CHECKING:
    from ckpt_prune.gguf.export import ExportedGguf
    from ckpt_prune.onnx.export import Exported


def lines_of(exported: "Exported | ExportedGguf") -> list[str]:
    from ckpt_prune.cli.proof import exported_lines
    from ckpt_prune.onnx.export import Exported

    return exported_lines(exported) if isinstance(exported, Exported) else exported.lines()


def _show(exported: "Exported | ExportedGguf", _options: dict[str, Any]) -> None:
    click.echo("\n".join(lines_of(exported)))


command = Command(
    export,
    _show,
    examples=[
        "export OUT -o OUT/onnx --text held_out.txt",
        "export VIT -o vit-onnx --images photos --dtype fp32 --dtype int8",
        "export OUT -o OUT/onnx --dtype int4 --rounding gptq --text held_out.txt --dense MODEL",
        "export OUT --format gguf --dtype q4_k_m -o out.gguf --text held_out.txt",
        "export OUT -o onnx-fp16 --dtype fp16 --optimize cuda --provider cuda",
    ],
)
