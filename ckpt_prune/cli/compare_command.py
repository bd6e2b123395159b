"""`ckpt-prune compare`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import compare
from ckpt_prune.cli.command import Command

if TYPE_CHECKING:
    from ckpt_prune.evaluation.block_comparison import Comparison


def _show(comparison: "Comparison", options: dict[str, Any]) -> None:
    from ckpt_prune.evaluation.comparison_section import show_comparison
    from ckpt_prune.show.terminal import print_table

    section = show_comparison(comparison)
    click.echo(print_table(section.tables[0]))
    click.echo(f"\n{section.sentences[0]}")
    if "plot" in options:
        click.echo(f"drawn in {options['plot']}")


command = Command(
    compare,
    _show,
    examples=[
        "compare MODEL OUT --text held_out.txt --samples 32 --window 512",
        "compare VIT OUT --images photos --plot compared.html",
    ],
)
