"""`ckpt-prune report`."""

import os
from pathlib import Path

import click

from ckpt_prune.cli.options import overwrite_option


@click.command("report")
@click.argument("source", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", "out", type=click.Path(path_type=Path), help="HTML file to write. [default: OUT.report.html]"
)
@overwrite_option
def command(source: Path, out: Path | None, overwrite: bool) -> None:
    """Show what pruning cost, block by block: one HTML file, complete in itself, that opens in any browser.

    OUT is what `ckpt-prune prune` or `recover` wrote, or a plan file. The plots show what was measured: errors before
    and after compensation, on held-out data and at best; how much the kept units can predict; ranks and activity of
    the inputs; hidden states before and after recovery.

    \b
      ckpt-prune report OUT
      ckpt-prune report plan.json -o plan.html
    """
    from ckpt_prune.checkpoint.staging import write_whole
    from ckpt_prune.reporting.document import read_document
    from ckpt_prune.reporting.page import page

    document = read_document(source)
    target = _default(source) if out is None else out
    _check_place(source, target, overwrite)
    write_whole(target, page(document))
    click.echo(f"report written to {target}")


def _folder(source: Path) -> Path | None:
    """The output folder that is reported, by whichever name; None for a plan."""
    from ckpt_prune.filenames import REPORT

    if source.is_dir():
        return source
    return source.parent if source.name == REPORT else None


def _default(source: Path) -> Path:
    """Beside the folder, never in it; for a plan beside the plan."""
    folder = _folder(source)
    if folder is None:
        return source.with_name(f"{source.stem}.report.html")
    if folder.name in ("", ".."):
        folder = folder.resolve()
    return folder.with_name(f"{folder.name}.report.html")


def _check_place(source: Path, out: Path, overwrite: bool) -> None:
    """Refuse a place for the page; --overwrite replaces a page of this tool and nothing else."""
    from ckpt_prune.errors import UserError
    from ckpt_prune.reporting.page import MARKER

    folder = _folder(source)
    if folder is not None and folder.resolve() in out.resolve().parents:
        raise UserError(f"{out} is inside {folder}, a checkpoint: choose a place outside it")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.absolute().parent} does not exist")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UserError(f"{out} exists: choose another name or say --overwrite")
    if not out.is_file() or MARKER.encode() not in out.read_bytes():
        raise UserError(f"{out} exists and is not a report: it is not overwritten")
