"""Query heads inside KV groups, alone and together with whole groups, from the command line."""

import json
from pathlib import Path

import pytest

from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import begin
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.spaces.widths import dense_ranking
from tests.cli.running import TEXT, ok, read_json, read_refusal
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer
from tests.families import stock

RECIPE = """\
version: 1
name: mine
spaces:
  queries: {score: obs, ratio: 0.5, compensation: {method: ridge}}
  mlp: {score: rcpu, ratio: 0.25, compensation: {method: ridge}}
"""
BESIDE = RECIPE + "  heads: {score: obs, ratio: 0.5, compensation: {method: ridge}}\n"
BUDGET = """\
version: 1
name: budget
allocation: least-error
widths: per_layer
container: any
spaces:
  queries: {score: auto, compensation: {method: ridge}}
  heads: {score: auto, compensation: {method: ridge}}
  mlp: {score: auto, compensation: {method: ridge}}
"""


@pytest.fixture
def here(place: Path) -> Path:
    """With recipes for queries alone, beside heads, and with widths by the least error; groups of two query heads."""
    for name, text in (("mine", RECIPE), ("beside", BESIDE), ("budget", BUDGET)):
        Path(f"{name}.yaml").write_text(text)
    return place


def heads(folder: str) -> tuple[int, int]:
    """Query heads and KV groups in a config."""
    config = read_json(f"{folder}/config.json")
    return config["num_attention_heads"], config["num_key_value_heads"]


def small(folder: str, **changes: int) -> None:
    with quiet_transformers():
        tiny_llama(max_position_embeddings=32, **changes).save_pretrained(folder)
    tiny_tokenizer("<s> $A").save_pretrained(folder)


# ---- one query head of every group -------------------------------------------------------------------------------


def test_keys_and_values_stay_and_the_stock_class_loads_it(here):
    ok("prune", "dense", "--recipe", "mine.yaml", *TEXT, "-o", "out")
    assert (heads("dense"), heads("out")) == ((4, 2), (2, 2))
    assert read_json("out/config.json")["model_type"] == "llama"
    shapes = {name.split(".", 3)[-1]: tuple(t.shape) for name, t in stock(Path("out")).named_parameters()}
    assert [shapes[f"self_attn.{letter}_proj.weight"] for letter in "qkvo"] == [(8, 16), (8, 16), (8, 16), (16, 8)]
    output = ok("verify", "out", "--against", "dense")
    assert "producers of 4 pruned spaces hold the dense rows, bit for bit" in output


@pytest.mark.parametrize("recipe", ["mine", "beside"])
def test_a_plan_does_what_its_recipe_does(here, recipe):
    """Also where groups go behind the query heads inside them: a plan ranks them as they are then."""
    given = ("--recipe", f"{recipe}.yaml", "--statistics", "stats")
    ok("plan", "dense", *given, "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "-o", "planned")
    ok("prune", "dense", *given, "-o", "pruned", "--overwrite")
    assert Path("planned/model.safetensors").read_bytes() == Path("pruned/model.safetensors").read_bytes()
    errors = [
        [site["error_compensated"] for site in read_json(file)["sites"]]
        for file in ("plan.json", "pruned/ckpt_prune.json")
    ]
    assert errors[0] == errors[1]
    # And at every ratio of a sweep, where scores are shared.
    sweep = json.loads(ok("plan", "dense", *given, "--sweep", "0.5:0.5:0.1", "--json"))
    ok("plan", "dense", *given, "--ratio", "0.5", "-o", "half.json")
    (point,) = sweep["points"]
    for space, error in point["errors"].items():
        site_errors = [s["error_compensated"] for s in read_json("half.json")["sites"] if s["space"] == space]
        assert error == pytest.approx(sum(site_errors) / len(site_errors))


# ---- beside whole groups -----------------------------------------------------------------------------------------


def test_effects_of_query_heads_are_measured_on_request(here):
    """They take time that few recipes need; without them `least-error` cannot compare queries with other spaces."""
    given = ("--recipe", "budget.yaml", "--target-params", "60%")
    assert read_refusal("plan", "dense", *given, "--statistics", "stats", "-o", "plan.json") == (
        "stats holds no effects of queries, which allocation least-error weighs beside those of other spaces: "
        "calibrate with --collect moments,gram,fisher,queries, or say --set weigh_by=energy"
    )
    ok("calibrate", "dense", *TEXT, "--collect", "moments,gram,fisher,effects,queries", "-o", "more")
    index = read_json("more/statistics.json")
    name = "model.layers.{}.self_attn.o_proj.weight/queries"
    assert all(name.format(block) in index[kind] for block in (0, 1) for kind in ("predicted", "effects"))
    assert "queries" not in str(read_json("stats/statistics.json")["predicted"].keys())
    # What is predicted of each space goes through what was measured of it, and of no other.
    recipe = load_recipe("budget.yaml")
    ranking = dense_ranking(begin(Job(Model.open("dense"), recipe, Statistics(Path("more")))))
    for block in (0, 1):
        (first,) = (entry for entry in ranking[Site(block, "queries")] if entry.score == "obs")
        assert index["effects"][name.format(block)] == [[1, pytest.approx(float(first.errors[1]))]]
    ok("plan", "dense", *given, "--statistics", "more", "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "-o", "out")
    assert read_refusal("calibrate", "dense", *TEXT, "--collect", "gram,queries", "-o", "less") == (
        "--collect gram,queries: queries are tried out with the metric, add fisher"
    )


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_groups_of_one_query_head(here):
    small("mha", num_key_value_heads=4)
    assert read_refusal("plan", "mha", "--recipe", "mine.yaml", "--statistics", "stats", "-o", "plan.json") == (
        "recipe mine prunes queries, query heads inside KV groups, and none can go by itself in this llama: "
        "spaces.heads drops them with their keys and values"
    )
