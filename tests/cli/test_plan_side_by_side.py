"""`plan` with several recipes: one table."""

import json
import re

from tests.cli.running import TEXT, listing, ok

BOTH = ("plan", "dense", "--recipe", "wanda-sp", "--recipe", "ridge", "--ratio", "0.5")


def test_a_row_for_each(place):
    before = listing()
    lines = ok(*BOTH, "--statistics", "stats").splitlines()
    assert listing() == before
    assert re.split("  +", lines[0]) == [
        *["recipe", "parameters", "share", "bytes", "FLOPs", "stored as", "heads error", "mlp error", "predicted"]
    ]
    rows = [re.split("  +", line) for line in lines[1:3]]
    assert [row[:6] for row in rows] == [
        ["wanda-sp", "3.28K", "63.1%", "13.1 KB", "229K", "llama"],
        ["ridge", "3.28K", "63.1%", "13.1 KB", "229K", "llama"],
    ]
    assert lines[3:] == [
        "errors: means over blocks, relative to each output's energy, after compensation; they are no perplexity",
        "predicted: the divergence (KL, in nats) from the dense model's output, a second-order estimate, too low where "
        "many units go or samples are few; the perplexity grows about exp(divergence) times",
    ]
    for row, recipe in zip(rows, ("wanda-sp", "ridge"), strict=True):
        alone = json.loads(ok("plan", "dense", "--recipe", recipe, "--ratio", "0.5", "--statistics", "stats", "--json"))
        assert row[8] == f"{sum(site['divergence'] for site in alone['sites']):.4f}"
        for shown, space in zip(row[6:8], ("heads", "mlp"), strict=True):
            errors = [site["error_compensated"] for site in alone["sites"] if site["space"] == space]
            assert shown == f"{sum(errors) / len(errors):.4f}"


def test_with_folds_held_out_errors_stand_beside(place):
    ok("calibrate", "dense", *TEXT, "--folds", "4", "--collect", "gram", "-o", "folded")
    lines = ok(*BOTH, "--statistics", "folded").splitlines()
    assert re.split("  +", lines[0])[6:] == ["heads error", "mlp error", "heads held out", "mlp held out"]
    assert re.split("  +", lines[1])[8:] == ["-", "-"]  # nothing is fitted
    assert all(float(cell) > 0 for cell in re.split("  +", lines[2])[8:])
    assert (
        lines[4] == "held out: the same on each fold of the samples when fitted on the others; by these recipes compare"
    )


def test_what_a_recipe_has_to_say_stands_below_with_its_name(place):
    lines = ok("plan", "dense", "--recipe", "wanda-sp", "--recipe", "ridge", "--ratio", "0.3", "--statistics", "stats")
    notes = [line for line in lines.splitlines() if line.startswith(("wanda-sp: ", "ridge: "))]
    assert len(notes) == 6  # two of heads, one of mlp
    assert [line.removeprefix("wanda-sp: ") for line in notes[:3]] == [
        line.removeprefix("ridge: ") for line in notes[3:]
    ]
    assert notes[0].startswith("wanda-sp: heads: a ratio of 0.3 drops none of 2 in each block; ")
