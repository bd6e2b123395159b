"""`plan --test`: what the sites of a plan lose on other samples than it was made from."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ckpt_prune.compensation.methods import METHODS
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.statistics.folder import Statistics
from tests.cli.conftest import WORDS
from tests.cli.running import TEXT, ok, read_refusal

ALL = ("--samples", "99", "--window", "16")
RIDGE = ("--recipe", "ridge", "--ratio", "0.5", "--statistics", "stats")
CONSUMERS = {"heads": "self_attn.o_proj", "mlp": "mlp.down_proj"}


@pytest.fixture
def other(place):
    """Statistics of another text, of only four different words."""
    rng = random.Random(1)
    (place / "other.txt").write_text(" ".join(rng.choice(WORDS[:4]) for _ in range(300)))
    ok("calibrate", "dense", "--text", "other.txt", *ALL, "-o", "others")
    return place


def inputs(text: str) -> dict[str, torch.Tensor]:
    """Collect what every consumer of the dense model reads of all windows of a text, (tokens, d_in) float64."""
    model = AutoModelForCausalLM.from_pretrained("dense").double().eval()
    ids = AutoTokenizer.from_pretrained("dense")(text).input_ids
    windows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    reads = {}
    for block in range(2):
        for path in CONSUMERS.values():
            name = f"model.layers.{block}.{path}"

            def keep(_module, args, name=name):
                reads[name] = args[0].flatten(0, 1)

            model.get_submodule(name).register_forward_pre_hook(keep)
    with torch.inference_mode():
        model(windows, use_cache=False)
    return reads


def test_errors_are_those_of_the_pruned_weights_on_the_other_text(other):
    plan = json.loads(ok("plan", "dense", *RIDGE, "--test", "others", "--json"))
    ok("plan", "dense", *RIDGE, "-o", "plan.json")
    statistics = Statistics(other / "stats")
    ok("prune", "dense", "--plan", "plan.json", "-o", "out")
    dense, pruned = (load_file(f"{folder}/model.safetensors") for folder in ("dense", "out"))
    reads = inputs((other / "other.txt").read_text())
    for site in plan["sites"]:
        shift = site["shift"]
        name = f"model.layers.{site['block']}.{CONSUMERS[site['space']]}"
        size = dense[f"{name}.weight"].shape[1] // site["units"]
        columns = [unit * size + i for unit in site["kept"] for i in range(size)]
        x = reads[name]
        y = x @ dense[f"{name}.weight"].double().T
        bare = x[:, columns] @ dense[f"{name}.weight"].double()[:, columns].T
        fitted = x[:, columns] @ pruned[f"{name}.weight"].double().T
        energy = float(y.square().sum())
        assert shift["uncompensated"] == pytest.approx(float((y - bare).square().sum()) / energy, rel=1e-4)
        assert shift["test"] == pytest.approx(float((y - fitted).square().sum()) / energy, rel=1e-3)
        assert shift["floor"] <= shift["test"] * 1.0001
        fitted_on = sum_folds(statistics.read_moments(site["block"])[f"{name}.weight"])
        values = torch.linalg.eigvalsh(fitted_on.gram[columns][:, columns].double())
        shares = values / (values + site["strength"] * values.mean())
        assert shift["freedom"] == pytest.approx(y.shape[1] * float(shares.sum()), rel=1e-6)
        assert shift["tokens"] == 128


def test_a_method_that_says_nothing_of_its_freedom_is_counted_by_its_numbers(other, monkeypatch):
    monkeypatch.setitem(METHODS, "ridge", replace(METHODS["ridge"], ridge_towards=None))
    for site in json.loads(ok("plan", "dense", *RIDGE, "--test", "others", "--json"))["sites"]:
        weight = load_file("dense/model.safetensors")[f"model.layers.0.{CONSUMERS[site['space']]}.weight"]
        assert site["shift"]["freedom"] == weight.numel() // site["units"] * len(site["kept"])


VALUES = """\
version: 1
name: values
container: any
spaces:
  values: {score: principal, ratio: 0.5, compensation: {method: ridge}}
"""
FACTORS = "factors, lambda: 0.01"
PAIRS = """\
version: 1
name: pairs
container: any
spaces:
  rotary: {score: obs, ratio: 0.5, compensation: {method: METHOD}}
  queries: {score: obs, ratio: 0.5, compensation: {method: ridge}}
