"""Units take the same lines of an axis as in axes written out line by line, and a space names its modules."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_prune.model.descriptions import known_families, load_family, variants_of
from ckpt_prune.model.short_forms import complete_description
from ckpt_prune.model.spaces import (
    BESIDE,
    COUPLED,
    KIND_OF_SPACE,
    ColumnSpace,
    Incidence,
    LogitSpace,
    RotarySpace,
)

SIZES = {"head_dim": 3, "group": 2, "heads": 4, "mlp": 5}
FAMILIES = [(name, variant) for name in known_families() for variant in (None, *variants_of(name))]

products = st.lists(st.sampled_from(["head_dim", "group", 1, 2]), max_size=2)


def dimension(name: str) -> int:
    return SIZES[name]


def product(dimensions: list[str | int]) -> int:
    value = 1
    for factor in dimensions:
        value *= factor if isinstance(factor, int) else SIZES[factor]
    return value


def axis(incidence: Incidence, count: int) -> list[int | None]:
    """The unit of every line, None where a line has none: two more stand behind."""
    before: list[int | None] = [None] * sum(product(segment) for segment in incidence.after)
    run = [unit for unit in range(count) for _ in range(product(incidence.lines_per_unit))]
    return before + run * incidence.copies + [None, None]


@given(
    dimensions=products,
    copies=st.integers(1, 3),
    after=st.lists(products, max_size=3),
    units=st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_lines_are_those_of_the_units(dimensions, copies, after, units):
    incidence = Incidence(module="m", lines_per_unit=dimensions, copies=copies, after=after)
    chosen = [unit for unit, taken in enumerate(units) if taken]
    lines = incidence.lines(torch.tensor(chosen, dtype=torch.int64), len(units), dimension)
    assert lines.dtype == torch.int64
    assert lines.tolist() == [line for line, unit in enumerate(axis(incidence, len(units))) if unit in chosen]
    assert len(lines) == len(chosen) * incidence.per_unit(dimension)


@pytest.mark.parametrize(
    ("given_", "units", "count", "lines"),
    [
        ({}, [0, 2], 4, [0, 2]),
        ({"lines_per_unit": ["head_dim"]}, [1], 4, [3, 4, 5]),
        ({"lines_per_unit": ["group", "head_dim"]}, [1], 2, [6, 7, 8, 9, 10, 11]),
        # A SwiGLU's gate and up in one tensor.
        ({"copies": 2}, [0, 3], 5, [0, 3, 5, 8]),
        # Values behind as many queries and keys.
        (
            {"lines_per_unit": ["head_dim"], "after": [["heads", "head_dim"], ["heads", "head_dim"]]},
            [2],
            4,
            [30, 31, 32],
        ),
        # Values and gates of a head that alternate.
        ({"lines_per_unit": [2, "head_dim"]}, [1], 4, [6, 7, 8, 9, 10, 11]),
        ({"after": [[1], [2, "group"]]}, [0, 1], 3, [5, 6]),
        ({"copies": 3}, [], 5, []),
        # Queries, keys and values of a head that alternate: its values.
        (
            {"lines_per_unit": ["head_dim"], "after": [[2, "head_dim"]], "stride": [[3, "head_dim"]]},
            [0, 1],
            2,
            [6, 7, 8, 15, 16, 17],
        ),
        # The queries of a group before its key and value.
        ({"lines_per_unit": ["group"], "stride": [["group"], [2]]}, [1, 2], 3, [4, 5, 8, 9]),
        ({"lines_per_unit": [1], "stride": [[3]], "copies": 2}, [1], 2, [3, 9]),
    ],
)
def test_lines_by_hand(given_, units, count, lines):
    incidence_lines = Incidence(module="m", **given_).lines(torch.tensor(units, dtype=torch.int64), count, dimension)
    assert incidence_lines.tolist() == lines


def test_three_copies_are_one_projection_after_another():
    """Queries, keys and values in one tensor are one incidence of three copies, or three behind each other."""
    units = torch.tensor([0, 3])
    fused = Incidence(module="m", lines_per_unit=["head_dim"], copies=3)
    projection = ["heads", "head_dim"]
    apart = [Incidence(module="m", lines_per_unit=["head_dim"], after=[projection] * before) for before in range(3)]
    assert torch.equal(fused.lines(units, 4, dimension), torch.cat([i.lines(units, 4, dimension) for i in apart]))
    assert fused.per_unit(dimension) == sum(i.per_unit(dimension) for i in apart) == 9


def logits(**changes):
    rows = [Incidence(module="q"), Incidence(module="k")]
    values = {"unit": "dimension of a head", "units": "head_dim", "for_each": "heads", "rounding": "floor"}
    return LogitSpace(**{**values, "rows": rows, "config": {}, "kind": "logits", **changes})


def columns(**changes):
    rows = [Incidence(module="gate_up", copies=2), Incidence(module="extra")]
    values = {"unit": "column", "units": "mlp", "rounding": "ceil", "columns": Incidence(module="down")}
    return ColumnSpace(**{**values, "rows": rows, "config": {}, "kind": "columns", **changes})


def test_units_that_stand_side_by_side():
    """Units that stand side by side are kept in equal numbers in each head, and a site counts all of them."""
    space = logits()
    assert (space.count(dimension), space.copies(dimension), space.site_units(dimension)) == (3, 4, 12)
    assert space.first(2, dimension).tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert space.first(3, dimension).tolist() == list(range(12))
    plain = columns()
    assert (plain.count(dimension), plain.copies(dimension), plain.site_units(dimension)) == (5, 1, 5)
    assert plain.first(3, dimension).tolist() == [0, 1, 2]


def test_what_a_space_says_of_its_modules():
    space = columns()
    assert space.modules == ["gate_up", "extra", "down"]
    assert space.readers == ["gate_up", "extra"]
    assert space.consumer == space.measured == "down"
    assert space.solved_from == space.list_rewritten("none") == space.list_rewritten("ridge") == ["down"]
    space = logits()
    assert space.modules == space.readers == space.solved_from == ["q", "k"]
    assert (space.measured, space.list_rewritten("logit"), space.list_rewritten("none")) == ("q", ["q", "k"], [])
    fused = [Incidence(module="qkv"), Incidence(module="qkv", after=[["heads", "head_dim"]])]
    assert logits(rows=fused).modules == ["qkv"]


@pytest.mark.parametrize(
    ("pairs", "query", "key"),
    [
        # Two KV heads of two query heads of three pairs each: the last pair of the first, the first of the second.
        ("halves", [2, 5, 8, 11, 12, 15, 18, 21], [2, 5, 6, 9]),
        ("neighbours", [4, 5, 10, 11, 12, 13, 18, 19], [4, 5, 6, 7]),
    ],
)
def test_a_rotary_pair_lies_on_its_key_and_on_every_query_that_shares_it(pairs, query, key):
    stated = {"attention": {"query": "q", "key": "k"}, "rotary": {"pairs": pairs, "angles": pairs}}
    space = RotarySpace.model_validate(complete_description(stated)["spaces"]["rotary"])
    sizes = {"pairs": 3, "group": 2, "kv_heads": 2}
    assert (space.count(sizes.__getitem__), space.site_units(sizes.__getitem__)) == (3, 6)
    lines = [
        incidence.lines(torch.tensor([2, 3]), 6, sizes.__getitem__).sort().values.tolist() for incidence in space.rows
    ]
    assert lines == [query, key]
    assert [incidence.per_unit(sizes.__getitem__) for incidence in space.rows] == [4, 2]
    assert (space.list_rewritten("factors"), space.list_rewritten("none")) == (["q"], [])


@pytest.mark.parametrize(("name", "variant"), FAMILIES)
def test_what_is_said_of_spaces_without_a_model_holds_for_every_family(name, variant):
    """Spaces of every family end, stand side by side and cross as listed, the inner one first except for values."""
    spaces = load_family(name, variant).spaces
    assert {s: space.kind for s, space in spaces.items()} == {s: KIND_OF_SPACE[s] for s in spaces}
    places = {s: {(i.module, axis) for axis, i in space.incidences} for s, space in spaces.items()}
    crossing = {frozenset(pair) for pair in combinations(spaces, 2) if places[pair[0]] & places[pair[1]]}
    coupled = [pair for pair in COUPLED if set(pair) <= spaces.keys()]
    assert crossing == {frozenset(pair) for pair in coupled}
    order = list(spaces)
    assert all((order.index(inner) < order.index(outer)) == (inner != "values") for inner, outer in coupled)
    assert {s for s, space in spaces.items() if space.for_each is not None} == BESIDE & spaces.keys()
    for within, other in (
        (space, spaces[space.part_of]) for space in spaces.values() if getattr(space, "part_of", None)
    ):
        assert (within.consumer, within.for_each) == (other.consumer, other.units)


@pytest.mark.parametrize(("name", "variant"), FAMILIES)
def test_grouped_queries_can_go_wherever_groups_can(name: str, variant: str | None) -> None:
    """Unless one projection makes queries, keys and values, or the class knows heads as wide together as the stream."""
    family = load_family(name, variant)
    heads = family.spaces.get("heads")
    groups, queries = ([*family.dimensions.get(name, ()), None][0] for name in ("kv_heads", "query_heads"))
    grouped = groups is not None and groups != queries
    apart = family.attention.query != family.attention.key
    can_go = isinstance(heads, ColumnSpace) and heads.whole is None and heads.fixed is None
    assert ("queries" in family.spaces) is (can_go and grouped and apart)
