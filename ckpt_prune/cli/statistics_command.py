"""`ckpt-prune statistics`."""

from pathlib import Path

import click

from ckpt_prune.cli.options import echo_json, json_option, overwrite_option

FINGERPRINTS = {
    "model": "of the checkpoint it was measured on",
    "tokenizer": "of its tokenizer or image processor",
    "data": "of the samples, text by text",
    "digest": "of this folder",
}
"""What of a summary is a fingerprint, and of what."""
_FOLDER = click.Path(path_type=Path)


@click.group("statistics")
def command() -> None:
    """Show or add statistics folders."""


@command.command("show")
@click.argument("folder", type=_FOLDER)
@json_option
def show(folder: Path, as_json: bool) -> None:
    """Say what a statistics FOLDER was measured on and what it holds."""
    from ckpt_prune.common.formatting import human_bytes
    from ckpt_prune.measure.statistics.folder import Statistics

    summary = Statistics(folder).summary()
    if as_json:
        echo_json(summary)
        return
    for key, value in summary.items():
        if value == {}:
            continue
        shown = human_bytes(value) if key == "bytes" else value
        if key in FINGERPRINTS and value:
            # What they are for is to be compared, by which a beginning is enough.
            of = [value] if isinstance(value, str) else value
            shown = f"{FINGERPRINTS[key]}, sha256 {', '.join(each[:12] for each in of)}…"
            click.echo(f"{key:<14} {shown}")
            continue
        if key in ("predicted", "effects"):
            shown = f"of {len(value)} sites (--json has them)"
        elif key == "stream":
            shown = f"of {summary['blocks']} blocks (--json has it)"
        elif key == "spaces":
            shown = f"of {', '.join(value)} (--json has them)"
        elif isinstance(value, list):
            shown = ", ".join(map(str, value))
        elif isinstance(value, dict):
            shown = ", ".join(
                f"{k} ({' x '.join(map(str, v if isinstance(v, list) else [v]))})" for k, v in value.items()
            )
        click.echo(f"{key:<14} {shown}")


@command.command("add")
@click.argument("folders", metavar="A B...", type=_FOLDER, nargs=-1, required=True)
@click.option("-o", "--output", "out", type=_FOLDER, required=True, help="Statistics folder to write.")
@overwrite_option
def add_command(folders: tuple[Path, ...], out: Path, overwrite: bool) -> None:
    """Write the sum of statistics folders A, B and more: the same model on more text, or shards of one text.

    Samples that two of them have seen are refused: they would count twice.
    """
    from ckpt_prune.measure.statistics.folder import Statistics
    from ckpt_prune.measure.statistics.measurement import add_statistics

    statistics = add_statistics([Statistics(each) for each in folders], out, overwrite=overwrite)
    what = "images" if statistics.index.modality == "image" else "windows"
    click.echo(f"{out}: {statistics.index.samples} {what}, {statistics.index.tokens} tokens")
