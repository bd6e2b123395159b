"""Sections of the stage `vocabulary`."""

from ckpt_prune.show.section import MISSING, Section, Table
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.vocabulary.records import TextCost, VocabularyRecord


def sections(report: Report) -> list[Section]:
    """Say how many tokens stay, and what that costs by text."""
    record = report.vocabulary
    if record is None:
        return []
    sentences = [f"{tokens_line(record)}. Their rows of embedding and head are as they were, bit for bit."]
    tables = []
    if record.texts:
        columns = ("text, its held-out part", "tokens more", "bits per byte before", "after", "more", "predicted")
        tables = [Table(columns, [_row(text) for text in record.texts])]
    explanations = [
        "A token that is gone is written by smaller ones. Bits per byte compare models whose tokens differ: perplexity "
        "of a token does not."
    ]
    return [Section("Vocabulary", sentences, explanations if tables else [], tables=tables)]


def _row(text: TextCost) -> tuple[str, ...]:
    figures = [_figure(text.bits_before), _figure(text.bits_after), _share(text.loss), _share(text.predicted)]
    return (text.name, f"{text.growth:.2%}", *figures)


def _figure(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:+.2%}"


def tokens_line(record: VocabularyRecord) -> str:
    """Say how many tokens stay."""
    share = record.rows_kept / record.rows
    return f"{record.rows_kept:,} of {record.rows:,} tokens stay ({share:.1%})"


def cost_lines(record: VocabularyRecord) -> list[str]:
    """Say what fewer tokens cost, a line for each text."""
    return [_cost_line(text) for text in record.texts]


def _cost_line(text: TextCost) -> str:
    line = f"{text.name}, its held-out eighth, takes {text.growth:.2%} more tokens"
    if text.loss is None:
        return line
    if not text.windows:
        return f"{line}: nothing of it is read otherwise"
    predicted = "" if text.predicted is None else f", {text.predicted:+.2%} predicted"
    return (
        f"{line} and {text.loss:+.2%} bits per byte ({text.bits_before:.4f} → {text.bits_after:.4f} on "
        f"{text.windows} windows{predicted})"
    )


def kept_rows(report: Report) -> list[int] | None:
    """Return the rows of the dense embedding that stay, ascending; None if all do."""
    return None if report.vocabulary is None else report.vocabulary.kept_rows


def size_axes(report: Report) -> dict[str, int]:
    """Return how many tokens stay, for a table of sizes."""
    return {} if report.vocabulary is None else {"tokens": report.vocabulary.rows_kept}
