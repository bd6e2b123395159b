"""`ckpt-prune report`."""

from pathlib import Path
from typing import Any

import click

from ckpt_prune.api.function import takes
from ckpt_prune.cli.command import Command
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.options.commands import ReportOptions


@takes(ReportOptions)
def report(options: ReportOptions) -> Path:
    """Draw what pruning cost, block by block: one HTML file, complete in itself, that opens in any browser.

    The plots show what was measured: errors before and after compensation, on held-out data and at best; how much the
    kept units can predict; ranks and activity of the inputs; hidden states before and after recovery.
    """
    from ckpt_prune.checkpoint.staging import write_atomically
    from ckpt_prune.runner.sections import titled_sections
    from ckpt_prune.show.html import check_page, print_page
    from ckpt_prune.stages.report import read_report_or_plan

    source = options.source
    title, sections = titled_sections(read_report_or_plan(source))
    folder = source if source.is_dir() else source.parent if source.name == REPORT else None
    out = _default_page(source, folder) if options.output is None else options.output
    if folder is not None and folder.resolve() in out.resolve().parents:
        raise UserError(f"{out} is inside {folder}, a checkpoint: choose a place outside it")
    check_page(out, options.overwrite)
    write_atomically(out, print_page(title, sections))
    return out


def _default_page(source: Path, folder: Path | None) -> Path:
    """Return a place next to the folder or plan, never in the folder."""
    if folder is None:
        return source.with_name(f"{source.stem}.report.html")
    if folder.name in ("", ".."):
        folder = folder.resolve()
    return folder.with_name(f"{folder.name}.report.html")


def _show(page: Path, _options: dict[str, Any]) -> None:
    click.echo(f"report written to {page}")


command = Command(report, _show, examples=["report OUT", "report plan.json -o plan.html"], data=None)
