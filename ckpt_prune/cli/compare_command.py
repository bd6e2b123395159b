"""`ckpt-prune compare`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.compare import compare
from ckpt_prune.cli.command import Command, table

if TYPE_CHECKING:
    from ckpt_prune.evaluation.block_comparison import Comparison


def _show(comparison: "Comparison", options: dict[str, Any]) -> None:
    from ckpt_prune.reporting.comparison import columns, rows, verdict

    click.echo(table(["block", *(name for name, _ in columns(comparison))], rows(comparison)))
    click.echo(f"\n{verdict(comparison)}")
    if "plot" in options:
        click.echo(f"drawn in {options['plot']}")


command = Command(
    compare,
    _show,
    examples=[
        "compare MODEL OUT --text held_out.txt --samples 32 --window 512",
        "compare VIT OUT --images photos --lens --plot compared.html",
    ],
)
