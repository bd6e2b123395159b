"""The walk over blocks: the order of steps, what a resumed run passes, and what is written."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import DiskError, UserError
from ckpt_prune.job.layout import Layout, layout_of
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.job.store import BlockStore
from ckpt_prune.model.model import Model
from ckpt_prune.stages.shared.walk import walk
from tests.families import BLOCKS, contents, make
from tests.interrupting import interrupt_at

WAIT = 30
"""Seconds after which a test fails in place of waiting for ever."""
NAME = "model.layers.{}.mlp.up_proj.weight"


class Added(BaseModel):
    """The note of a step on a block."""

    number: float


class Adding(Step):
    """Adds a number to one weight of every block, and records the calls it got."""

    record = Added

    def __init__(self, number: float) -> None:
        self.number = number
        self.calls: list[tuple[Any, ...]] = []

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[Added]]:
        self.calls.append(("act", block, first_of(block, tensors)))
        return self.added(block, tensors), [Added(number=self.number)]

    def advance(self, block: int, tensors: Tensors) -> None:
        self.calls.append(("advance", block, first_of(block, tensors)))

    def added(self, block: int, tensors: Tensors) -> Tensors:
        return {**tensors, NAME.format(block): tensors[NAME.format(block)] + self.number}


class AddingToInput(Adding):
    """Also looks at the block as it was before."""

    needs_input = True

    def advance_input(self, block: int, tensors: Tensors) -> None:
        self.calls.append(("input", block, first_of(block, tensors)))


def first_of(block: int, tensors: Tensors) -> int:
    """Dense weights are small: what was added to the first one of a block."""
    return round(float(tensors[NAME.format(block)][0, 0]))


def dense_of(tmp_path: Path) -> tuple[ModelView, Layout]:
    model = Model.open(make(tmp_path / "dense"))
    return ModelView(model, torch.device("cpu")), layout_of(model)


@contextmanager
def writer_of(out: Path, layout: Layout, *, resume: bool = False) -> Iterator[CheckpointWriter]:
    with Staging(out, job="job", resume=resume) as staging:
        yield CheckpointWriter(staging, layout, sharded=False)


def test_steps_act_in_order_and_advance_with_what_was_written(tmp_path):
    dense, _ = dense_of(tmp_path)
    first, second = AddingToInput(1), AddingToInput(2)
    records = walk(dense, {"first": first, "second": second})
    for step, given in ((first, 0), (second, 1)):
        events = [(("act", block, given), ("input", block, given), ("advance", block, 3)) for block in range(BLOCKS)]
        assert step.calls == [entry for of_block in events for entry in of_block]
    assert records == {"first": [Added(number=1)] * BLOCKS, "second": [Added(number=2)] * BLOCKS}


class _Overlapping(Adding):
    """Acts on a block only once the next one is being read and the last one written; both wait for that."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(1)
        self.acting, self.reading, self.writing = ([threading.Event() for _ in range(BLOCKS)] for _ in range(3))
        read, write = Model.read_block, BlockStore.write

        def slow_read(model: Model, block: int) -> dict[str, Tensor]:
            self.reading[block].set()
            # A slow disk: the block is there when the one before has been worked on for a while.
            assert block == 0 or self.acting[block - 1].wait(WAIT)
            return read(model, block)

        def slow_write(store: BlockStore, model: Model, block: int, *given) -> None:
            self.writing[block].set()
            assert block + 1 == BLOCKS or self.acting[block + 1].wait(WAIT)
            write(store, model, block, *given)

        patch.setattr(Model, "read_block", slow_read)
        patch.setattr(BlockStore, "write", slow_write)

    def act(self, block, tensors):
        self.acting[block].set()
        assert block + 1 == BLOCKS or self.reading[block + 1].wait(WAIT)
        assert block == 0 or self.writing[block - 1].wait(WAIT)
        assert not any(event.is_set() for event in self.reading[block + 2 :])  # one block waits, not more
        return super().act(block, tensors)


