"""`ckpt-prune demo`."""

from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt_prune.api.function import takes
from ckpt_prune.cli.command import Command, table_of
from ckpt_prune.options.commands import DemoOptions

if TYPE_CHECKING:
    from ckpt_prune.demo.run import DemoRow


@takes(DemoOptions)
def demo(options: DemoOptions) -> "list[DemoRow]":
    """Prune the packaged 3M-parameter Llama by Wanda-sp, FLAP, RCPU, best-uniform and best at 20 and 30 %.

    Each result is verified and measured. Calibration and held-out text are this Python's own standard library; the
    model was trained on the calibration side only. This takes some four minutes of CPU time, most of them for
    best-uniform and best, and no network.
    """
    from ckpt_prune.checkpoint.scratch import scratch_folder
    from ckpt_prune.demo import run
    from ckpt_prune.parallel.devices import resolve_device

    target = resolve_device(options.device)
    with nullcontext(options.output) if options.output else scratch_folder() as folder:
        return run.run(folder, target, options.recipe or run.RECIPES)


def _data(rows: "list[DemoRow]") -> dict[str, Any]:
    from ckpt_prune.demo.run import EVALUATION_WINDOWS, WINDOW

    return {"window": WINDOW, "windows": EVALUATION_WINDOWS, "rows": [asdict(row) for row in rows]}


def _show(rows: "list[DemoRow]", options: dict[str, Any]) -> None:
    from ckpt_prune.common.formatting import human_bytes
    from ckpt_prune.demo.run import CALIBRATION_WINDOWS, EVALUATION_WINDOWS, WINDOW

    cells = [
        {
            "recipe": row.model,
            "ratio": f"{row.ratio:.0%}",
            "parameters": f"{row.parameters:,}",
            "bytes": human_bytes(row.bytes),
            "perplexity": f"{row.perplexity:.2f}",
            "stored as": row.container,
            "pruning": f"{row.seconds:.1f} s",
        }
        for row in rows
    ]
    click.echo(table_of(cells))
    click.echo(
        f"\nperplexity: window {WINDOW}, {EVALUATION_WINDOWS} windows of standard-library modules that neither "
        f"training nor calibration saw; calibrated on {CALIBRATION_WINDOWS} windows"
    )
    if "output" in options:
        click.echo(f"the pruned checkpoints are in {options['output']}")
    click.echo("\nnext, a model of your own (a folder or a Hub id), on texts of your own:")
    click.echo("  ckpt-prune prune MODEL --ratio 0.2 --text calib.txt -o OUT")
    click.echo("  ckpt-prune evaluate OUT --against MODEL --text held_out.txt --window 2048")


command = Command(demo, _show, examples=["demo", "demo --recipe magnitude --recipe ridge -o pruned"], data=_data)
