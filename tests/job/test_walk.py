"""The walk over blocks: the order of steps, what a resumed run passes, and what is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.job.layout import Layout, layout_of
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.job.store import BlockStore
from ckpt_prune.job.walk import walk
from ckpt_prune.model.model import Model
from tests.families import BLOCKS, contents, make
from tests.interrupting import interrupt_at

NAME = "model.layers.{}.mlp.up_proj.weight"


class Added(BaseModel):
    """What a step notes of a block."""

    number: float


class Adding(Step):
    """Adds a number to one weight of every block, and keeps what it was told."""

    record = Added

    def __init__(self, number: float) -> None:
        self.number = number
        self.told: list[tuple[Any, ...]] = []

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[Added]]:
        self.told.append(("act", block, first_of(block, tensors)))
        return self.added(block, tensors), [Added(number=self.number)]

    def advance(self, block: int, tensors: Tensors) -> None:
        self.told.append(("advance", block, first_of(block, tensors)))

    def added(self, block: int, tensors: Tensors) -> Tensors:
        return {**tensors, NAME.format(block): tensors[NAME.format(block)] + self.number}


class AddingToInput(Adding):
    """Also looks at the block as it was before."""

    needs_input = True

    def advance_input(self, block: int, tensors: Tensors) -> None:
        self.told.append(("input", block, first_of(block, tensors)))


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
        told = [(("act", block, given), ("input", block, given), ("advance", block, 3)) for block in range(BLOCKS)]
        assert step.told == [entry for each in told for entry in each]
    assert records == {"first": [Added(number=1)] * BLOCKS, "second": [Added(number=2)] * BLOCKS}


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_walk_goes_past_what_is_written_and_ends_in_the_same_bytes(tmp_path, stop):
    dense, layout = dense_of(tmp_path)

    def steps() -> dict[str, Adding]:
        return {"first": Adding(1), "second": AddingToInput(2), "third": Adding(4)}

    with writer_of(tmp_path / "whole", layout) as writer:
        whole = steps()
        records = walk(dense, whole, BlockStore(writer, layout))
        BlockStore(writer, layout).write_rest(dense)
        writer.finish()

    def stopped() -> None:
        with writer_of(tmp_path / "out", layout) as writer, pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, CheckpointWriter, "commit", stop + 1)
            walk(dense, steps(), BlockStore(writer, layout))

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with writer_of(tmp_path / "out", layout, resume=True) as writer:
        store, resumed = BlockStore(writer, layout), steps()
        assert [store.has(block) for block in range(BLOCKS)] == [block < stop for block in range(BLOCKS)]
        assert walk(dense, resumed, store) == records
        store.write_rest(dense)
        writer.finish()
    # The second looks at the block as the first had left it, which therefore acts again; the others only go on.
    for again, before, acts in zip(resumed.values(), whole.values(), (True, False, False), strict=True):
        done = [entry for entry in before.told if entry[1] < stop and (acts or entry[0] != "act")]
        assert again.told == done + [entry for entry in before.told if entry[1] >= stop]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_nothing_is_read_again_for_steps_without_input(tmp_path, monkeypatch):
    dense, layout = dense_of(tmp_path)
    with writer_of(tmp_path / "out", layout) as writer:
        store = BlockStore(writer, layout)
        walk(dense, {"only": Adding(1)}, store)
        monkeypatch.setattr(ModelView, "block", lambda *_: 1 / 0)
        step = Adding(1)
        assert walk(dense, {"only": step}, store) == {"only": [Added(number=1)] * BLOCKS}
        assert step.told == [("advance", block, 1) for block in range(BLOCKS)]
