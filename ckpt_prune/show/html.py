"""Print sections as one HTML page, complete in itself: nothing to load, nothing to run."""

import os
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.common.errors import UserError
from ckpt_prune.show.charts import draw, draw_bar, draw_heat_map, draw_legend, escape, has_hidden
from ckpt_prune.show.section import Figure, HeatMap, Section, Table

MARKER = '<meta name="generator" content="ckpt-prune report">'
"""A page of this tool is known by it."""
# The browser itself then refuses whatever a page like this has no business loading or running.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_HIDDEN = " Hollow marks at the foot: zero, or too small for this scale."


def print_page(title: str, sections: Sequence[Section]) -> str:
    """Return the page, the same for the same input."""
    style = resources.files("ckpt_prune.show").joinpath("style.css").read_text(encoding="utf-8")
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        MARKER,
        f"<title>{escape(title)}</title>",
        f"<style>\n{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        *(line for section in sections for line in section_lines(section)),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def section_lines(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    if section.drawing:
        yield f"<pre>{escape(section.drawing)}</pre>"
    yield from map(_table, section.tables)
    yield from (f"<p>{escape(sentence)}</p>" for sentence in (*section.sentences, *section.explanations))
    if figures := "\n".join(filter(None, map(_figure, section.figures))):
        yield f'<div class="plots">\n{figures}\n</div>'
    yield from (
        f"<details>\n<summary>{escape(table.title)}</summary>\n{_table(table)}\n</details>" for table in section.details
    )
    yield "</section>"


def _figure(figure: Figure | HeatMap) -> str:
    note, legend = figure.note, ""
    if isinstance(figure, HeatMap):
        drawing = draw_heat_map(figure)
    else:
        drawing = draw(figure)
        note += _HIDDEN if has_hidden(figure) else ""
        names = "".join(f"<li>{draw_legend(n)}{escape(line.name)}</li>" for n, line in enumerate(figure.lines))
        if [line.name for line in figure.lines] != [figure.unit]:
            legend = f'<ul class="legend">{names}</ul>\n'
    caption = f"<figcaption><h3>{escape(figure.title)}</h3><p>{escape(note)}</p></figcaption>"
    return f"<figure>\n{caption}\n{legend}{drawing}\n</figure>" if drawing else ""


def _table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="left"' if number < table.words else "" for number in range(len(cells))]
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(f"<{tag}{kind}{scope}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    bars = [""] * len(table.rows)
    if table.bars:
        shares = [_percentage(row[-1]) for row in table.rows]
        bars = [f"<td>{draw_bar(share, max(100.0, *shares))}</td>" for share in shares]
    corner = "<th></th>" if table.bars else ""
    head = f"<thead><tr>{line('th', table.columns)}{corner}</tr></thead>\n" if any(table.columns) else ""
    body = "\n".join(f"<tr>{line('td', row)}{bar}</tr>" for row, bar in zip(table.rows, bars, strict=True))
    # A table of words alone is read, not compared: its lines break.
    kind = ' class="facts"' if table.words == len(table.columns) else ""
    return f'<div class="scroll">\n<table{kind}>\n{head}<tbody>\n{body}\n</tbody>\n</table>\n</div>'


def _percentage(cell: str) -> float:
    return float(cell.removesuffix("%")) if cell.endswith("%") else 0.0


def check_page(out: Path, overwrite: bool) -> None:
    """Refuse a place for a page; `overwrite` replaces a page of this tool and nothing else."""
    check_place(out)
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UserError(f"{out} exists: choose another name or say --overwrite")
    if not out.is_file() or MARKER.encode() not in out.read_bytes():
        raise UserError(f"{out} exists and is not a report: it is not overwritten")
