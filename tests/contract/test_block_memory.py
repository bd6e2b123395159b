"""Runs of a block that go on from what the ones before have computed, against runs from its start to its end."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.streams import hidden_stream as streams
from ckpt_prune.measure.streams.block_memory import BlockMemory, find_rows
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.cuts import list_cuts
from ckpt_prune.model.model import Model
from tests.other_sums import OtherSums
from tests.pairs import every

from .dense import Dense
from .models import Case, first_cases, unlike_cases

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
@pytest.mark.parametrize("case", every(3, unlike_cases()), ids=str)
def test_the_bits_are_those_of_whole_runs(dense: Dense, case: Case) -> None:
    model = dense.model(case)
    pairs = zip(*(walk(open_at_start(kind, model, case), model) for kind in (HiddenStream, Forgetful)), strict=True)
    for (what, result), (_, expected) in pairs:
        assert_same(result, expected, what)


def drop_columns(model: Model, block: int, tensors: dict[str, Tensor], seed: int) -> None:
    """Drop a third of the columns of every consumer outside attention."""
    generator = torch.Generator().manual_seed(seed)
    own, cut = model.family, {}
    for space, each in own.columns.items():
        if each.consumer != own.attention.output and model.tensor(block, each.consumer) in tensors:
            copies, count = model.copies(space), model.units(space, 1)
            kept = torch.randperm(count, generator=generator)[: count - count // 3].sort().values
            cut[space] = (kept + torch.arange(copies)[:, None] * count).flatten()
    for module, kind, dim, lines in list_cuts(model.remaining_lines(cut)):
        name = model.tensor(block, module, kind)
        if name in tensors:
            tensors[name] = tensors[name].index_select(dim, lines)
    for space in cut:  # as a compensation changes them
        tensors[model.tensor(block, own.columns[space].consumer)] *= 1.5
    tensors |= model.note_widths(
        block, tensors, {space: len(units) // model.copies(space) for space, units in cut.items()}
    )


def walk_narrower(stream: HiddenStream, model: Model) -> Iterator[Tensor]:
    """Drop columns twice from each block, measured before, between and behind; yielded are states behind each block."""
    for block in range(2):
        tensors = dict(model.read_block(block))
        keys = dict.fromkeys(model.inputs(block), True)
        stream.observe(block, tensors, keys)
        drop_columns(model, block, tensors, block)
        stream.observe(block, tensors, keys)
        stream.advance(block, tensors)
        yield stream.states.clone()


@pytest.mark.usefixtures("two_batches")
@pytest.mark.parametrize("sums", [nullcontext, OtherSums])
@pytest.mark.parametrize("case", unlike_cases()[::3], ids=str)
def test_narrower_blocks_have_the_bits_of_whole_runs(dense: Dense, case: Case, sums: Any) -> None:
    """Also where a narrower product adds up in another order than a wide one."""
    model = dense.model(case)
    with sums():
        for result, expected in zip(
            *(walk_narrower(open_at_start(kind, model, case), model) for kind in (HiddenStream, Forgetful)), strict=True
        ):
            assert torch.equal(result, expected)


def test_rows_are_found_by_all_tensors_together() -> None:
    """Rows 0 and 2 of the first tensor are equal, and told apart by the second."""
    one, other = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]), torch.tensor([5.0, 6.0, 7.0])
    kept = torch.tensor([2, 1])
    found = find_rows([one, other], [one[kept], other[kept]])
    assert found is not None
    assert torch.equal(found, kept)
    assert find_rows([one, other], [one, other + 1]) is None
    assert find_rows([one, other], [one]) is None
    assert find_rows([one, other], [one, other[kept]]) is None


ONCE = {"llama", "qwen2", "gemma3_text", "opt", "gpt_neox", "phi", "mixtral", "vit"}
"""Families in which every linear module runs once a batch, whatever is masked between."""


@pytest.mark.usefixtures("two_batches")
@pytest.mark.parametrize("case", [case for case in first_cases() if case.model_type in ONCE], ids=str)
def test_every_linear_module_runs_once_in_a_true_sequential_mask(dense: Dense, case: Case, monkeypatch) -> None:
    stream, model = open_at_start(HiddenStream, dense.model(case), case), dense.model(case)
    list(walk(stream, model, 1))  # learns how modules follow one another
    calls = count_calls(monkeypatch)
    tensors = dict(model.read_block(1))
    for key, readers in model.inputs(1).items():
        stream.observe(1, tensors, {key: True})
        mask_halves(tensors, [model.tensor(1, module) for module in readers], 0)
    stream.advance(1, tensors)
    outside = [count for path, count in calls.items() if "experts" not in path]
    assert set(outside) == {len(stream.batches)}, calls


@pytest.mark.usefixtures("two_batches")
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "gpt_neox", "vit", "opt", "bert"])
@pytest.mark.parametrize("exact", [True, False])
def test_what_makes_columns_runs_once_and_for_one_comparison(
    dense: Dense, model_type: str, exact: bool, monkeypatch
) -> None:
    case = next(case for case in first_cases() if case.model_type == model_type)
    stream, model = open_at_start(HiddenStream, dense.model(case), case), dense.model(case)
    list(walk(stream, model, 1))
    calls = count_calls(monkeypatch)
    tensors = dict(model.read_block(1))
    (space,) = (name for name, own in model.family.columns.items() if own.consumer != model.family.attention.output)
    stream.observe(1, tensors, {space: True})
    drop_columns(model, 1, tensors, 0)
    monkeypatch.setattr(
        BlockMemory,
        "_compare",
        lambda memory, path, kept, whole: memory._exact.update({(path, kept.value.shape): exact}),
    )
    stream.advance(1, tensors)
    batches = len(stream.batches)
    assert max(calls.values()) == batches + (1 if exact else batches), calls
    assert min(calls.values()) == batches


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the runs of every linear module of blocks that are built from now on, by path."""
    calls: Counter[str] = Counter()
    build = BlockFactory.build_block

    def build_counted(self: BlockFactory, *args: Any, **options: Any) -> nn.Module:
        block = build(self, *args, **options)
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear):
                plain = module.forward
                module.forward = lambda *a, path=path, plain=plain: (calls.update([path]), plain(*a))[1]  # type: ignore
        return block

    monkeypatch.setattr(BlockFactory, "build_block", build_counted)
    return calls
