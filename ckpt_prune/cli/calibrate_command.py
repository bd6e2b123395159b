"""`ckpt-prune calibrate`."""

from typing import Any

import click

from ckpt_prune.api.commands import calibrate
from ckpt_prune.cli.command import Command


def _show(statistics: Any, _options: dict[str, Any]) -> None:
    from ckpt_prune.common.formatting import human_bytes
    from ckpt_prune.runner.calibrate import ForeseenStatistics

    summary = statistics.summary()
    what = "images" if summary["modality"] == "image" else "windows"
    measured = f"{summary['samples']} {what} of {summary['window']} tokens, {summary['blocks']} blocks"
    collected = f"{'+'.join(summary['collect'])}, folds {summary['folds']}"
    if not isinstance(statistics, ForeseenStatistics):
        click.echo(f"{statistics.folder}: {measured}, {collected}, {human_bytes(summary['bytes'])}")
        return
    click.echo(f"to be measured: {measured}, {summary['tokens']:,} tokens in all")
    click.echo(f"to be collected: {collected}")
    click.echo(f"{statistics.folder} will take {human_bytes(summary['bytes'])}")
    click.echo(f"it takes {statistics.estimate.line}")
    click.echo("everything checked, nothing written")


command = Command(
    calibrate,
    _show,
    examples=[
        "calibrate MODEL --text calib.txt --samples 128 --window 2048 -o STATS",
        "calibrate VIT --images photos --samples 4000 -o STATS",
    ],
    data=lambda statistics: statistics.summary(),
)
