"""Which kind of model a folder holds, and what can stand beside it."""

from pathlib import Path

from ckpt_prune.architectures.purposes import WITHOUT_HEAD, Purpose
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation import image_classes as classification
from ckpt_prune.evaluation.whole_model import purpose_of_folder

LABELLED = ("text-classification", "token-classification", "question-answering", "text-ranking")
"""Purposes whose figures would need labels: such models are held against another one."""


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
        return classification.is_vision(read_json_object(folder / "config.json"))
    except UserError:
        return False


def check_same_kind(folder: Path, reference: Path | None) -> None:
    """Refuse a reference that is for something else than what is measured.

    Raises:
        UserError: the purposes differ, or one has none. Whoever compares embeddings says why plain features are none.
    """
    if reference is None:
        return
    ours, theirs = purpose_of_folder(folder), purpose_of_folder(reference)
    if ours != theirs and not {ours, theirs} <= WITHOUT_HEAD:
        is_for = [f"{path} is for {what or 'another task'}" for path, what in ((folder, ours), (reference, theirs))]
        raise UserError(f"{' and '.join(is_for)}: what they give cannot be compared")


def check_generates(folder: Path, *others: Purpose) -> None:
    """Refuse a model that is not there to generate text.

    Args:
        folder: of the model.
        others: purposes that will do, too.

    Raises:
        UserError: it is for something else.
    """
    if purpose_of_folder(folder) not in ("text-generation", *others):
        raise UserError(f"{folder} does not generate text: --tasks and --generate are for causal language models")


def reference_of_base(folder: Path, reference: Path | None) -> Path:
    """The reference that a base model needs.

    Raises:
        UserError: there is none.
    """
    if reference is None:
        raise UserError(f"{folder} has no head, so there is nothing to score: compare it with --against MODEL2")
    return reference
