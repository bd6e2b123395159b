"""`plan --test`: what the sites of a plan lose on other samples than it was made from."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import WORDS
from tests.cli.running import TEXT, ok, refused

ALL = ("--samples", "99", "--window", "16")
RIDGE = ("--recipe", "ridge", "--ratio", "0.5", "--statistics", "stats")
CONSUMERS = {"heads": "self_attn.o_proj", "mlp": "mlp.down_proj"}


@pytest.fixture
def other(place):
    """Statistics of another text, in which the words are not alike in number."""
    rng = random.Random(1)
    (place / "other.txt").write_text(" ".join(rng.choice(WORDS[:4]) for _ in range(300)))
    ok("calibrate", "dense", "--text", "other.txt", *ALL, "-o", "others")
    return place


def inputs(text: str) -> dict[str, torch.Tensor]:
    """What every consumer of the dense model reads of all windows of a text, (tokens, d_in) float64."""
    model = AutoModelForCausalLM.from_pretrained("dense").double().eval()
    ids = AutoTokenizer.from_pretrained("dense")(text).input_ids
    windows = torch.tensor(ids[: len(ids) // 16 * 16]).view(-1, 16)
    found = {}
    for block in range(2):
        for path in CONSUMERS.values():
            name = f"model.layers.{block}.{path}"

            def keep(_module, args, name=name):
                found[name] = args[0].flatten(0, 1)

            model.get_submodule(name).register_forward_pre_hook(keep)
    with torch.inference_mode():
        model(windows, use_cache=False)
    return found


def test_errors_are_those_of_the_pruned_weights_on_the_other_text(other):
    told = json.loads(ok("plan", "dense", *RIDGE, "--test", "others", "--json"))
    ok("plan", "dense", *RIDGE, "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "-o", "out")
    dense, pruned = (load_file(f"{folder}/model.safetensors") for folder in ("dense", "out"))
    reads = inputs((other / "other.txt").read_text())
    assert [(site["block"], site["space"]) for site in told["shift"]] == [
        (site["block"], site["space"]) for site in told["sites"]
    ]
    for found, site in zip(told["shift"], told["sites"], strict=True):
        name = f"model.layers.{site['block']}.{CONSUMERS[site['space']]}"
        each = dense[f"{name}.weight"].shape[1] // site["units"]
        columns = [unit * each + i for unit in site["kept"] for i in range(each)]
        x = reads[name]
        y = x @ dense[f"{name}.weight"].double().T
        bare = x[:, columns] @ dense[f"{name}.weight"].double()[:, columns].T
        fitted = x[:, columns] @ pruned[f"{name}.weight"].double().T
        energy = float(y.square().sum())
        assert found["uncompensated"] == pytest.approx(float((y - bare).square().sum()) / energy, rel=1e-4)
        assert found["test"] == pytest.approx(float((y - fitted).square().sum()) / energy, rel=1e-3)
        assert found["calibration"] == site["error_compensated"]
        assert found["floor"] <= found["test"] * 1.0001
        assert (found["kept"], found["units"]) == (len(site["kept"]), site["units"])
        assert (found["freedom"], found["tokens"]) == (y.shape[1] * len(columns), 128)


def test_on_other_statistics_of_the_same_text_nothing_moves(place):
    """The same samples in other folds."""
    ok("calibrate", "dense", *TEXT, "--folds", "2", "-o", "again")
    told = json.loads(ok("plan", "dense", *RIDGE, "--test", "again", "--json"))
    for site in told["shift"]:
        assert site["test"] == pytest.approx(site["calibration"], rel=1e-5)
        assert (site["covariances"], site["means"]) == pytest.approx((0, 0), abs=1e-6)
        assert site["bound"] > 2 * site["floor"]


def test_text(other):
    said = ok("plan", "dense", *RIDGE, "--test", "others").splitlines()
    start = next(number for number, line in enumerate(said) if "apart" in line)
    assert said[start].split() == ["block", "space", "kept", "calibration", "test", "before", "floor", "apart"]
    assert [row.split()[:3] for row in said[start + 1 : start + 5]] == [
        ["0", "heads", "1/2"],
        ["0", "mlp", "12/24"],
        ["1", "heads", "1/2"],
        ["1", "mlp", "12/24"],
    ]
    assert [line.partition(":")[0] for line in said[start + 6 : start + 9]] == [
        *["calibration, test", "before, floor", "apart"]
    ]


def test_bad_input(other):
    assert refused("plan", "dense", *RIDGE, "--recipe", "rcpu", "--test", "others") == (
        "--test holds one plan against other statistics: it goes with one --recipe and no --sweep"
    )
    assert refused("plan", "dense", *RIDGE, "--test", "missing") == (
        "missing holds no statistics.json: statistics are written by `ckpt-prune calibrate`"
    )
    for same in ("stats", "./stats"):
        assert refused("plan", "dense", *RIDGE, "--test", same) == (
            "--test stats holds the same statistics as --statistics: measure others, on other samples"
        )
    ok("calibrate", "dense", "--text", "other.txt", *ALL, "--collect", "moments", "-o", "bare")
    assert refused("plan", "dense", *RIDGE, "--test", "bare") == (
        "--test needs Grams, and bare has none: calibrate with --collect moments,gram"
    )
    assert refused("plan", "dense", "--recipe", "magnitude", "--ratio", "0.5", "--test", "others") == (
        "--test holds a plan against other statistics than it was made from: give --statistics"
    )
