"""Zeros and N:M patterns against counting one element at a time."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.shard import DTYPES
from ckpt_prune.sparsity import zeros as module
from ckpt_prune.sparsity.zeros import (
    Sparsity,
    count_zeros,
    crowded_groups,
    find_zeros,
    pattern_of_all,
    share_of_all,
    weights_by_module,
)
from tests.checkpoint.folders import example_tensors, save_sharded, save_single

ORDER = [("1:4", 1, 4), ("2:4", 2, 4), ("4:8", 4, 8)]


def groups_too_full(rows: list[list[float]], kept: int, of: int) -> int:
    """From the definition: groups of a row with more than `kept` that are not zero."""
    return sum(
        sum(value != 0 for value in row[start : start + of]) > kept for row in rows for start in range(0, len(row), of)
    )


def pattern_by_hand(rows: list[list[float]]) -> str | None:
    width = len(rows[0])
    for text, kept, of in ORDER:
        if width % of == 0 and groups_too_full(rows, kept, of) == 0:
            return text
    return None


@st.composite
def matrices(draw) -> list[list[float]]:
    """Rows that often hold a pattern, and sometimes miss it by one weight."""
    of = draw(st.sampled_from([4, 8]))
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = draw(st.integers(0, of))
    matrix = []
    for _ in range(rows):
        row = []
        for _ in range(groups):
            filled = draw(st.integers(max(0, most - 1), most))
            row += draw(st.permutations([1.5] * filled + [draw(st.sampled_from([0.0, -0.0]))] * (of - filled)))
        matrix.append(row)
    if draw(st.booleans()):
        matrix[draw(st.integers(0, rows - 1))][draw(st.integers(0, groups * of - 1))] = -2.0
    return matrix


@settings(deadline=None, max_examples=50)
@given(rows=matrices(), step=st.sampled_from([1, 9, 2**23]))
def test_zeros_and_pattern_are_what_counting_finds(rows, step):
    """In slices of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE_ELEMENTS", step)
        sparsity = count_zeros("w", torch.tensor(rows))
    assert sparsity.zeros == sum(value == 0 for row in rows for value in row)
    assert sparsity.pattern == pattern_by_hand(rows)
    assert sparsity.share == sparsity.zeros / (len(rows) * len(rows[0]))


@settings(deadline=None, max_examples=30)
@given(rows=matrices(), kept=st.integers(0, 4), of=st.sampled_from([1, 2, 4]), step=st.sampled_from([1, 2**23]))
def test_crowded_groups_are_what_counting_finds(rows, kept, of, step):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE_ELEMENTS", step)
        assert crowded_groups(torch.tensor(rows), kept, of) == groups_too_full(rows, kept, of)


@pytest.mark.parametrize("shape", [(), (8,), (2, 4, 8), (0, 8), (3, 0)])
def test_only_matrices_with_zeros_have_a_pattern(shape):
    sparsity = count_zeros("w", torch.zeros(shape))
    assert (sparsity.pattern, sparsity.zeros) == (None, torch.zeros(shape).numel())
    assert sparsity.share == (1.0 if torch.zeros(shape).numel() else 0.0)


@pytest.mark.parametrize("code", sorted(set(DTYPES) - {"F8_E8M0"}))
def test_every_dtype(code):
    """-0.0 is a zero; NaN and the smallest number there is are not."""
    stored = torch.zeros(4, 8, dtype=torch.uint8)
    stored[:, ::4] = 1
    tensor = stored.view(torch.bool) if code == "BOOL" else stored.to(torch.int64).to(DTYPES[code])
    assert count_zeros("w", tensor) == Sparsity("w", (4, 8), 24, "1:4")


def test_what_is_a_zero():
    odd = torch.tensor([[0.0, -0.0, float("nan"), 1e-45]])
    assert count_zeros("w", odd) == Sparsity("w", (1, 4), 2, "2:4")


@pytest.mark.parametrize("shape", [(4,), (1, 6), (2, 2, 4)])
def test_what_has_no_groups(shape):
    with pytest.raises(ValueError, match="has no groups of 4 in its rows"):
        crowded_groups(torch.zeros(shape), 2, 4)


# ---- of several tensors ----------------------------------------------------------------------------------------


def of(pattern: str | None, columns: int = 8, zeros: int = 4) -> Sparsity:
    return Sparsity("w", (1, columns), zeros, pattern)


@pytest.mark.parametrize(
    ("tensors", "pattern"),
    [
        ([], None),
        ([of("1:4"), of("1:4")], "1:4"),
        ([of("1:4"), of("2:4")], "2:4"),
        ([of("2:4"), of("4:8")], "4:8"),
        ([of("4:8"), of("1:4")], "4:8"),
        ([of("2:4", 12), of("4:8")], None),  # 12 is not made of groups of 8
        ([of("2:4", 12), of("1:4")], "2:4"),
        ([of("2:4"), of(None)], None),
    ],
)
def test_the_pattern_of_all(tensors, pattern):
    assert pattern_of_all(tensors) == pattern


def test_the_share_of_all_weighs_by_size():
    assert share_of_all([of(None, 8, 4), of(None, 24, 0)]) == 4 / 32
    assert share_of_all([]) == 0


def test_weights_by_module():
    names = [
        "model.layers.10.mlp.up.weight",
        "model.layers.2.mlp.up.weight",
        "model.layers.2.mlp.up.bias",
        "model.layers.2.norm.weight",
        "other.model.layers.2.mlp.up.weight",
        "model.layers.2.mlp.up.weight.more",
        "model.layersX2.mlp.up.weight",
        "model.layers.x.mlp.up.weight",
        "model.layers.2.attn.q.weight",
        "lm_head.weight",
    ]
    assert weights_by_module(names, "model.layers.{block}.", ["attn.q", "attn.k", "mlp.up"]) == {
        "attn.q": ["model.layers.2.attn.q.weight"],
        "mlp.up": ["model.layers.10.mlp.up.weight", "model.layers.2.mlp.up.weight"],
    }


# ---- from disk ---------------------------------------------------------------------------------------------------


def by_hand(name: str, tensor: Tensor) -> Sparsity:
    matrix = tensor.ndim == 2 and tensor.numel() > 0
    zeros = sum(value == 0 for value in tensor.flatten().tolist())
    return Sparsity(name, tuple(tensor.shape), zeros, pattern_by_hand(tensor.tolist()) if matrix and zeros else None)


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_a_checkpoint(tmp_path, save):
    tensors = example_tensors() | {"sparse": torch.eye(8)}
    sparsities = list(find_zeros(Checkpoint.open(save(tmp_path / "model", tensors))))
    assert {sparsity.name: sparsity for sparsity in sparsities} == {
        name: by_hand(name, tensor) for name, tensor in tensors.items()
    }
    assert [sparsity.name for sparsity in sparsities if sparsity.pattern] == ["sparse"]


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    checkpoint = Checkpoint.open(save_sharded(tmp_path / "model", example_tensors()))
    read, references = Checkpoint.read, []

    def watch_names(self, names):
        assert [kept for kept in references if kept() is not None] == []
        tensors = read(self, names)
        references.extend(weakref.ref(tensor) for tensor in tensors.values())
        assert len(tensors) == 1
        return tensors

    monkeypatch.setattr(Checkpoint, "read", watch_names)
    assert len(list(find_zeros(checkpoint))) == len(references) == 6
