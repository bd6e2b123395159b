"""Calibration, gradients, effects, ranking and compensation are timed apart (CORP's Table 6), whatever is pruned."""

import pytest

from ckpt_prune.stages.recipe_files import load_recipe
from tests.families import job_on, prune, windows

ALL = {"calibration", "ranking", "compensation"}
MEASURED = ("measuring", {"calibration"})
BEHIND = [("rest", set()), ("publishing", set())]


def phases_of(report):
    return [(stage["name"], set(stage["phases"])) for stage in report["stages"]]


@pytest.mark.parametrize(
    ("name", "ratio", "before", "blocks"),
    [
        ("ridge", 0.25, [], ALL),  # measured on the pruned prefix
        ("flap", 0.25, [MEASURED], ALL),  # measured before
        ("rotary", 0.25, [], ALL),
        ("values", 0.5, [], ALL),
        ("best-uniform", 0.25, [("measuring", ALL | {"gradients", "effects"}), ("ranking", {"ranking"})], ALL),
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
    assert phases_of(prune(settled, tmp_path / "out")) == [*before, ("blocks", blocks), *BEHIND]
