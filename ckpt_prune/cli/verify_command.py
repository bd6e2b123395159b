"""`ckpt-prune verify`."""

from typing import Any

import click

from ckpt_prune.api.verify import Verification, verify
from ckpt_prune.cli.command import Command, table_of


def _show(verification: Verification, _options: dict[str, Any]) -> None:
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
