"""Two checkpoints of one model, a pruned one and what it was made from, run side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import REPORT
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.text import load_tokenizer, read_text, tokenise_text
from ckpt_prune.measure.streams.kept_blocks import KeptBlocks
from ckpt_prune.model.containers.checking import check_source, check_stock, check_stored
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.containers.remote import RANKS_KEY
from ckpt_prune.model.depth import shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.names import RotationKind
from ckpt_prune.stages.hidden.sliced_checkpoint import SLICING_KEY
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.rotation.learner import RotationSizes, WrittenRotations
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint


def refuse_factored(pruned: Model) -> None:
    """Refuse to train a checkpoint whose linears are products of two."""
    if RANKS_KEY in pruned.checkpoint.config:
        raise UserError(
            f"{pruned.checkpoint.path} has two thin linears in the place of each, which recovery does not train"
        )


def rotated_as(pruned: Model, dense: Model, device: torch.device, report: Report | None) -> RotatedCheckpoint | None:
    """Return the dense model in the basis of the pruned one's hidden states; None where these were not rotated."""
    named = report.rotation.kind if report and report.rotation else None
    if named is None or named == "values":
        return None
    folder = pruned.checkpoint.path
    kinds: dict[str, RotationKind] = {kind: kind for kind in get_args(RotationKind)}
    if named not in kinds:
        raise UserError(f"{folder / REPORT} names an unknown rotation {named!r}: prune again")
    kind = kinds[named]
    rotations = WrittenRotations.of_output(folder, RotationSizes.of(kind, dense))
    return RotatedCheckpoint(dense, kind, rotations, device)


def at_same_depth(pruned: Model, dense: Model, report: Report | None) -> tuple[Model, KeptBlocks | None]:
    """Return the dense model's blocks that a pruned one has, by the numbers that it has them under.

    Returns:
        The dense model, and None, where no block is gone; else its blocks that stay, and how far the whole runs.
    """
    depth = None if report is None else report.depth
    if depth is None or depth.part != "block" or depth.blocks != dense.blocks or len(depth.kept) != pruned.blocks:
        return dense, None
    if depth.kept != sorted(set(depth.kept)) or depth.kept[-1] >= dense.blocks:
        raise UserError(f"{pruned.checkpoint.path / REPORT} keeps blocks that the dense model has not: prune again")
    return shorten_model(dense, depth.kept), KeptBlocks(dense, depth.kept)


def check_one_stream(pruned: Model, why: str) -> None:
    """Refuse an output whose stream changes its basis inside its blocks.

    Args:
        why: the reason, which ends the error message.
    """
    if getattr(pruned.config, SLICING_KEY, None) is not None:
        raise UserError(
            f"{pruned.checkpoint.path} has a residual stream of fewer dimensions, in another basis wherever it is "
            f"read: {why}"
        )


def check_models(pruned: Model, dense: Model, why: str) -> None:
    """Refuse two models of which one cannot have been made from the other.

    Args:
        why: the reason, which ends the error message.
    """
    ours, theirs = pruned.family, dense.family
    here, there = pruned.checkpoint.path, dense.checkpoint.path
    check_stored(pruned.checkpoint, stored_container(pruned.checkpoint).names())
    check_stock(dense, "no other model is held against it")
    check_source(dense)
    check_one_stream(pruned, f"{why}, and there is no dense stream in these bases")
    related = ours.model_type == theirs.model_type or ours.model_type in theirs.stand_ins
    if not related:
        raise UserError(f"{here} is of type {ours.model_type} and {there} of type {theirs.model_type}: {why}")
    for name, what in (("layers", "blocks"), ("hidden", "hidden dimensions")):
        own, other = pruned.dimension(name), dense.dimension(name)
        if own != other:
            raise UserError(f"{here} has {own} {what} and {there} has {other}: {why}, block by block")
    sizes = [getattr(config, "vocab_size", None) for config in (pruned.config, dense.config)]
    if sizes[0] != sizes[1]:
        raise UserError(f"{here} and {there} have vocabularies of {sizes[0]} and {sizes[1]} tokens")


def check_same_reader(pruned: Model, dense: Model, texts: Sequence[Path], *, trust: bool = False) -> None:
    """Refuse two checkpoints that read the same data differently, where the pruned one says how it reads.

    Args:
        dense: whose tokenizer or image processor is used.
        texts: files that a language model is run on.
        trust: run an image processor's own code.
    """
    ours, theirs = pruned.reader_fingerprint, dense.reader_fingerprint
    if ours is None or ours == theirs:
        return
    here, there = pruned.checkpoint.path, dense.checkpoint.path
    if dense.family.modality == "image":
        settings = [load_processor(each, trust_remote_code=trust).to_json_string() for each in (here, there)]
        if settings[0] != settings[1]:
            raise UserError(f"{here} and {there} have different image processors")
        return
    # The files may differ in what does not matter, such as the version that wrote them.
    readers = [load_tokenizer(each) for each in (here, there)]
    text = read_text(texts, readers[1])
    if not torch.equal(*(tokenise_text(each, text) for each in readers)):
        raise UserError(f"{here} and {there} have different tokenizers: they read the text differently")