def test_the_next_block_is_read_and_the_last_one_written_while_one_is_worked_on(tmp_path, monkeypatch):
    dense, layout = dense_of(tmp_path)
    with writer_of(tmp_path / "whole", layout) as writer:
        walk(dense, {"only": Adding(1)}, BlockStore(writer, layout))
        BlockStore(writer, layout).write_rest(dense)
        writer.finish()
    with writer_of(tmp_path / "out", layout) as writer:
        walk(dense, {"only": _Overlapping(monkeypatch)}, BlockStore(writer, layout))
        BlockStore(writer, layout).write_rest(dense)
        writer.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_block_that_cannot_be_read_stops_the_walk_when_its_turn_comes(tmp_path, monkeypatch):
    dense, layout = dense_of(tmp_path)
    read = Model.read_block

    def failing(model: Model, block: int) -> dict[str, Tensor]:
        if block == 1:
            raise UserError("the disk is gone")
        return read(model, block)

    monkeypatch.setattr(Model, "read_block", failing)
    step = Adding(1)
    with writer_of(tmp_path / "out", layout) as writer:
        with pytest.raises(UserError, match="the disk is gone"):
            walk(dense, {"only": step}, BlockStore(writer, layout))
        assert step.calls == [("act", 0, 0), ("advance", 0, 1)]
        assert writer.done == {"block 0"}


@pytest.mark.parametrize("failing", range(BLOCKS))
def test_a_block_that_cannot_be_written_stops_the_walk_before_the_next_one_is(tmp_path, monkeypatch, failing):
    dense, layout = dense_of(tmp_path)
    with writer_of(tmp_path / "out", layout) as writer:
        interrupt_at(monkeypatch, CheckpointWriter, "commit", failing + 1, DiskError("the disk is full"))
        with pytest.raises(DiskError, match="the disk is full"):
            walk(dense, {"only": Adding(1)}, BlockStore(writer, layout))
        assert writer.done == {f"block {block}" for block in range(failing)}


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_walk_goes_past_what_is_written_and_ends_in_the_same_bytes(tmp_path, stop):
    dense, layout = dense_of(tmp_path)

    def steps() -> dict[str, Adding]:
        return {"first": Adding(1), "second": AddingToInput(2), "third": Adding(4)}

    with writer_of(tmp_path / "whole", layout) as writer:
        unbroken_steps = steps()
        records = walk(dense, unbroken_steps, BlockStore(writer, layout))
        BlockStore(writer, layout).write_rest(dense)
        writer.finish()

    def walk_until_stopped() -> None:
        with writer_of(tmp_path / "out", layout) as writer, pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, CheckpointWriter, "commit", stop + 1)
            walk(dense, steps(), BlockStore(writer, layout))

    with pytest.raises(KeyboardInterrupt):
        walk_until_stopped()
    with writer_of(tmp_path / "out", layout, resume=True) as writer:
        store, resumed = BlockStore(writer, layout), steps()
        assert [store.has(block) for block in range(BLOCKS)] == [block < stop for block in range(BLOCKS)]
        assert walk(dense, resumed, store) == records
        store.write_rest(dense)
        writer.finish()
    # The second looks at the block as the first had left it, which therefore acts again; the others only go on.
    for again, before, acts in zip(resumed.values(), unbroken_steps.values(), (True, False, False), strict=True):
        done = [entry for entry in before.calls if entry[1] < stop and (acts or entry[0] != "act")]
        assert again.calls == done + [entry for entry in before.calls if entry[1] >= stop]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_nothing_is_read_again_for_steps_without_input(tmp_path, monkeypatch):
    dense, layout = dense_of(tmp_path)
    with writer_of(tmp_path / "out", layout) as writer:
        store = BlockStore(writer, layout)
        walk(dense, {"only": Adding(1)}, store)
        monkeypatch.setattr(ModelView, "block", lambda *_: 1 / 0)
        step = Adding(1)
        assert walk(dense, {"only": step}, store) == {"only": [Added(number=1)] * BLOCKS}
        assert step.calls == [("advance", block, 1) for block in range(BLOCKS)]
