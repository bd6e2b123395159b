"""Print sections as Markdown, for the model card."""

from collections.abc import Iterator, Sequence

from ckpt_prune.common.safe_text import as_markdown, escape_controls
from ckpt_prune.show.section import Section


def print_markdown(sections: Sequence[Section]) -> str:
    """Return the sections as Markdown, without figures and details."""
    return "\n".join(line for section in sections for line in section_lines(section))


def section_lines(section: Section) -> Iterator[str]:
    """Yield the lines of one section, and an empty one."""
    yield from (f"## {as_markdown(section.title)}", "")
    if section.drawing:
        yield from ("```", escape_controls(section.drawing), "```", "")
    for table in section.tables:
        dashes = ["---" if number < table.words else "---:" for number in range(len(table.columns))]
        yield from (f"| {' | '.join(map(_cell, table.columns))} |", f"|{'|'.join(dashes)}|")
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in table.rows)
        yield ""
    sentences = [*section.sentences, *section.explanations]
    yield from (f"- {as_markdown(sentence)}" if len(sentences) > 1 else as_markdown(sentence) for sentence in sentences)
    yield from [""] if sentences else []


def _cell(text: str) -> str:
    """Escape a cell, in which nothing stands at the beginning of a line."""
    return as_markdown(f"|{text}").removeprefix("\\|")
