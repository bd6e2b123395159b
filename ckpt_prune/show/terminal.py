"""Print sections as plain text."""

from collections.abc import Iterator, Sequence

from ckpt_prune.show.section import Section, Table


def section_lines(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the lines of sections for a terminal, without explanations, figures and details."""
    for section in sections:
        lines = [section.drawing] if section.drawing else []
        for table in section.tables:
            lines += print_table(table).splitlines()
        lines += section.sentences
        if lines:
            yield section.title
            yield from (f"  {line}" for line in lines)


def print_table(table: Table) -> str:
    """Return a table with columns of equal width: those of words to the left, the others to the right."""
    lines = [table.columns, *table.rows] if any(table.columns) else table.rows
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < table.words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
