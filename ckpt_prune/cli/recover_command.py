"""`ckpt-prune recover`."""

from typing import Any

import click

from ckpt_prune.api.recover import Recovered, recover
from ckpt_prune.cli.command import Command, table


def _show(recovered: Recovered, options: dict[str, Any]) -> None:
    from ckpt_prune.cli.rendering import LAYER_HEADERS, adapter_lines, layer_rows, recovery_lines

    report = recovered.report
    if report.adapters is not None and options.get("method", "laco") != "laco":
        lines = adapter_lines(report.adapters)
    else:
        lines = [table(LAYER_HEADERS, layer_rows(report.layers)), *recovery_lines(report)]
    for line in (*lines, f"written to {recovered.path}"):
        click.echo(line)


command = Command(
    recover,
    _show,
    examples=[
        "recover PRUNED --dense MODEL --text train.txt -o OUT",
        "recover PRUNED --dense MODEL --text train.txt --only attention --layers 0:8 -o OUT",
        "recover PRUNED --dense MODEL --method scales --text train.txt -o OUT",
        "recover PRUNED --method lora --text train.txt --epochs 2 -o OUT",
        "recover PRUNED --dense VIT --images photos --samples 512 --epochs 5 -o OUT",
    ],
)
