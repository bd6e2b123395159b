"""`ckpt-prune verify`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import verify
from ckpt_prune.cli.command import Command, table_of

if TYPE_CHECKING:
    from ckpt_prune.runner.verify import Verification


def _show(verification: "Verification", _options: dict[str, Any]) -> None:
    words = {True: "ok", False: "FAILED", None: "-"}
    click.echo(table_of([{"check": check.name, "result": words[check.passed]} for check in verification.checks]))
    click.echo()
    for check in verification.checks:
        click.echo(f"{check.name}: {check.detail}")


command = Command(
    verify,
    _show,
    examples=[
        "verify OUT",
        "verify OUT --against MODEL --statistics STATS",
    ],
)
