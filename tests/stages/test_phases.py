"""Calibration, ranking and compensation are timed apart (CORP's Table 6), whatever is pruned."""

import itertools
from types import SimpleNamespace

import pytest

from ckpt_prune.common import phases
from ckpt_prune.recipe.reading import load_recipe
from tests.families import calibrate, job_on, prune, windows

ALL = {"calibration", "ranking", "compensation"}
MEASURED = ("measuring", {"calibration"})
BEHIND = [("rest", set()), ("publishing", set())]


def found(report):
    return [(stage["name"], set(stage["phases"])) for stage in report["stages"]]


@pytest.mark.parametrize(
    ("name", "ratio", "before", "blocks"),
    [
        ("ridge", 0.25, [], ALL),  # measured on the pruned prefix
        ("flap", 0.25, [MEASURED], ALL),  # measured before
        ("rotary", 0.25, [], ALL),
        ("values", 0.5, [], ALL),
        ("best-uniform", 0.25, [("measuring", ALL), ("ranking", {"ranking"})], ALL),  # sites are tried out
        ("wanda-50", None, [], {"calibration", "ranking"}),
        ("sparsegpt-50", None, [], {"calibration", "compensation"}),
        ("svd-llm", 0.5, [MEASURED], {"calibration", "compensation"}),
    ],
)
def test_phases_of_a_run(dense, tmp_path, name, ratio, before, blocks):
    folder = dense.folder("mistral" if name == "values" else "llama")
    settled = job_on(
        folder, load_recipe(name, ("container=any",) if name != "wanda-50" else (), ratio), live=windows(), folds=4
    )
    assert found(prune(settled, tmp_path / "out")) == [*before, ("blocks", blocks), *BEHIND]


def test_seconds_of_each_phase(dense, tmp_path, monkeypatch):
    """A clock that goes on by a second whenever it is looked at: once where a phase begins, and once where it ends."""
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    settled = job_on(
        dense.folder("llama"), load_recipe("flap", (), 0.25), calibrate(dense.folder("llama"), tmp_path / "stats")
    )
    (blocks, *rest) = prune(settled, tmp_path / "out")["stages"]
    # Three blocks of two sites: each is compensated before and after it is ranked. Moments of both are read at once.
    assert blocks["phases"] == {"calibration": 1 + 2 * 3, "compensation": 2 * 2 * 3, "ranking": 2 * 3}
    assert [stage["phases"] for stage in rest] == [{}, {}]
