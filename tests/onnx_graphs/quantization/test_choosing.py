"""Weights are taken out by the harm they do for each byte, the most harmful first, and no more than it takes."""

import pytest

from ckpt_prune.onnx.quantization.choosing import choose_weights, count_measurements

HARMS = {"a": 0.5, "b": 0.01, "c": 0.2, "d": 0.02}
SAVED = {"a": 100, "b": 100, "c": 10, "d": 100}


def together(names):
    return sum(HARMS[name] for name in names)


def alone(names):
    (name,) = names
    return HARMS[name]


@pytest.mark.parametrize(
    ("allowed", "few", "more"),
    [
        (0.73, "abcd", ""),
        (0.6, "abd", "c"),
        (0.1, "bd", "ca"),
        (0.015, "b", "cad"),
        (0.0, "", "cadb"),
    ],
)
def test_so_many_as_it_takes(allowed, few, more):
    """c harms less than a, but saves a tenth."""
    choice = choose_weights(SAVED, together, alone, allowed)
    assert ("".join(choice.few), "".join(choice.more)) == (few, more)
    assert choice.together == pytest.approx(together(choice.few))
    assert choice.alone == ({} if not more else HARMS)


def test_nothing_is_measured_alone_where_all_may_be_rounded():
    def never(names):
        raise AssertionError(names)

    assert choose_weights(SAVED, together, never, 1.0).few == tuple("abcd")


def test_where_nothing_is_enough_all_are_taken_out():
    choice = choose_weights(SAVED, lambda names: 1.0, alone, 0.5)
    assert (choice.few, choice.together) == ((), 1.0)


def test_nothing_to_choose_from():
    assert choose_weights({}, lambda names: 0.0, alone, 0.5).few == ()


MANY = {f"{role}{number}": 0.001 * weight for role, weight in (("q", 1), ("v", 9)) for number in range(40)}
MANY |= {"q17": 0.5, "v3": 0.4}
ROLES = [[name for name in MANY if name[0] == role] for role in "qv"]


def search(most, alike=ROLES, allowed=0.2):
    """Choose among many weights, and return the choice with every set that was measured for its rank."""
    measured: list[tuple[str, ...]] = []

    def lost(names):
        return sum(MANY[name] for name in names)

    def rank(names):
        measured.append(tuple(names))
        return lost(names)

    return choose_weights(dict.fromkeys(MANY, 100), lost, rank, allowed, alike=alike, most=most), measured


def test_of_many_weights_those_alike_are_measured_at_once_and_the_worst_runs_halved():
    choice, measured = search(26)
    assert len(measured) == 26
    assert measured[:2] == [tuple(role) for role in ROLES]
    assert set(measured[2]) < set(ROLES[1])  # the role that loses more
    assert choice.more[:2] == ("q17", "v3")
    assert choice.alone["q17"] == pytest.approx(0.5)
    assert (choice.at_once["q17"], choice.at_once["v3"]) == (1, 1)
    assert all(name.startswith("v") for name in choice.more[2:])
    assert choice.together <= 0.2
    assert sorted(choice.few + choice.more) == sorted(MANY)


def test_what_is_measured_at_once_shares_what_it_loses_by_bytes():
    choice, measured = search(2)
    assert measured == [tuple(role) for role in ROLES]
    assert choice.at_once == dict.fromkeys(MANY, 40)
    assert choice.alone["q0"] == pytest.approx(sum(MANY[name] for name in ROLES[0]) / 40)


def test_a_larger_search_finds_no_worse_a_choice():
    sizes = [len(search(most)[0].more) for most in (2, 14, 26, 80)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(search(80, alike=())[0].more)  # each alone


def test_roles_beyond_what_may_be_measured_are_halved_as_one():
    choice, measured = search(5, alike=[[name] for name in MANY])
    assert measured[0] == tuple(MANY)
    assert len(measured) == 5
    assert choice.together <= 0.2


def test_so_many_sets_are_measured():
    assert [count_measurements(count) for count in (0, 1, 8, 64, 211)] == [(0, 1), (1, 1), (8, 4), (64, 7), (64, 9)]
    _, measured = search(64)
    assert len(measured) <= 64
