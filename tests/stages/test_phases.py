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
    report = prune(settled, tmp_path / "out")
    assert phases_of(report) == [*before, ("blocks", blocks), *BEHIND]
    (walked,) = (stage for stage in report["stages"] if stage["name"] == "blocks")
    assert [each["block"] for each in walked["blocks"]] == [0, 1, 2]
    assert {name for each in walked["blocks"] for name in each["phases"]} == blocks
    for name in blocks:  # the stream's beginning is of no block; each figure rounds at 5e-5
        parts = [each["phases"].get(name, 0) for each in walked["blocks"]]
        assert 0 < sum(parts) <= walked["phases"][name] + 5e-5 * (len(parts) + 1)
    assert sum(each["seconds"] for each in walked["blocks"]) <= walked["seconds"] + 1e-3
