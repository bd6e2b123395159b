"""LLM-Pruner's recipes and blocks that stay whole, from the command line."""

from pathlib import Path

import pytest

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from tests import encoders
from tests.cli.running import TEXT, ok, read_json, read_refusal

RECIPE = ("--recipe", "llm-pruner-taylor2")
RATIO = ("--ratio", "0.5")
WEIGHTS = "model.safetensors"


@pytest.fixture
def here(place: Path) -> Path:
    """A working folder with `opt`, of three blocks, and `calib.txt`."""
    with quiet_transformers():
        encoders.make(place / "opt", "opt")
    return place


def kept_units(report: Path | str) -> dict[tuple[int, str], list[int]]:
    return {(site["block"], site["space"]): site["kept"] for site in read_json(str(report))["sites"]}


def test_statistics_and_text_give_the_same_and_the_units_of_least_importance_go(here):
    ok("calibrate", "opt", *TEXT, "--collect", "moments,taylor", "-o", "told")
    ok("prune", "opt", *RECIPE, *RATIO, "--statistics", "told", "-o", "a")
    ok("prune", "opt", *RECIPE, *RATIO, *TEXT, "-o", "b")
    assert (Path("a") / WEIGHTS).read_bytes() == (Path("b") / WEIGHTS).read_bytes()
    sites = kept_units("a/ckpt_prune.json")
    model = Model.open("opt")
    statistics = Statistics(Path("told"))
    for (block, space), units in sites.items():
        scores = statistics.read_taylor(block)[model.moments_name(block, space)].second
        expected = range(len(scores)) if block != 1 else scores.argsort(descending=True)[: -(-len(scores) // 2)]
        assert units == sorted(int(unit) for unit in expected)
    small = ckpt_prune.load("a")
    assert sum(p.numel() for p in small.parameters()) < cost_of(model).parameters


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_statistics_without_gradients(here):
    ok("calibrate", "opt", *TEXT, "--collect", "moments", "-o", "bare")
    assert read_refusal("prune", "opt", *RECIPE, "--statistics", "bare", "-o", "out") == (
        "recipe llm-pruner-taylor2 ranks units by gradients of the loss, and bare has none: run `ckpt-prune calibrate "
        "--collect moments,taylor`"
    )
    assert read_refusal("prune", "opt", *RECIPE, "-o", "out") == (
        "recipe llm-pruner-taylor2 needs statistics: give --text FILE to measure them, or --statistics STATS"
    )
