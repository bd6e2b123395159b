"""The one walk over blocks: read, let every step act, write, go on. What stands outside the blocks follows.

Several processes walk together. Where blocks follow from one another, all of them take every block; where they do not,
each takes some.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ckpt_prune.architectures.model import BlockWidths, Model
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.parallel.group import ALONE, here, working_in
from ckpt_prune.progress import track
from ckpt_prune.transform.dense import Dense
from ckpt_prune.transform.layout import OUTER, Layout
from ckpt_prune.transform.steps import Step, Tensors

_REST, _OUTER = "rest", "outer"


@dataclass(frozen=True)
class Sink:
    """Where finished blocks go, and where those of an interrupted run are found.

    Args:
        writer: of the output; None in a process that does not write.
        layout: of the output.
        widths: units that its blocks have of the spaces that were pruned; None where nothing is.
    """

    writer: CheckpointWriter | None
    layout: Layout
    widths: Sequence[BlockWidths] | None = None

    def done(self, block: int) -> bool:
        """Whether an interrupted run has written a block."""
        return here().once(lambda: self.writer is not None and _unit(block) in self.writer.done)

    def read(self, model: Model, block: int, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A finished block's tensors, as they were when it was written, and the steps' notes."""
        return here().once(lambda: self._read(model, block, prefix))

    def _read(self, model: Model, block: int, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        assert self.writer is not None
        tensors = self.writer.read(self._names(prefix))
        if self.widths is not None:
            tensors = model.noting(block, tensors, self.widths[block])
        return tensors, self.notes(block)

    def notes(self, block: int) -> dict[str, Any]:
        """The steps' notes of a finished block."""
        assert self.writer is not None
        found: dict[str, Any] = self.writer.notes[_unit(block)]
        return found

    def write(self, block: int, prefix: str, tensors: Tensors, notes: Mapping[str, Any]) -> None:
        """Write a block and note that it is done."""
        if self.writer is None:
            return
        for name in self._names(prefix):
            self.writer.write(name, tensors[name])
        self.writer.commit(_unit(block), note=notes)

    def write_rest(self, dense: Dense) -> None:
        """Write what stands outside the blocks: embeddings, the final norm, heads.

        Args:
            dense: where it is read.
        """
        if self.writer is None or _REST in self.writer.done:
            return
        blocks = tuple(dense.model.family.block.format(block=block) for block in range(dense.model.blocks))
        for tensors in self.layout.values():
            for name in tensors:
                if not name.startswith(blocks):
                    self.writer.write(name, dense.read([name])[name])
        self.writer.commit(_REST)

    def write_outer(self, source: Checkpoint) -> None:
        """Copy what stands outside the source, where that is a part of a composite: byte for byte."""
        if self.writer is None or source.within is None or _OUTER in self.writer.done:
            return
        for name in source.within.rest:
            self.writer.write(OUTER + name, source.within.whole.read([name])[name])
        self.writer.commit(_OUTER)

    def _names(self, prefix: str) -> list[str]:
        return [name for tensors in self.layout.values() for name in tensors if name.startswith(prefix)]


def walk(
    dense: Dense,
    steps: Sequence[Step],
    sink: Sink | None = None,
    *,
    start: Callable[[int], Tensors] | None = None,
    say: str | None = "pruning",
    apart: bool = False,
) -> None:
    """Take every block through the steps and write it, or pass it where an interrupted run has written it.

    Args:
        dense: the dense model, in the basis of the output.
        steps: in order.
        sink: where blocks go; nothing is written without one.
        start: reads the block that the first step sees; the dense model's by default.
        say: what the progress bar says; None where a step shows one.
        apart: whether no block depends on another, so that each of several processes may take some; with a sink only.
    """
    if apart and sink is not None and here().size > 1:
        _walk_apart(dense, steps, sink, say or "")
        return
    blocks = range(dense.model.blocks)
    for block in blocks if say is None else track(blocks, say, total=len(blocks)):
        prefix = dense.model.family.block.format(block=block)
        if sink is not None and sink.done(block):
            written, notes = sink.read(dense.model, block, prefix)
            _pass(dense, steps, block, written, notes, start)
            tensors: Tensors = written
        else:
            whole = dense.block(block)
            tensors = whole if start is None else start(block)
            notes = {}
            for step in steps:
                tensors, notes[step.name] = step.act(block, whole, tensors)
            if sink is not None:
                sink.write(block, prefix, tensors, notes)
        for step in steps:
            step.advance(block, tensors)


def _walk_apart(dense: Dense, steps: Sequence[Step], sink: Sink, say: str) -> None:
    """Let every process take some blocks; the first one writes all, in order."""
    group, prefixes = here(), [dense.model.family.block.format(block=block) for block in range(dense.model.blocks)]
    todo = [block for block in range(len(prefixes)) if not sink.done(block)]

    def pass_done() -> None:
        with working_in(ALONE):
            for block in set(range(len(prefixes))) - set(todo):
                written, notes = sink.read(dense.model, block, prefixes[block])
                _pass(dense, steps, block, written, notes, None)

    def act(block: int) -> tuple[Tensors, dict[str, Any]]:
        notes: dict[str, Any] = {}
        with working_in(ALONE):
            whole = dense.block(block)
            tensors: Tensors = whole
            for step in steps:
                tensors, notes[step.name] = step.act(block, whole, tensors)
        return tensors, notes

    group.at_first(pass_done)
    rounds = [todo[start : start + group.size] for start in range(0, len(todo), group.size)]
    for blocks in track(rounds, say, unit="round"):
        for rank, made in enumerate(group.gather([act(block) for block in blocks[group.rank :][:1]]) or ()):
            for tensors, notes in made:
                if rank != group.rank:
                    for step in steps:
                        step.skip(blocks[rank], {}, {}, tensors, notes[step.name], again=False)
                sink.write(blocks[rank], prefixes[blocks[rank]], tensors, notes)


def _pass(
    dense: Dense,
    steps: Sequence[Step],
    block: int,
    written: Tensors,
    notes: Mapping[str, Any],
    start: Callable[[int], Tensors] | None,
) -> None:
    """Let every step pass a block; it is read again where one of them replays."""
    needed = any(step.replays for step in steps)
    whole: Tensors = dense.block(block) if needed else {}
    tensors = start(block) if needed and start is not None else whole
    for index, step in enumerate(steps):
        again = any(later.replays for later in steps[index + 1 :])
        tensors = step.skip(block, whole, tensors, written, notes[step.name], again=again)


def _unit(block: int) -> str:
    return f"block {block}"
