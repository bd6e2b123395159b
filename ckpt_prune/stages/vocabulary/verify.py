"""Whether an output with fewer tokens has the rows that its report says, and reads text as the dense tokenizer does."""

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Check, Finding, run_check
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.model.model import Model
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.vocabulary.hard_cases import compare_tokenizers
from ckpt_prune.stages.vocabulary.records import VocabularyRecord
from ckpt_prune.stages.vocabulary.smaller_checkpoint import keep_rows, vocabulary_rows


def check_report(report: Report) -> None:
    """Raise ValueError if the record of the rows that stay is damaged."""
    record = report.vocabulary
    if record is not None and len(record.kept_rows) != record.rows_kept:
        raise ValueError("vocabulary.kept has another number of rows than rows_kept says")


def shape_source(dense: Checkpoint, report: Report) -> Checkpoint:
    """Return the dense model with the rows of the tokens that stay."""
    record = report.vocabulary
    return dense if record is None else _smaller(dense, record)


def _smaller(dense: Checkpoint, record: VocabularyRecord) -> Checkpoint:
    model, rows = Model.of(dense), record.kept_rows
    if vocabulary_rows(model) != record.rows or (rows and rows[-1] >= record.rows):
        raise UserError(f"{REPORT} keeps rows of the embedding that the dense model has not")
    return keep_rows(model, None, rows).checkpoint


def checks_against(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> list[Check]:
    """Compare the two tokenizers: special tokens, the chat template, and texts that are hard to write."""
    if (record := report.vocabulary) is None:
        return []

    def compare() -> Finding:
        return compare_tokenizers(load_tokenizer(checkpoint.path), load_tokenizer(dense.path), record.kept_rows)

    return [run_check("tokenizer", compare)]
