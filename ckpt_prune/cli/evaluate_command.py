"""`ckpt-prune evaluate`."""

from typing import Any

import click

from ckpt_prune.api.commands import evaluate
from ckpt_prune.cli.command import Command
from ckpt_prune.show.terminal import print_table


def result_text(result: Any) -> str:
    return "\n\n".join(part if isinstance(part, str) else print_table(part) for part in result.paragraphs())


def _show(result: Any, _options: dict[str, Any]) -> None:
    click.echo(result_text(result))


command = Command(
    evaluate,
    _show,
    examples=[
        "evaluate OUT --against MODEL --text held_out.txt --window 2048",
        "evaluate OUT --against VIT --images photos --labels labels.csv",
        "evaluate OUT --against MODEL --tasks arc_easy.jsonl,piqa.jsonl",
        "evaluate OUT --against MODEL --tasks glue:sst2",
        'evaluate OUT --against MODEL --generate "The capital of France is"',
    ],
)
