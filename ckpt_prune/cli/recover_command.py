"""`ckpt-prune recover`."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.commands import recover
from ckpt_prune.cli.command import Command
from ckpt_prune.cli.evaluate_command import result_text

if TYPE_CHECKING:
    from ckpt_prune.runner.recover import Recovered


def _show(recovered: "Recovered", options: dict[str, Any]) -> None:
    from ckpt_prune.show.terminal import print_table, section_lines
    from ckpt_prune.stages.recovery.show import sections

    shown_sections = sections(recovered.report)
    if options.get("method", "laco") == "laco":
        click.echo(print_table(shown_sections[0].details[0]))
    for line in (*section_lines(shown_sections), f"written to {recovered.path}"):
        click.echo(line)
    if recovered.evaluation is not None:
        click.echo(result_text(recovered.evaluation))


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
