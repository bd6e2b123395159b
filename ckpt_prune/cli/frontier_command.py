"""`ckpt-prune frontier`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import frontier
from ckpt_prune.cli.command import Command
from ckpt_prune.show.terminal import print_table

if TYPE_CHECKING:
    from ckpt_prune.runner.frontier.record import Frontier


def _show(found: "Frontier", _options: dict[str, Any]) -> None:
    click.echo(print_table(found.table()))
    click.echo("\n".join(found.lines()))
    click.echo(f"written to {found.folder}")


command = Command(
    frontier,
    _show,
    examples=[
        "frontier MODEL --text wikitext2 --held-out wikitext2 --target-bytes 75MB -o OUT",
        "frontier MODEL --text wikitext2 --held-out wikitext2 --max-loss 2% -o OUT",
    ],
)
