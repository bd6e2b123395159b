"""Mutants: one mistake at one place, the same ones for a seed, and the tests that lead to it."""

import ast
from pathlib import Path

import pytest

from tools import mutants

SOURCE = '''"""A page."""
limit: int = 3


def ends(values: list[float], at: int = 0) -> float:
    """Return 1 of 2."""
    if at >= limit and values:
        raise ValueError(f"{at:2}")
    values.append(0.5)
    return max(values) - values[at]
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of one module, and tests of which one comes to it by way of another."""
    (tmp_path / "ckpt_prune/room").mkdir(parents=True)
    (tmp_path / "tests/room").mkdir(parents=True)
    (tmp_path / "ckpt_prune/room/ends.py").write_text(SOURCE)
    (tmp_path / "ckpt_prune/room/by_way.py").write_text("from ckpt_prune.room.ends import ends\n")
    (tmp_path / "tests/room/test_far.py").write_text("import ckpt_prune.room.by_way\n")
    (tmp_path / "tests/room/test_none.py").write_text("import json\n")
    monkeypatch.chdir(tmp_path)
    mutants.imported.cache_clear()
    return tmp_path


def test_every_kind_of_mistake_is_one_place_that_still_is_python(place: Path) -> None:
    found = mutants.choose_mutants("room", 99, 0)
    assert {mutant.line for mutant in found} == {2, 5, 7, 8, 9, 10}
    for mutant in found:
        before, after = SOURCE.splitlines(), mutant.text.splitlines()
        ast.parse(mutant.text)
        assert [at for at, (was, now) in enumerate(zip(before, after, strict=True), 1) if was != now] == [mutant.line]


def test_a_seed_makes_the_same_mutants_again(place: Path) -> None:
    chosen = [[mutant.name for mutant in mutants.choose_mutants("room", 3, seed)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_the_nearest_tests_are_run_and_those_further_off_if_there_are_none(place: Path) -> None:
    (mutant,) = mutants.choose_mutants("room", 1, 0)
    far, near = "tests/room/test_far.py", "tests/room/test_near.py"
    assert mutants.choose_tests(mutant, "room", [], far=False) == [far]
    Path(near).write_text("from ckpt_prune.room.ends import ends\n")
    assert mutants.choose_tests(mutant, "room", [], far=False) == [near]
    assert mutants.choose_tests(mutant, "room", [], far=True) == [near, far]
