"""`ckpt-prune recover`."""

from typing import Any

import click

from ckpt_prune.api.recover import Recovered, recover
from ckpt_prune.cli.command import Command


def _show(recovered: Recovered, options: dict[str, Any]) -> None:
    from ckpt_prune.show.terminal import print_table, section_lines
    from ckpt_prune.stages.recovery.show import sections

    shown_sections = sections(recovered.report)
    if options.get("method", "laco") == "laco":
        click.echo(print_table(shown_sections[0].details[0]))
    for line in (*section_lines(shown_sections), f"written to {recovered.path}"):
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
