"""Runs of a block that go on from what the ones before have computed, against runs from its start to its end."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.streams import hidden_stream as streams
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model
from tests.pairs import choose_cases

from .dense import Dense
from .models import LONG, Case, first_cases

SAMPLES = 5


class Forgetful(HiddenStream):
    """Runs whole blocks."""

    @contextmanager
    def replay(self, *args: Any, **options: Any) -> Iterator[frozenset[str]]:
        yield frozenset()


@pytest.fixture
def two_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", 1)


def open_at_start(kind: type[HiddenStream], model: Model, case: Case) -> HiddenStream:
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    return kind(factory, model.checkpoint.tensors, model.checkpoint.read, case.samples(SAMPLES), folds=2)


def mask_halves(tensors: dict[str, Tensor], names: list[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        keep = torch.rand(tensors[name].shape, generator=generator) < 0.5
        tensors[name] = tensors[name] * keep.to(tensors[name].dtype)


def walk(stream: HiddenStream, model: Model, blocks: int = 2) -> Iterator[tuple[str, Any]]:
    """Mask what reads the same input, measured each time; yielded are moments, and states behind each block."""
    for block in range(blocks):
        tensors = dict(model.read_block(block))
        for key, readers in model.inputs(block).items():
            yield key, stream.observe(block, tensors, {key: True})[key]
            mask_halves(tensors, [model.tensor(block, module) for module in readers], block)
        stream.advance(block, tensors)
        yield "states", stream.states.clone()


def assert_same(result: SpaceMoments | Tensor, expected: SpaceMoments | Tensor, what: str) -> None:
    if isinstance(result, Tensor):
        assert torch.equal(result, expected), what
        return
    for fold, other in zip(result, expected, strict=True):
        values: Mapping[str, Any] = vars(fold)
        for name, value in values.items():
            same = (
                torch.equal(value, getattr(other, name)) if isinstance(value, Tensor) else value == getattr(other, name)
            )
            assert same, f"{what}: {name}"


@pytest.mark.usefixtures("two_batches")
@pytest.mark.parametrize("case", choose_cases(LONG, first_cases()[::12].__contains__), ids=str)
def test_the_bits_are_those_of_whole_runs(dense: Dense, case: Case) -> None:
    model = dense.model(case)
    pairs = zip(*(walk(open_at_start(kind, model, case), model) for kind in (HiddenStream, Forgetful)), strict=True)
    for (what, result), (_, expected) in pairs:
        assert_same(result, expected, what)


ONCE = {"llama", "qwen2", "gemma3_text", "opt", "gpt_neox", "phi", "mixtral", "vit"}
"""Families in which every linear module runs once a batch, whatever is masked between."""


@pytest.mark.usefixtures("two_batches")
@pytest.mark.parametrize("case", [case for case in first_cases() if case.model_type in ONCE], ids=str)
def test_every_linear_module_runs_once_in_a_true_sequential_mask(dense: Dense, case: Case, monkeypatch) -> None:
    model = dense.model(case)
    stream = open_at_start(HiddenStream, model, case)
    calls: Counter[str] = Counter()
    build = BlockFactory.build_block

    def build_counted(self: BlockFactory, *args: Any, **options: Any) -> nn.Module:
        block = build(self, *args, **options)
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear):
                plain = module.forward
                module.forward = lambda *a, path=path, plain=plain: (calls.update([path]), plain(*a))[1]  # type: ignore
        return block

    list(walk(stream, model, 1))  # learns how modules follow one another
    monkeypatch.setattr(BlockFactory, "build_block", build_counted)
    tensors = dict(model.read_block(1))
    for key, readers in model.inputs(1).items():
        stream.observe(1, tensors, {key: True})
        mask_halves(tensors, [model.tensor(1, module) for module in readers], 0)
    stream.advance(1, tensors)
    outside = [count for path, count in calls.items() if "experts" not in path]
    assert set(outside) == {len(stream.batches)}, calls