"""


def by_hand(dense: dict, pruned: dict, block: int, x: torch.Tensor, groups: int) -> torch.Tensor:
    """Compute what narrow values give the output, their basis read off the rows of v: (tokens, d_out)."""
    v, o = (f"model.layers.{block}.self_attn.{kind}_proj.weight" for kind in "vo")
    old, new = (tensors[v].double().unflatten(0, (groups, -1)) for tensors in (dense, pruned))
    basis = new @ torch.linalg.pinv(old)
    parts = x.unflatten(1, (groups, -1, old.shape[1]))
    return torch.einsum("gkd,tgid->tgik", basis, parts).flatten(1) @ pruned[o].double().T


def test_values_are_turned_as_the_calibration_says(other):
    (other / "values.yaml").write_text(VALUES)
    options = ("dense", "--recipe", "values.yaml", "--statistics", "stats")
    plan = json.loads(ok("plan", *options, "--test", "others", "-o", "plan.json", "--json"))
    ok("prune", "dense", "--plan", "plan.json", "-o", "out")
    dense, pruned = (load_file(f"{folder}/model.safetensors") for folder in ("dense", "out"))
    reads = inputs((other / "other.txt").read_text())
    for site in plan["sites"]:
        name = f"model.layers.{site['block']}.self_attn.o_proj"
        y = reads[name] @ dense[f"{name}.weight"].double().T
        lost = y - by_hand(dense, pruned, site["block"], reads[name], 2)
        share = float(lost.square().sum() / y.square().sum())
        assert site["shift"]["test"] == pytest.approx(share, rel=1e-3)
        assert site["shift"]["floor"] <= share * 1.0001
    # The output keeps what its plan says about other samples.
    report = json.loads((other / "out" / "ckpt_prune.json").read_text())
    assert [site["shift"] for site in report["sites"]] == [site["shift"] for site in plan["sites"]]


@pytest.mark.parametrize("method", ["none", FACTORS])
def test_on_other_statistics_of_the_same_text_nothing_moves(place, method):
    """The same samples in other folds."""
    (place / "pairs.yaml").write_text(PAIRS.replace("METHOD", method))
    for name, folds in (("first", "1"), ("again", "2")):
        kinds = ("--collect", "moments,gram,rotary")
        ok("calibrate", "dense", *TEXT, *kinds, "--folds", folds, "-o", name)
    recipes = [("dense", *RIDGE[:4]), ("dense", "--recipe", "pairs.yaml")]
    plans = [
        json.loads(ok("plan", *recipe, "--statistics", "first", "--test", "again", "--json")) for recipe in recipes
    ]
    lines = ok("plan", *recipes[0], "--statistics", "first", "--test", "again").splitlines()
    assert "both statistics were measured on the same samples: nothing is held against others" in lines
    sites = [site for plan in plans for site in plan["sites"]]
    assert {site["space"] for site in sites} == {"heads", "mlp", "queries", "rotary"}
    for site in sites:
        shift = site["shift"]
        assert shift["test"] == pytest.approx(site["error_compensated"], rel=1e-4)
        assert (shift["covariances"], shift["means"]) == pytest.approx((0, 0), abs=1e-5)
        assert shift["bound"] > 2 * shift["floor"]
        if site["space"] == "rotary":
            # 4 query heads, of 2 pairs one stays: two numbers each, shrunk a little.
            assert shift["freedom"] == 0 if method == "none" else 6 < shift["freedom"] < 8


def test_bad_input(other):
    assert read_refusal("plan", "dense", *RIDGE, "--recipe", "rcpu", "--test", "others") == (
        "--test holds one plan against other statistics: it goes with one --recipe and no --sweep"
    )
    assert read_refusal("plan", "dense", *RIDGE, "--test", "missing") == (
        "missing holds no statistics.json: statistics are written by `ckpt-prune calibrate`"
    )
    for same in ("stats", "./stats"):
        assert read_refusal("plan", "dense", *RIDGE, "--test", same) == (
            "--test stats holds the same statistics as --statistics: measure others, on other samples"
        )
    ok("calibrate", "dense", "--text", "other.txt", *ALL, "--collect", "moments", "-o", "bare")
    assert read_refusal("plan", "dense", *RIDGE, "--test", "bare") == (
        "--test needs Grams, and bare has none: calibrate with --collect moments,gram"
    )
    assert read_refusal("plan", "dense", "--recipe", "magnitude", "--ratio", "0.5", "--test", "others") == (
        "--test holds a plan against other statistics than it was made from: give --statistics"
    )
