"""`plan`: decisions and predictions, and nothing written but the plan."""

import json
import re
from math import exp
from pathlib import Path

import pytest

from ckpt_prune.stages.spaces.messages import SECOND_ORDER
from tests.cli.running import TEXT, ok, read_json, read_refusal

RCPU = ("--recipe", "rcpu", "--statistics", "stats", "--ratio", "0.5")


def test_text(place):
    *lines, blank, takes = ok("plan", "dense", *RCPU).splitlines()
    assert (blank, takes) == (
        "",
        "pruning by it takes about 1 s, 1.24 GB of memory and 13.1 KB of disk, where nothing else runs on this machine",
    )
    assert lines[:6] == [
        "                    before    after  share",
        "parameters           5.20K    3.28K  63.1%",
        "bytes              20.8 KB  13.1 KB  63.1%",
        "FLOPs / 32 tokens     418K     229K  54.9%",
        "KV cache / token     128 B     64 B  50.0%",
        "",
    ]
    assert re.split("  +", lines[6]) == [
        *["block", "space", "kept", "compensation", "error before", "error after", "floor", "rho2", "held out"]
    ]
    rows = [line.split() for line in lines[7:11]]
    assert lines[11] == lines[-3] == ""
    assert [line.partition(":")[0] for line in lines[12:16]] == ["kept", "error", "floor", "rho2"]
    assert lines[-2] == "kept per block: heads 1/2 (ratio 0.5), mlp 12/24 (ratio 0.5)"
    sites = json.loads(ok("plan", "dense", *RCPU, "--json"))["sites"]
    kl = sum(site["divergence"] for site in sites)
    assert lines[-1] == (
        f"predicted: a divergence (KL) of {kl:.4f} nats from the dense model's output, about {exp(kl):.2f} times "
        f"its perplexity; {SECOND_ORDER}"
    )
    assert [row[:4] for row in rows] == [
        ["0", "heads", "1/2", "rotation"],
        ["0", "mlp", "12/24", "rotation"],
        ["1", "heads", "1/2", "rotation"],
        ["1", "mlp", "12/24", "rotation"],
    ]
    for row in rows:
        before, after, floor, rho2 = map(float, row[4:8])
        assert 0 < floor <= after <= before < 1
        assert 0 <= rho2 <= 1
        assert row[8:] == ["-"]


def test_applying_the_plan_is_applying_the_recipe(place):
    ok("plan", "dense", *RCPU, "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "-o", "planned")
    ours, theirs = Path("planned/model.safetensors"), Path("pruned/model.safetensors")
    assert ours.read_bytes() == theirs.read_bytes()
    assert read_json("planned/ckpt_prune.json")["sites"] == read_json("pruned/ckpt_prune.json")["sites"]


def test_a_plan_of_other_statistics(place):
    ok("plan", "dense", *RCPU, "-o", "plan.json")
    ok("calibrate", "dense", *TEXT, "--seed", "1", "-o", "stats", "--overwrite")
    assert read_refusal("prune", "dense", "--plan", "plan.json", "-o", "out") == (
        "the plan was made from other statistics than stats: plan again"
    )


def test_a_plan_has_settled_everything(place):
    ok("plan", "dense", *RCPU, "-o", "plan.json")
    prune = ("prune", "dense", "--plan", "plan.json", "-o", "out")
    message = (
        "a plan has settled ratio and recipe: --ratio, --target-*, --pattern, --rotate, --set, --for and "
        "--container do not go with it"
    )
    for option in (
        ["--ratio", "0.3"],
        ["--set", "ratio=0.3"],
        ["--pattern", "2:4"],
        ["--container", "any"],
        ["--for", "vllm"],
        ["--ratio", "0.3", *TEXT],
    ):
        assert read_refusal(*prune, *option) == message
    for given, data in (("--text", TEXT), ("--images", ("--images", "."))):
        assert read_refusal(*prune, *data) == f"a plan has settled its statistics: {given} does not go with it"


# ---- places ----------------------------------------------------------------------------------------------------


def test_an_existing_plan_stays_unless_told(place):
    ok("plan", "dense", *RCPU, "-o", "plan.json")
    before = Path("plan.json").read_bytes()
    assert read_refusal("plan", "dense", *RCPU, "-o", "plan.json") == (
        "plan.json exists: choose another name or say --overwrite"
    )
    ok("plan", "dense", *RCPU[:-1], "0.4", "-o", "plan.json", "--overwrite")
    assert Path("plan.json").read_bytes() != before


# ---- plans edited by hand --------------------------------------------------------------------------------------

SCORES = "the plan has 1 scores for the 24 units of mlp in block 0: plan again instead of editing it"
KEPT = "the plan's kept units of mlp in block 0 are not ascending indices below 24: plan again instead of editing it"
SITES = "the plan does not list every space of every block once: plan again instead of editing it"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda sites: sites[1]["scores"].__delitem__(slice(1, None)), SCORES),
        *(
            (lambda sites, kept=kept: sites[1].update(kept=kept), KEPT)
            for kept in ([], [0, 0], [1, 0], [-1, 2], [0, 99])
        ),
        (lambda sites: sites.pop(), SITES),
        (lambda sites: sites.append(sites[0]), SITES),
    ],
)
def test_plans_that_were_edited(place, edit, message):
    ok("plan", "dense", "--recipe", "magnitude", "--ratio", "0.5", "-o", "plan.json")
    plan = read_json("plan.json")
    edit(plan["sites"])
    Path("plan.json").write_text(json.dumps(plan))
    assert read_refusal("prune", "dense", "--plan", "plan.json", "-o", "out") == message
