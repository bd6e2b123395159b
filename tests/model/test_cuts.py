"""Which rows and columns stay, against index lists written out head by head and column by column."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckpt_prune.model.cuts import list_cuts, positions_among, remaining_lines
from ckpt_prune.model.descriptions import load_family
from ckpt_prune.model.spaces import ColumnSpace, Incidence, LogitSpace

HEADS, HEAD_DIM, HIDDEN, MLP = 3, 2, 4, 5
WIDTHS = {"heads": HEADS, "head_dim": HEAD_DIM, "mlp": MLP}
WHOLE = ["heads", "head_dim"]
ROWS = HEADS * HEAD_DIM


def dimension(name: str) -> int:
    return WIDTHS[name]


def column_space(units: str, rows: list[Incidence], columns: Incidence) -> ColumnSpace:
    return ColumnSpace(kind="columns", unit=units, units=units, rounding="floor", rows=rows, columns=columns, config={})


def logit_space(rows: list[Incidence]) -> LogitSpace:
    return LogitSpace(
        kind="logits", unit="dimension", units="head_dim", for_each="heads", rounding="floor", rows=rows, config={}
    )


def heads(module: str, **where) -> Incidence:
    return Incidence(module=module, lines_per_unit=["head_dim"], **where)


APART = {
    "qk": logit_space([Incidence(module="q"), Incidence(module="k")]),
    "heads": column_space("heads", [heads("q"), heads("k"), heads("v")], heads("o")),
    "mlp": column_space("mlp", [Incidence(module="in", copies=2)], Incidence(module="out")),
}
"""Each projection in a tensor of its own, gate and up in one."""
FUSED = {
    "qk": logit_space([Incidence(module="qkv"), Incidence(module="qkv", after=[WHOLE])]),
    "heads": column_space("heads", [heads("qkv", copies=3)], heads("o")),
    "mlp": column_space("mlp", [Incidence(module="in", copies=2)], Incidence(module="out")),
}
"""Queries, keys and values in one tensor."""
SIZES = {"q": (ROWS, HIDDEN), "k": (ROWS, HIDDEN), "v": (ROWS, HIDDEN), "o": (HIDDEN, ROWS)}
SIZES |= {"in": (2 * MLP, HIDDEN), "out": (HIDDEN, MLP)}
FUSED_SIZES = {"qkv": (3 * ROWS, HIDDEN)} | {module: SIZES[module] for module in ("o", "in", "out")}

subsets = {
    "qk": st.sets(st.integers(0, ROWS - 1)),
    "heads": st.sets(st.integers(0, HEADS - 1)),
    "mlp": st.sets(st.integers(0, MLP - 1)),
}
kept_units = st.fixed_dictionaries({}, optional=subsets)
"""Of any of the spaces, also of none, any units; a head need not keep as many dimensions as the next."""


def family_of(spaces):
    return load_family("vit").model_copy(update={"spaces": spaces})


def tensors(kept):
    return {space: torch.tensor(sorted(units), dtype=torch.int64) for space, units in kept.items()}


def by_hand(kept) -> dict[str, list[int]]:
    """Rows of q, k, v and of gate and up, and columns of o and out, that stay."""
    in_heads = [row for row in range(ROWS) if row // HEAD_DIM in kept.get("heads", range(HEADS))]
    in_both = [row for row in in_heads if row in kept.get("qk", range(ROWS))]
    columns = sorted(kept.get("mlp", range(MLP)))
    return {
        "q": in_both,
        "k": in_both,
        "v": in_heads,
        "o": in_heads,
        "in": [*columns, *(MLP + column for column in columns)],
        "out": columns,
    }


def cut(weight: Tensor, dim: int, kept_lines, module: str) -> Tensor:
    axis_and_lines = kept_lines.get((module, dim))
    return weight if axis_and_lines is None else weight.index_select(dim, axis_and_lines[1])


@given(kept=kept_units)
def test_cutting_is_cutting_by_index_lists(kept):
    """Heads and dimensions of heads cross on q and k: a row stays where both keep it."""
    kept_lines, expected = remaining_lines(family_of(APART), dimension, tensors(kept), SIZES), by_hand(kept)
    for module, (rows, columns) in SIZES.items():
        weight = torch.arange(rows * columns).view(rows, columns)
        dim = 1 if module in ("o", "out") else 0
        assert torch.equal(
            cut(weight, dim, kept_lines, module),
            weight.index_select(dim, torch.tensor(expected[module], dtype=torch.int64)),
        )
        assert (module, 1 - dim) not in kept_lines


@given(kept=kept_units)
def test_fused_tensors_keep_the_same(kept):
    """The tensor that stays of a fused one is what stays of its parts, side by side."""
    kept_lines, expected = remaining_lines(family_of(FUSED), dimension, tensors(kept), FUSED_SIZES), by_hand(kept)
    parts = [part * ROWS + row for part, name in enumerate("qkv") for row in expected[name]]
    lines = {"qkv": parts, "in": expected["in"], "o": expected["o"], "out": expected["out"]}
    for module, (rows, columns) in FUSED_SIZES.items():
        weight = torch.arange(rows * columns).view(rows, columns)
        dim = 1 if module in ("o", "out") else 0
        assert torch.equal(
            cut(weight, dim, kept_lines, module),
            weight.index_select(dim, torch.tensor(lines[module], dtype=torch.int64)),
        )
        assert (module, 1 - dim) not in kept_lines


@given(kept=kept_units, more=kept_units)
def test_a_tensor_that_is_cut_already_is_cut_further(kept, more):
    """By the places of its lines among those that stay: one cut after the other is one cut of both."""
    family = family_of(APART)
    both = {
        s: kept.get(s, set(range(n))) & more.get(s, set(range(n))) for s, n in (("qk", 6), ("heads", 3), ("mlp", 5))
    }
    first, last = (remaining_lines(family, dimension, tensors(chosen), SIZES) for chosen in (kept, both))
    for (module, dim), (_, lines) in last.items():
        weight = torch.arange(SIZES[module][0] * SIZES[module][1]).view(SIZES[module])
        present = first[module, dim][1] if (module, dim) in first else torch.arange(SIZES[module][dim])
        once = cut(weight, dim, first, module)
        assert torch.equal(once.index_select(dim, positions_among(lines, present)), cut(weight, dim, last, module))


@pytest.mark.parametrize(("spaces", "sizes"), [(APART, SIZES), (FUSED, FUSED_SIZES)])
def test_a_bias_has_the_rows_of_its_weight(spaces, sizes):
    """A bias loses the rows that its weight loses; a module that loses columns keeps its bias."""
    kept = tensors({"qk": {0, 3}, "heads": {0, 1}, "mlp": {1}})
    kept_lines = remaining_lines(family_of(spaces), dimension, kept, sizes)
    listed = {(module, kind): (dim, lines) for module, kind, dim, lines in list_cuts(kept_lines)}
    consumers = {"o", "out"}
    assert listed.keys() == {
        (module, kind)
        for module, kind in product(sizes, ("weight", "bias"))
        if (kind, module in consumers) != ("bias", True)
    }
    for module in sizes.keys() - consumers:
        assert listed[module, "bias"][0] == 0
        assert torch.equal(listed[module, "bias"][1], listed[module, "weight"][1])


def test_whole_spaces():
    """A space that keeps all of its units is listed, with every line."""
    kept_lines = remaining_lines(family_of(APART), dimension, tensors({"mlp": set(range(MLP))}), SIZES)
    assert {place: lines.tolist() for place, (_, lines) in kept_lines.items()} == {
        ("in", 0): list(range(2 * MLP)),
        ("out", 1): list(range(MLP)),
    }
    assert remaining_lines(family_of(APART), dimension, {}, SIZES) == {}
