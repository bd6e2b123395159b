"""The store of finished blocks, written by this run or by the interrupted one that it continues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.job.kept_bytes import KeptBytes
from ckpt_prune.job.layout import OUTER, Layout
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.step import Tensors
from ckpt_prune.model.model import BlockWidths, Model
from ckpt_prune.parallel.group import process_group

REST, OUTSIDE = "rest", "outer"
"""Entries of the journal: the tensors outside the blocks, and those outside the part of a composite."""


@dataclass(frozen=True)
class BlockStore:
    """The blocks of an output that grows in the staging folder.

    Attributes:
        writer: of the output; None in a process that does not write.
        layout: of the output.
        widths: units that its blocks have of the spaces that were pruned; None if none was.
        kept: weights that it stores as its source does; None if all are plain.
    """

    writer: CheckpointWriter | None
    layout: Layout
    widths: Sequence[BlockWidths] | None = None
    kept: KeptBytes | None = None

    def has(self, block: int) -> bool:
        """Return True if the block is on disk."""
        return process_group().once(lambda: self.writer is not None and _entry(block) in self.writer.done)

    def read(self, model: Model, block: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a finished block's tensors, as they were when it was written, and the notes of its steps."""
        return process_group().once(lambda: self._read(model, block))

    def _read(self, model: Model, block: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        assert self.writer is not None
        tensors = self.writer.read(self.names(model, block))
        tensors = tensors if self.kept is None else self.kept.unpack(tensors)
        if self.widths is not None:
            tensors = model.note_widths(block, tensors, self.widths[block])
        return tensors, self.notes(block)

    def notes(self, block: int) -> dict[str, Any]:
        assert self.writer is not None
        notes: dict[str, Any] = self.writer.notes[_entry(block)]
        return notes

    def write(self, model: Model, block: int, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Write a block. When this returns, it is on disk and in the journal."""
        if self.writer is None:
            return
        tensors = tensors if self.kept is None else self.kept.pack(tensors)
        for name in self.names(model, block):
            self.writer.write(name, tensors[name])
        self.writer.commit(_entry(block), note=notes)

    def write_rest(self, view: ModelView) -> None:
        """Write the tensors outside the blocks: embeddings, the final norm, heads."""
        if self.writer is None or REST in self.writer.done:
            return
        for tensors in self.layout.values():
            for name in view.model.outside(tensors):
                self.writer.write(name, view.read([name])[name])
        self.writer.commit(REST)

    def write_outside(self, source: Checkpoint) -> None:
        """Copy the tensors outside the source if that is a part of a composite, byte for byte."""
        if self.writer is None or source.within is None or OUTSIDE in self.writer.done:
            return
        for name in source.within.rest:
            self.writer.write(OUTER + name, source.within.whole.read([name])[name])
        self.writer.commit(OUTSIDE)

    def names(self, model: Model, block: int) -> list[str]:
        return [name for tensors in self.layout.values() for name in model.inside(block, tensors)]


def _entry(block: int) -> str:
    return f"block {block}"
