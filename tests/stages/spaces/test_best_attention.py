"""Recipe `best-attention`: all that can go of attention, as far as a family has it, in one budget."""

import json
from pathlib import Path

import pytest

from tests import encoders
from tests.cli.running import TEXT, ok, read_json
from tests.evaluation.tiny import tiny_tokenizer
from tests.pairs import every

GRID = "compensation.lambda_grid=[0.001, 0.1]"
LACKING = {"llama": {"qk"}, "opt": {"queries", "rotary"}}
SPACES = {"queries", "heads", "values", "rotary", "qk", "mlp"}


def quick(*spaces: str) -> list[str]:
    """Fewer strengths to choose from."""
    return [f"--set=spaces.{space}.{GRID}" for space in spaces]


@pytest.mark.parametrize("family", every(2, ["llama", "opt"]))
def test_what_a_family_has_shares_one_budget(place, family):
    model = "dense"
    if family == "opt":
        encoders.make(Path("opt"), "opt")
        tiny_tokenizer("<s> $A").save_pretrained("opt")
        model = "opt"
    given = ("--target-params", "70%", *TEXT, "--folds", "2", *quick("heads", "values", "mlp", "queries"))
    ok("prune", model, "--recipe", "best-attention", *given, "-o", "out")
    report = read_json("out/ckpt_prune.json")
    assert set(report["recipe"]["spaces"]) == {site["space"] for site in report["sites"]} == SPACES - LACKING[family]
    assert report["after"]["parameters"] <= 0.7 * report["before"]["parameters"]
    for check in json.loads(ok("verify", "out", "--against", model, "--json"))["checks"]:
        assert check["passed"] is not False, check
