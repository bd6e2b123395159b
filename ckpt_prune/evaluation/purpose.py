"""The purpose of a model, and refusals of models that cannot be measured as asked, or compared."""

from pathlib import Path

from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import image_classes
from ckpt_prune.evaluation.whole_model import purpose_of_folder
from ckpt_prune.model.purposes import WITHOUT_HEAD, Purpose

LABELLED = ("text-classification", "token-classification", "question-answering", "text-ranking")
"""Purposes whose figures would need labels: such models are compared with another one."""


def check_folder(folder: Path) -> None:
    """Refuse a folder that has no config.json, or is what an unfinished run left."""
    if not (folder / "config.json").is_file():
        refuse_unfinished(folder)
        raise UserError(f"{folder} has no config.json; give a checkpoint folder as published on the Hub")


def is_vision(folder: Path) -> bool:
    """Return whether a folder holds a model of images; a config that cannot be read is for the loader to refuse."""
    try:
        return image_classes.is_vision(read_json_object(folder / "config.json"))
    except UserError:
        return False


def check_same_kind(folder: Path, reference: Path | None) -> None:
    """Refuse a reference that is for something else than the model, or either if this package has no use for it."""
    if reference is None:
        return
    ours, theirs = purpose_of_folder(folder), purpose_of_folder(reference)
    if ours != theirs and not {ours, theirs} <= WITHOUT_HEAD:
        is_for = [f"{path} is for {what or 'another task'}" for path, what in ((folder, ours), (reference, theirs))]
        raise UserError(f"{' and '.join(is_for)}: what they give cannot be compared")


def has_other_tokenizer(folder: Path, reference: Path | None) -> bool:
    """Return whether a reference reads a text differently."""
    return reference is not None and tokenizer_fingerprint(folder) != tokenizer_fingerprint(reference)


def check_same_tokenizer(folder: Path, reference: Path | None) -> None:
    """Refuse a reference that reads a text differently."""
    if has_other_tokenizer(folder, reference):
        raise UserError(f"{folder} and {reference} have different tokenizers: their figures cannot be compared")


def check_generates(folder: Path, *others: Purpose) -> None:
    """Refuse a model that does not generate text and is for none of the other purposes either."""
    if purpose_of_folder(folder) not in ("text-generation", *others):
        raise UserError(f"{folder} does not generate text: --tasks and --generate are for causal language models")


def reference_of_base(folder: Path, reference: Path | None) -> Path:
    """Return the reference that a base model needs. Raises UserError if there is none."""
    if reference is None:
        raise UserError(f"{folder} has no head, so there is nothing to score: compare it with --against MODEL2")
    return reference
