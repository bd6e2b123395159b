"""The walk over blocks: the order of steps, what a resumed run passes, and what is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.transform.dense import Dense
from ckpt_prune.transform.layout import Layout, layout_of
from ckpt_prune.transform.walk import Sink, walk
from tests.families import BLOCKS, contents, make

NAME = "model.layers.{}.mlp.up_proj.weight"


class Adding:
    """Adds a number to one weight of every block, and keeps what it was told."""

    def __init__(self, name: str, number: float, *, replays: bool = False) -> None:
        self.name, self.number, self.replays = name, number, replays
        self.told: list[tuple[Any, ...]] = []

    def act(self, block: int, dense: dict[str, Tensor], tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        self.told.append(("act", block, float(tensors[NAME.format(block)][0, 0] - dense[NAME.format(block)][0, 0])))
        return self._added(block, tensors), {"number": self.number}

    def skip(self, block, dense, tensors, written, note, *, again):
        seen = round(float(tensors[NAME.format(block)][0, 0] - dense[NAME.format(block)][0, 0])) if tensors else None
        self.told.append(("skip", block, seen, note, again))
        return self._added(block, tensors) if again else tensors

    def advance(self, block: int, tensors: dict[str, Tensor]) -> None:
        self.told.append(("advance", block))

    def _added(self, block: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, NAME.format(block): tensors[NAME.format(block)] + self.number}


def dense_of(tmp_path: Path) -> tuple[Dense, Layout]:
    model = Model.open(make(tmp_path / "dense"))
    return Dense(model, torch.device("cpu")), layout_of(model)


@contextmanager
def writer_of(out: Path, layout: Layout, *, resume: bool = False) -> Iterator[CheckpointWriter]:
    with Staging(out, job="job", resume=resume) as staging:
        yield CheckpointWriter(staging, layout, sharded=False)


def test_steps_act_in_order_and_advance_when_all_have(tmp_path):
    dense, _ = dense_of(tmp_path)
    first, second = Adding("first", 1), Adding("second", 2)
    walk(dense, [first, second])
    told = [entry for block in range(BLOCKS) for entry in (("act", block, 0.0), ("advance", block))]
    assert first.told == told
    assert [(what, block) for what, block, *_ in second.told] == [(what, block) for what, block, *_ in told]
    assert all(abs(entry[2] - 1) < 1e-5 for entry in second.told if entry[0] == "act")


def test_a_first_block_may_be_read_elsewhere(tmp_path):
    dense, _ = dense_of(tmp_path)
    step = Adding("only", 0)
    walk(dense, [step], start=lambda block: Adding("", 5)._added(block, dense.block(block)))
    assert all(abs(entry[2] - 5) < 1e-5 for entry in step.told if entry[0] == "act")


def test_a_resumed_walk_passes_what_is_written_and_ends_in_the_same_bytes(tmp_path):
    dense, layout = dense_of(tmp_path)

    def steps() -> list[Adding]:
        return [Adding("first", 1), Adding("second", 2, replays=True)]

    for name, stop in (("whole", None), ("out", 1)):
        try:
            with writer_of(tmp_path / name, layout) as writer:
                sink = Sink(writer, layout)
                if stop is not None:
                    stopping = steps()
                    stopping[1].advance = lambda block, tensors: (_ for _ in ()).throw(KeyboardInterrupt)
                    walk(dense, stopping, sink)
                walk(dense, steps(), sink)
                sink.write_rest(dense)
                writer.finish()
        except KeyboardInterrupt:
            assert stop is not None
    with writer_of(tmp_path / "out", layout, resume=True) as writer:
        sink, resumed = Sink(writer, layout), steps()
        assert [sink.done(block) for block in range(BLOCKS)] == [True, False, False]
        walk(dense, resumed, sink)
        sink.write_rest(dense)
        writer.finish()
    # The second looks at the block as the first had left it, which therefore acts again.
    assert resumed[0].told[:2] == [("skip", 0, 0, {"number": 1}, True), ("advance", 0)]
    assert resumed[1].told[:2] == [("skip", 0, 1, {"number": 2}, False), ("advance", 0)]
    assert resumed[0].told[2][:2] == ("act", 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_nothing_is_read_again_for_steps_that_do_not_replay(tmp_path, monkeypatch):
    dense, layout = dense_of(tmp_path)
    with writer_of(tmp_path / "out", layout) as writer:
        sink = Sink(writer, layout)
        walk(dense, [Adding("only", 1)], sink)
        monkeypatch.setattr(Dense, "block", lambda *_: 1 / 0)
        passed = Adding("only", 1)
        walk(dense, [passed], sink)
        assert passed.told[0] == ("skip", 0, None, {"number": 1}, False)
