"""Which kind of model a folder holds, and what can stand beside it."""

from pathlib import Path

from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.jsonfile import read_object
from ckpt_prune.errors import UserError
from ckpt_prune.evaluation import classification
from ckpt_prune.evaluation.loading import kind_of, read_config

MASKED = ("AutoModelForMaskedLM", "AutoModelForPreTraining")

LABELLED = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering")
"""Heads whose figures would need labels: they are held against another model's."""


def check_folder(folder: Path) -> None:
    """Refuse what is no checkpoint folder.

    Raises:
        UserError: it has no config.json, or is what an unfinished run left.
    """
    if not (folder / "config.json").is_file():
        refuse_unfinished(folder)
        raise UserError(f"{folder} has no config.json; give a checkpoint folder as published on the Hub")


def is_vision(folder: Path) -> bool:
    """Whether a folder holds a model of images; a config that cannot be read is the loader's to refuse."""
    try:
        return classification.is_vision(read_object(folder / "config.json"))
    except UserError:
        return False


def auto_class_of(folder: Path) -> str:
    """The Auto class of a folder's architecture, or of those that give the same (`kind_of`)."""
    return kind_of(read_config(folder))


def check_same_kind(folder: Path, reference: Path | None) -> None:
    """Refuse a reference that gives something else than what is measured: other predictions, or none.

    Raises:
        UserError: the Auto classes differ, but for the two of masked language models.
    """
    if reference is None:
        return
    ours, theirs = auto_class_of(folder), auto_class_of(reference)
    if ours != theirs and not {ours, theirs} <= set(MASKED):
        raise UserError(f"{folder} loads as {ours}, {reference} as {theirs}: what they give cannot be compared")


def reference_of_base(folder: Path, reference: Path | None) -> Path:
    """The reference that a base model needs.

    Raises:
        UserError: there is none.
    """
    if reference is None:
        raise UserError(f"{folder} has no head, so there is nothing to score: compare it with --against MODEL2")
    return reference
