"""`ckpt-prune report`."""

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
    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.reporting.document import read_document
    from ckpt_prune.reporting.page import page

    document = read_document(source)
    target = _default(source) if out is None else out
    _check_place(source, target, overwrite)
    write_atomically(target, page(document))
    click.echo(f"report written to {target}")


def _folder(source: Path) -> Path | None:
    """The output folder that is reported, by whichever name; None for a plan."""
    from ckpt_prune.common.filenames import REPORT

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
    """Refuse a place for the page."""
    from ckpt_prune.common.errors import UserError
    from ckpt_prune.reporting.place import check_page

    folder = _folder(source)
    if folder is not None and folder.resolve() in out.resolve().parents:
        raise UserError(f"{out} is inside {folder}, a checkpoint: choose a place outside it")
    check_page(out, overwrite)
