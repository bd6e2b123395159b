"""`ckpt-prune demo`."""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import click

from ckpt_prune.cli.options import device_option, echo_json, json_option, table


@click.command("demo")
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), help="Keep the pruned checkpoints in this new folder."
)
@device_option
@json_option
def command(out: Path | None, device: str, as_json: bool) -> None:
    """Prune the packaged 3M-parameter Llama by Wanda-sp, FLAP, RCPU, best-uniform and best at 20 and 30 %.

    Each result is verified and measured. Calibration and held-out text are this Python's own standard library; the
    model was trained on the calibration side only. Some four minutes of CPU time, most of them for best-uniform and
    best; no network.
    """
    from ckpt_prune.checkpoint.scratch import scratch_folder
    from ckpt_prune.common.formatting import human_bytes
    from ckpt_prune.demo import run as demo
    from ckpt_prune.parallel.devices import resolve_device

    target = resolve_device(device)
    with nullcontext(out) if out else scratch_folder() as folder:
        rows = demo.run(folder, target)
    if as_json:
        echo_json({"window": demo.WINDOW, "windows": demo.EVALUATION_WINDOWS, "rows": [asdict(row) for row in rows]})
        return
    cells = [
        [
            row.model,
            f"{row.ratio:.0%}",
            f"{row.parameters:,}",
            human_bytes(row.bytes),
            f"{row.perplexity:.2f}",
            row.container,
            f"{row.seconds:.1f} s",
        ]
        for row in rows
    ]
    click.echo(table(["recipe", "ratio", "parameters", "bytes", "perplexity", "stored as", "pruning"], cells))
    click.echo(
        f"\nperplexity: window {demo.WINDOW}, {demo.EVALUATION_WINDOWS} windows of standard-library modules that "
        f"neither training nor calibration saw; calibrated on {demo.CALIBRATION_WINDOWS} windows"
    )
    if out:
        click.echo(f"the pruned checkpoints are in {out}")
