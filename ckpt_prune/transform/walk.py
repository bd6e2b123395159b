"""The one walk over blocks: read, let every step act, write, go on. What stands outside the blocks follows.

Several processes walk together. Where blocks follow from one another, all of them take every block; where they do not,
each takes some.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.architectures.model import BlockWidths, Model
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.parallel.group import ALONE, here, working_in
from ckpt_prune.progress import track
from ckpt_prune.transform.dense import Dense
from ckpt_prune.transform.layout import OUTER, Layout
from ckpt_prune.transform.steps import Step, StepWithInput, Tensors

Records = dict[str, list[Any]]
"""Name of a step → its records of all blocks."""
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
) -> Records:
    """Take every block through the steps and write it, or read it where an interrupted run has written it.

    Args:
        dense: the dense model, in the basis of the output.
        steps: in order.
        sink: where blocks go; nothing is written without one.
        start: reads the block that the first step sees; the dense model's by default.
        say: what the progress bar says; None where a step shows one.
        apart: whether no block depends on another, so that each of several processes may take some; with a sink only.

    Returns:
        The records of every step, in the order of blocks; where blocks were taken apart, at the first process only.
    """
    read = dense.block if start is None else start
    if apart and sink is not None and here().size > 1:
        return _walk_apart(dense, steps, sink, say or "")
    found: Records = {step.name: [] for step in steps}
    blocks = range(dense.model.blocks)
    for block in blocks if say is None else track(blocks, say, total=len(blocks)):
        prefix = dense.model.family.block.format(block=block)
        if sink is not None and sink.done(block):
            tensors, notes = sink.read(dense.model, block, prefix)
            records, inputs = validated(steps, notes), _inputs(steps, block, read)
        else:
            tensors, records, inputs = _acted(steps, block, read(block))
            if sink is not None:
                sink.write(block, prefix, tensors, _notes(records))
        for step in steps:
            found[step.name] += records[step.name]
            if isinstance(step, StepWithInput):
                step.advance_input(block, inputs.pop(step.name))
            step.advance(block, tensors)
    return found


def validated(steps: Sequence[Step], notes: Mapping[str, Any]) -> Records:
    """Every step's records of a block, of what the journal has of it."""
    return {step.name: [step.record.model_validate(each) for each in notes[step.name]] for step in steps}


def _notes(records: Mapping[str, Sequence[BaseModel]]) -> dict[str, Any]:
    return {name: [each.model_dump(mode="json") for each in made] for name, made in records.items()}


def _acted(
    steps: Sequence[Step], block: int, tensors: Tensors
) -> tuple[dict[str, Tensor], Records, dict[str, Tensors]]:
    """Let every step act on a block.

    Returns:
        Its new tensors, the records, and what those steps were given that need it again.
    """
    records: Records = {}
    inputs: dict[str, Tensors] = {}
    for step in steps:
        if isinstance(step, StepWithInput):
            inputs[step.name] = tensors
        tensors, made = step.act(block, tensors)
        records[step.name] = list(made)
    return dict(tensors), records, inputs


def _inputs(steps: Sequence[Step], block: int, read: Callable[[int], Tensors]) -> dict[str, Tensors]:
    """What steps were given of a block that is written; those before them act again."""
    needed = [index for index, step in enumerate(steps) if isinstance(step, StepWithInput)]
    if not needed:
        return {}
    last = needed[-1]
    tensors, _, inputs = _acted(steps[:last], block, read(block))
    return {**inputs, steps[last].name: tensors}


def _walk_apart(dense: Dense, steps: Sequence[Step], sink: Sink, say: str) -> Records:
    """Let every process take some blocks; the first one writes all, in order."""
    group, prefixes = here(), [dense.model.family.block.format(block=block) for block in range(dense.model.blocks)]
    todo = [block for block in range(len(prefixes)) if not sink.done(block)]
    found: dict[int, Records] = {}

    def act(block: int) -> tuple[dict[str, Tensor], Records]:
        with working_in(ALONE):
            return _acted(steps, block, dense.block(block))[:2]

    if group.first:
        found = {block: validated(steps, sink.notes(block)) for block in set(range(len(prefixes))) - set(todo)}
    rounds = [todo[start : start + group.size] for start in range(0, len(todo), group.size)]
    for blocks in track(rounds, say, unit="round"):
        for rank, made in enumerate(group.gather([act(block) for block in blocks[group.rank :][:1]]) or ()):
            for tensors, records in made:
                found[blocks[rank]] = records
                sink.write(blocks[rank], prefixes[blocks[rank]], tensors, _notes(records))
    return {step.name: [each for block in sorted(found) for each in found[block][step.name]] for step in steps}


def _unit(block: int) -> str:
    return f"block {block}"
