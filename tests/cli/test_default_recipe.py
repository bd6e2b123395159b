"""What is done for those who name no recipe: stock classes, and a line on what widths per block would do."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ckpt_prune.planning.shipped import DEFAULT_RECIPE, WIDER_CHOICE
from tests import families
from tests.cli.running import TEXT, ok, read_json, run
from tests.oracles import whole_best

SIZE = ("--target-params", "70%")
QUICK = [f"--set=spaces.{space}.compensation.lambda_grid=[0.01,1]" for space in ("heads", "mlp")]
LINE = re.compile(
    rf"widths per block \(--recipe {WIDER_CHOICE}\) would lose "
    r"(less \(predicted: \d+% less\), and need remote code|as much, as predicted)"
)


@pytest.fixture(scope="module")
def weighed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("default")
    shutil.copytree(made / "dense", folder / "llama")
    shutil.copy(made / "calib.txt", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ok("calibrate", "llama", *TEXT, "--folds", "4", "--effects", "-o", "weighed")
    return folder


@pytest.fixture
def here(weighed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working folder, with `llama`, `calib.txt` and `weighed`; outputs go to the folder returned."""
    monkeypatch.chdir(weighed)
    return tmp_path


def told(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("widths per block")]


def test_an_output_of_the_default_recipe_loads_with_stock_classes(here):
    said = ok("prune", "llama", *SIZE, *QUICK, *TEXT, "-o", str(here / "out"))
    assert read_json(here / "out" / "ckpt_prune.json")["recipe"]["name"] == DEFAULT_RECIPE == "best-uniform"
    assert "auto_map" not in read_json(here / "out" / "config.json")
    families.stock(here / "out")
    (line,) = told(said)
    assert LINE.fullmatch(line)


def test_a_plan_and_a_dry_run_tell_what_widths_per_block_would_do(here):
    common = ("llama", "--statistics", "weighed", *SIZE, *QUICK)
    (planned,) = told(ok("plan", *common))
    dry = ("prune", *common, "-o", str(here / "out"), "--dry-run")
    assert told(ok(*dry)) == [planned]
    assert planned in json.loads(ok(*dry, "--json"))["messages"]
    assert LINE.fullmatch(planned)


@pytest.mark.parametrize("more", [("--recipe", "best-uniform"), ("--recipe", "best"), ("--set", "widths=per_layer")])
def test_who_chose_is_not_told(here, more):
    assert told(ok("plan", "llama", "--statistics", "weighed", *SIZE, *QUICK, *more)) == []


def test_what_is_predicted_is_what_the_other_recipe_is_decided_by(here):
    """The figure in the line is of the two allocations of the same curves, worked out here from two plans."""
    (line,) = told(ok("plan", "llama", "--statistics", "weighed", *SIZE, *QUICK))
    effects = read_json("weighed/statistics.json")["effects"]

    def loss(recipe: str) -> float:
        plan = str(here / f"{recipe}.json")
        ok("plan", "llama", "--recipe", recipe, "--statistics", "weighed", *SIZE, *QUICK, "-o", plan)
        return sum(whole(site, effects[site["consumer"]]) for site in read_json(plan)["sites"])

    uniform, free = loss("best-uniform"), loss("best")
    assert free <= uniform
    saved = f"{1 - free / uniform:.0%}"
    assert f"predicted: {saved} less" in line if saved != "0%" else "as much" in line


def whole(site, effects) -> float:
    """A site's effect at the units it loses: the curve of its scores through the measured points."""
    dropped = site["units"] - len(site["kept"])
    curve = [0.0, *sorted(site["scores"])]
    return float(whole_best.as_effects(curve, [tuple(each) for each in effects])[dropped])


def test_help_names_it():
    for command in ("prune", "plan"):
        assert "[default: best-uniform]" in " ".join(run(command, "--help").output.split())
