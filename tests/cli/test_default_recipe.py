"""A run that names no recipe writes stock classes, and says in a line what widths per block would do."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE, WIDER_CHOICE
from ckpt_prune.scoring.costs import DropOrder
from tests import families
from tests.cli.running import TEXT, drop_time_line, listing, ok, read_json, without_quality
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
        ok("calibrate", "llama", *TEXT, "--folds", "4", "-o", "weighed")
    return folder


@pytest.fixture
def here(weighed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working folder, with `llama`, `calib.txt` and `weighed`; outputs go to the folder returned."""
    monkeypatch.chdir(weighed)
    return tmp_path


def lines_on_widths(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("widths per block")]


def test_an_output_of_the_default_recipe_loads_with_stock_classes(here):
    output = ok("prune", "llama", *SIZE, *QUICK, *TEXT, "-o", str(here / "out"))
    assert read_json(here / "out" / "ckpt_prune.json")["recipe"]["name"] == DEFAULT_RECIPE == "best-uniform"
    assert "auto_map" not in read_json(here / "out" / "config.json")
    families.stock(here / "out")
    (line,) = lines_on_widths(output)
    assert LINE.fullmatch(line)


def test_a_plan_and_a_dry_run_tell_what_widths_per_block_would_do(here):
    common = ("llama", "--statistics", "weighed", *SIZE, *QUICK)
    (planned,) = lines_on_widths(ok("plan", *common))
    dry = ("prune", *common, "-o", str(here / "out"), "--dry-run")
    assert lines_on_widths(ok(*dry)) == [planned]
    assert planned in json.loads(ok(*dry, "--json"))["messages"]
    assert LINE.fullmatch(planned)


def whole(site, index) -> float:
    """A site's effect at the units it loses: of the score that ranked them, its curve through what was measured."""
    statistics, name, score = Statistics(Path("weighed")), site["consumer"], site["score"]
    usual = index["predicted"][name]["obs"]
    points = [
        (count, value * true / predicted)
        for (count, value), (_, predicted), (_, true) in zip(
            index["predicted"][name][score], usual, index["effects"][name], strict=True
        )
    ]
    order = torch.tensor(site["scores"]).argsort(stable=True)
    moments, metric = statistics.read_moments(site["block"])[name], statistics.read_fisher(site["block"])[name]
    gram = sum(fold.gram for fold in moments)
    weight = load_file("llama/model.safetensors")[name]
    curve = DropOrder.of(weight, gram, order, len(gram) // len(order)).costs(metric.mean)
    return float(whole_best.as_effects(curve.numpy(), points)[site["units"] - len(site["kept"])])


DRY = """\
widths per block (--recipe best) would lose less, and need remote code
                    before    after  share
parameters           5.20K    3.28K  63.1%
bytes              20.8 KB  13.1 KB  63.1%
FLOPs / 32 tokens     418K     229K  54.9%
KV cache / token     128 B     64 B  50.0%
kept per block at one ratio everywhere: heads 1/2, mlp 12/24 (ratio 0.5); measuring finds \
widths of that size that lose less
to be stored as a stock class (llama or one that computes the same), or with code of its own where there is none; \
its shape is known after calibration
to be measured{}
`ckpt-prune calibrate --folds 4` and then `ckpt-prune plan --statistics STATS` show the widths and the \
predicted error of every layer before anything is pruned
everything that needs no measuring is checked, nothing written
"""
MEASURED = ": the inputs of every block's layers, and what pruning each does to the model's output"


def test_a_dry_run_tells_what_it_can_without_measuring(place):
    dry = ("prune", "dense", "-o", "out", "--dry-run")
    before = listing()
    assert "\n".join(without_quality(drop_time_line(ok(*dry, "--ratio", "0.5")))) + "\n" == DRY.format(
        f"{MEASURED}; give --text FILE for it (128 windows of 32 tokens, unless you say --samples), or --statistics "
        "STATS"
    )
    on_text = f" first{MEASURED}, on 8 windows of 16 tokens of calib.txt"
    assert "\n".join(without_quality(drop_time_line(ok(*dry, "--ratio", "0.5", *TEXT)))) + "\n" == DRY.format(on_text)
    report = json.loads(ok(*dry, "--ratio", "0.5", *TEXT, "--json"))
    assert (report["widths"], report["widths_are_known"]) == ([{"heads": 1, "mlp": 12}] * 2, False)
    assert report["container"] is None
    assert f"to be measured{on_text}" in report["messages"]
    sized = ok(*dry, *SIZE).splitlines()
    assert sized[6].startswith("kept per block at one ratio everywhere: heads 1/2, mlp 15/24 (70% of the parameters); ")
    assert listing() == before
