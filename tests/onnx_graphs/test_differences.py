import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckpt_prune.onnx import comparison
from ckpt_prune.onnx.comparison import FLOOR, compare_outputs, flatten_positions

NUMBERS = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    rows, units = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    values = st.lists(st.lists(NUMBERS, min_size=units, max_size=units), min_size=rows, max_size=rows)
    return torch.tensor(draw(values)), torch.tensor(draw(values))


def by_hand(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, float | None]:
    """The figures from their definitions, in Python's own floats."""
    flat = [(a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    largest = max(abs(b) for _, b in flat)
    apart = [abs(a - b) for a, b in flat]
    relative = [x / max(abs(b), FLOOR * largest) if x else 0.0 for x, (_, b) in zip(apart, flat, strict=True)]
    return {
        "max_abs": max(apart),
        "mean_abs": sum(apart) / len(apart),
        "max_rel": max(relative, default=0.0),
        "mean_rel": sum(relative) / len(relative),
        "largest": largest,
        "agreement": sum(a.index(max(a)) == b.index(max(b)) for a, b in zip(ours, theirs, strict=True)) / len(ours),
    }


@given(pairs(), st.integers(1, 7))
def test_the_figures_are_those_of_their_definitions(pair: tuple[Tensor, Tensor], chunk: int) -> None:
    ours, theirs = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "CHUNK", chunk)  # rows one by one, or several at a time
        if not theirs.any() and ours.any():
            assert compare_outputs(ours, theirs).max_rel == math.inf
            return
        figures = compare_outputs(ours, theirs, classes=True)
    for name, value in by_hand(ours.tolist(), theirs.tolist()).items():
        assert getattr(figures, name) == pytest.approx(value, rel=1e-12), name
    position, unit = figures.worst
    assert abs(ours[position, unit].double() - theirs[position, unit].double()).item() == figures.max_abs


@given(pairs(), st.integers(-20, 20))
def test_scaling_both_sides_scales_what_is_absolute_and_nothing_else(pair: tuple[Tensor, Tensor], power: int) -> None:
    before, after = compare_outputs(*pair), compare_outputs(*(side.double() * 2.0**power for side in pair))
    assert after.max_abs == before.max_abs * 2.0**power
    assert after.largest == before.largest * 2.0**power
    assert after.max_rel == pytest.approx(before.max_rel, rel=1e-12)
    assert after.worst == before.worst


@given(pairs(), st.randoms())
def test_padding_changes_nothing(pair: tuple[Tensor, Tensor], random: object) -> None:
    """Rows of NaN in between, masked out, are as if they were not there."""
    rows, units = pair[0].shape
    keep = torch.zeros(rows, 3, dtype=torch.bool)
    token = [random.randrange(3) for _ in range(rows)]  # type: ignore[attr-defined]
    keep[torch.arange(rows), token] = True
    padded = [torch.full((rows, 3, units), math.nan) for _ in pair]
    for side, wide in zip(pair, padded, strict=True):
        wide[torch.arange(rows), token] = side
    assert compare_outputs(*(flatten_positions(wide, keep) for wide in padded)) == compare_outputs(*pair)


def test_positions_are_rows_of_what_counts() -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    keep = torch.tensor([[True, False, True], [False, True, False]])
    assert flatten_positions(values, keep).tolist() == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert flatten_positions(values).shape == (2, 12)
    assert flatten_positions(values[..., 0], keep).tolist() == [[0], [8], [16]]


def test_the_floor_is_relative_to_the_largest_reference() -> None:
    figures = compare_outputs(torch.tensor([[1000.0, 0.5]]), torch.tensor([[1000.0, 0.0]]))
    assert figures.max_abs == 0.5
    assert figures.max_rel == 0.5  # of 1e-3 x 1000
    assert figures.worst == (0, 1)


@pytest.mark.parametrize(
    ("a", "b"), [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan), (math.inf, 1.0), (math.inf, -math.inf)]
)
def test_what_is_no_finite_number_is_infinitely_wrong(a: float, b: float) -> None:
    figures = compare_outputs(torch.tensor([[1.0, 2.0], [3.0, a]]), torch.tensor([[1.0, 2.0], [3.0, b]]))
    assert figures.max_abs == figures.mean_abs == figures.max_rel == figures.mean_rel == math.inf
    assert figures.worst == (1, 1)
    assert figures.largest == 3.0


def test_equal_infinities_are_no_difference() -> None:
    masked = torch.tensor([[-math.inf, 2.0]])
    figures = compare_outputs(masked, masked.clone(), classes=True)
    assert (figures.max_abs, figures.mean_rel, figures.largest, figures.agreement) == (0.0, 0.0, 2.0, 1.0)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot compare \[1, 2\] with \[1, 3\]"):
        compare_outputs(torch.zeros(1, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="cannot compare"):
        compare_outputs(torch.zeros(0, 2), torch.zeros(0, 2))
