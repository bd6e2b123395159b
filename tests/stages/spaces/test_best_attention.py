"""Recipe `best-attention`: all that can go of attention, as far as a family has it, in one budget."""

import json

from tests.cli.running import TEXT, ok, read_json

GRID = "compensation.lambda_grid=[0.001, 0.1]"


def quick(*spaces: str) -> list[str]:
    """Fewer strengths to choose from."""
    return [f"--set=spaces.{space}.{GRID}" for space in spaces]


def test_what_a_family_has_shares_one_budget(place):
    given = ("--target-params", "70%", *TEXT, "--folds", "2", *quick("heads", "values", "mlp", "queries"))
    ok("prune", "dense", "--recipe", "best-attention", *given, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    spaces = {site["space"] for site in report["sites"]}
    assert set(report["recipe"]["spaces"]) == spaces == {"queries", "heads", "values", "rotary", "mlp"}
    assert report["after"]["parameters"] <= 0.7 * report["before"]["parameters"]
    for check in json.loads(ok("verify", "out", "--against", "dense", "--json"))["checks"]:
        assert check["passed"] is not False, check
