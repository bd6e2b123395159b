"""What is taken out: the most harmful by the byte, and no more than it takes."""

import pytest

from ckpt_prune.quantising.choosing import choose

HARMS = {"a": 0.5, "b": 0.01, "c": 0.2, "d": 0.02}
SAVED = {"a": 100, "b": 100, "c": 10, "d": 100}


def together(names):
    return sum(HARMS[name] for name in names)


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
    found = choose(SAVED, together, HARMS.__getitem__, allowed)
    assert ("".join(found.few), "".join(found.more)) == (few, more)
    assert found.together == pytest.approx(together(found.few))
    assert found.alone == ({} if not more else HARMS)


def test_nothing_is_measured_alone_where_all_may_be_rounded():
    def alone(name):
        raise AssertionError(name)

    assert choose(SAVED, together, alone, 1.0).few == tuple("abcd")


def test_where_nothing_is_enough_all_are_taken_out():
    found = choose(SAVED, lambda names: 1.0, HARMS.__getitem__, 0.5)
    assert (found.few, found.together) == ((), 1.0)


def test_nothing_to_choose_from():
    assert choose({}, lambda names: 0.0, HARMS.__getitem__, 0.5).few == ()
