"""A run: one attempt at a job, with its staging folder and journal. Stages get their data and their notes here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import SCRATCH, Staging, disk_failures, partial_of
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.job.afterwork import Afterwork, Followed
from ckpt_prune.job.layout import Output, with_rest
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.step import PruneStep, Step
from ckpt_prune.job.store import BlockStore
from ckpt_prune.job.timing import PhaseTimer
from ckpt_prune.measure.moment_sources import FollowedMoments, SequentialMoments
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.parallel.group import process_group

Announce = Callable[[str], None]
"""Takes a line that the user should read."""
Kind = TypeVar("Kind", bound=BaseModel)


def say_nothing(_line: str) -> None:
    pass


def say_changed(out: Path, entry: str) -> str:
    """Say that an unfinished output was changed."""
    return f"{out}.partial was changed since it was written, first in {entry!r}: that and all after it are done again"


@dataclass
class Run:
    """One attempt at a job.

    Attributes:
        staging: where the output grows; None in a process that does not write.
        timer: times the phases of the run.
        announce: says a line to the user.
        store: where finished blocks are, once the output is laid out.
        steps: key of a stage → what it does to each block, once they are made.
        done: what stages have done as a whole, by names of the report.
        report: the record of the output, if an earlier run has finished it.
        sources: checkpoints that the output is made from.
        afterwork: what follows once the output lacks nothing else, and before it takes its place.
        followed: what came of that.
    """

    out: Path
    staging: Staging | None
    timer: PhaseTimer
    announce: Announce = say_nothing
    store: BlockStore | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    report: Any = None
    sources: Sequence[Checkpoint] = ()
    afterwork: Sequence[Afterwork] = ()
    followed: list[Followed] = field(default_factory=list)

    @property
    def journal(self) -> Journal | None:
        """The record of finished work; None in a process that does not write."""
        return None if self.staging is None else self.staging.journal

    @property
    def own_journal(self) -> Journal:
        """The journal, for stages that one process runs alone."""
        assert self.journal is not None
        return self.journal

    @property
    def scratch(self) -> Path:
        """Folder for files that the output does not get."""
        return partial_of(self.out) / SCRATCH

    @property
    def writer(self) -> CheckpointWriter | None:
        """Writes the output, once it is laid out; None in a process that does not write."""
        return None if self.store is None else self.store.writer

    def remember(self, entry: str, kind: type[Kind], make: Callable[[], Kind], files: Iterable[Path] = ()) -> Kind:
        """Return what an earlier run has recorded in the journal; else make it, and record it.

        With several processes, all make it, and the first one records it. `files` are those that go with it, if `make`
        writes them.
        """
        note = process_group().once(lambda: None if self.journal is None else self.journal.notes.get(entry))
        if note is not None:
            return kind.model_validate(note)
        record = make()
        if self.journal is not None:
            with disk_failures(self.journal.folder):
                present = [path for path in files if path.is_file()]
                self.journal.record(entry, note=record.model_dump(mode="json"), files=present)
        return record

    def prefix_moments(self, prepared: Prepared, grams: Mapping[str, bool]) -> SequentialMoments:
        """Return moments of what reaches a block behind the pruned ones, for a step that comes after all others.

        They are measured on the stream of the last step that prunes. That moves by the weights that are written, which
        are those behind the last step. If no step prunes, a stream of their own moves in the same way.

        Args:
            grams: space or linear module → True if its moments hold Grams.
        """

        def open_stream() -> HiddenStream:
            return prepared.live_stream(prepared.view)

        pruning = next((step for step in reversed(self.steps.values()) if isinstance(step, PruneStep)), None)
        if pruning is None:
            return SequentialMoments(open_stream(), dict(grams), true_sequential=True)
        return FollowedMoments(pruning.prefix(open_stream), dict(grams), true_sequential=True)

    def open_store(self, prepared: Prepared) -> BlockStore:
        """Lay out the files of the output in the staging folder."""
        output = prepared.output
        padded = output.container.padded
        widths = [{space: count for space, count in kept.items() if space not in padded} for kept in prepared.widths]
        writer = self._open_writer(prepared.model.checkpoint, output)
        if writer is not None and writer.changed is not None:
            self.announce(say_changed(self.out, writer.changed))
        self.store = BlockStore(writer, output.layout, widths if prepared.recipe.spaces else None, output.kept)
        return self.store

    def write_rest(self, view: ModelView) -> None:
        """Write the tensors outside the blocks."""
        assert self.store is not None
        with self.timer.time("rest"):
            self.store.write_rest(view)
            self.store.write_outside(view.model.checkpoint)

    def _open_writer(self, checkpoint: Checkpoint, output: Output) -> CheckpointWriter | None:
        if self.staging is None:
            return None
        everything, names = with_rest(checkpoint, output.layout)
        within, aside = checkpoint.within, output.aside
        stacks = checkpoint.stacks if output.kept is None else output.kept.stacks
        if within is not None:
            stacks = {within.on_disk(name): stack for name, stack in stacks.items()}
        return CheckpointWriter(
            self.staging,
            everything | aside,
            sharded=checkpoint.sharded,
            aside=aside.keys(),
            transposed=checkpoint.transposed,
            names=names,
            stacks=stacks,
        )
