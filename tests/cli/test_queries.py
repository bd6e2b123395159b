"""Query heads inside KV groups, alone and beside whole groups, from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ckpt_prune
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.job.job import Job
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.recipe.reading import load_recipe
from ckpt_prune.stages.spaces.widths import dense_ranking
from tests.cli.running import TEXT, ok, read_json, refused, run
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


def kept(folder: str, space: str) -> list[list[int]]:
    return [site["kept"] for site in read_json(f"{folder}/ckpt_prune.json")["sites"] if site["space"] == space]


def small(folder: str, **changes: int) -> None:
    with quiet_transformers():
        tiny_llama(max_position_embeddings=32, **changes).save_pretrained(folder)
    tiny_tokenizer("<s> $A").save_pretrained(folder)


# ---- one query head of every group -------------------------------------------------------------------------------


def test_a_plan_lists_query_heads_as_many_in_every_group(here):
    said = ok("plan", "dense", "--recipe", "mine.yaml", "--statistics", "stats", "-o", "plan.json")
    assert "kept per block: queries 1/2 (ratio 0.5), mlp 18/24 (ratio 0.25)" in said.splitlines()
    assert "kept: units that stay, of those there are (queries: grouped query heads, mlp: columns)" in said.splitlines()
    sites = [site for site in read_json("plan.json")["sites"] if site["space"] == "queries"]
    assert [(site["block"], site["units"]) for site in sites] == [(0, 4), (1, 4)]
    assert all(len({head // 2 for head in site["kept"]}) == len(site["kept"]) == 2 for site in sites)
    for site in sites:
        # In each group the one of higher score.
        assert site["kept"] == [max((g * 2, g * 2 + 1), key=lambda head: site["scores"][head]) for g in (0, 1)]


def test_keys_and_values_stay_and_the_stock_class_loads_it(here):
    ok("prune", "dense", "--recipe", "mine.yaml", *TEXT, "-o", "out")
    assert (heads("dense"), heads("out")) == ((4, 2), (2, 2))
    assert read_json("out/config.json")["model_type"] == "llama"
    shapes = {name.split(".", 3)[-1]: tuple(t.shape) for name, t in stock(Path("out")).named_parameters()}
    assert [shapes[f"self_attn.{each}_proj.weight"] for each in "qkvo"] == [(8, 16), (8, 16), (8, 16), (16, 8)]
    said = ok("verify", "out", "--against", "dense")
    assert "producers of 4 pruned spaces hold the dense rows, bit for bit" in said


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
    said = json.loads(ok("plan", "dense", *given, "--sweep", "0.5:0.5:0.1", "--json"))
    ok("plan", "dense", *given, "--ratio", "0.5", "-o", "half.json")
    (point,) = said["points"]
    for space, error in point["errors"].items():
        own = [s["error_compensated"] for s in read_json("half.json")["sites"] if s["space"] == space]
        assert error == pytest.approx(sum(own) / len(own))


# ---- beside whole groups -----------------------------------------------------------------------------------------


def test_widths_by_the_least_error(here):
    """A size is met where query heads, groups and columns share it: what goes with two of them counts once."""
    given = ("--recipe", "budget.yaml", *TEXT, "--folds", "4", "--target-params", "60%")
    ok("prune", "dense", *given, "-o", "out")
    counts = {space: [len(each) for each in kept("out", space)] for space in ("queries", "heads", "mlp")}
    assert any(count < 4 for count in counts["queries"])
    parameters = sum(p.numel() for p in ckpt_prune.load("out").parameters())
    dense = sum(p.numel() for p in stock(Path("dense")).parameters())
    assert 0.55 * dense < parameters == read_json("out/ckpt_prune.json")["after"]["parameters"] <= 0.6 * dense
    for check in json.loads(ok("verify", "out", "--against", "dense", "--json"))["checks"]:
        assert check["passed"] is not False, check
    uniform = ("--set", "widths=uniform", "--set", "container=auto")
    ok("prune", "dense", *given, *uniform, "-o", "even")
    assert not read_json("even/ckpt_prune.json")["container"]["remote_code"]
    assert sum(p.numel() for p in stock(Path("even")).parameters()) <= 0.6 * dense


def test_effects_of_query_heads_are_measured_on_request(here):
    """For statistics of any recipe they would take time that few need; where they lack, others have no scale beside."""
    given = ("--recipe", "budget.yaml", "--target-params", "60%")
    assert refused("plan", "dense", *given, "--statistics", "stats", "-o", "plan.json") == (
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
    ranking = dense_ranking(Job(Model.open("dense"), recipe, Statistics(Path("more"))))
    for block in (0, 1):
        (first,) = (own for own in ranking[Site(block, "queries")] if own.score == "obs")
        assert index["effects"][name.format(block)] == [[1, pytest.approx(float(first.errors[1]))]]
    ok("plan", "dense", *given, "--statistics", "more", "-o", "plan.json")
    ok("prune", "dense", "--plan", "plan.json", "-o", "out")
    assert refused("calibrate", "dense", *TEXT, "--collect", "gram,queries", "-o", "less") == (
        "--collect gram,queries: queries are tried out with the metric, add fisher"
    )


# ---- what follows ------------------------------------------------------------------------------------------------


def test_an_output_is_measured_masked_recovered_and_pruned_again(here):
    ok("prune", "dense", "--recipe", "mine.yaml", *TEXT, "-o", "out")
    perplexity = json.loads(ok("evaluate", "out", "--text", "calib.txt", "--window", "16", "--json"))["perplexity"]
    assert perplexity > 1
    ok("prune", "out", "--recipe", "wanda-50", *TEXT, "-o", "masked")
    assert "14 masked weights: what is not zero is the dense model's" in ok("verify", "masked", "--against", "out")
    ok("recover", "out", "--dense", "dense", *TEXT, "-o", "recovered")
    # Every group has one query head now: whole heads can go, and nothing inside them.
    assert "queries" not in ok("inspect", "out")
    ok("prune", "out", "--recipe", "rcpu", "--ratio", "0.5", *TEXT, "-o", "again")
    assert heads("again") == (1, 1)
    for folder in ("recovered", "again"):
        stock(Path(folder))


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_groups_of_one_query_head(here):
    small("mha", num_key_value_heads=4)
    assert refused("plan", "mha", "--recipe", "mine.yaml", "--statistics", "stats", "-o", "plan.json") == (
        "recipe mine prunes queries, query heads inside KV groups, and none can go by itself in this llama: "
        "spaces.heads drops them with their keys and values"
    )


def test_a_class_that_cannot_say_the_shape(here):
    """Six of eight query heads do not divide a hidden size of sixteen: a Llama is stored as mistral, unless forced."""
    small("wide", num_attention_heads=8)
    given = ("prune", "wide", "--recipe", "mine.yaml", "--set", "spaces.queries.ratio=0.25", *TEXT, "-o", "out")
    ok(*given)
    assert read_json("out/config.json")["model_type"] == "mistral"
    assert heads("out") == (6, 2)
    shutil.rmtree("out")
    assert refused(*given, "--container", "llama") == (
        "no stock class fits: llama refuses 6 heads, which do not divide its hidden size of 16. Say --container any "
        "to store it with code of its own beside the weights, or take another --ratio or a compensation without a bias"
    )


@pytest.mark.parametrize(("model_type", "spaces"), [("gemma2", "heads"), ("gemma3_text", "queries")])
def test_blocks_differ_in_heads_where_the_class_checks_their_number(place, model_type: str, spaces: str) -> None:
    """Three or six heads do not divide 32 dimensions, which its config class asks for."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4 if spaces == "heads" else 2, "head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    torch.manual_seed(0)
    with quiet_transformers():
        config = AutoConfig.for_model(model_type, **sizes, **shape, max_position_embeddings=32)
        AutoModelForCausalLM.from_config(config).save_pretrained("gemma")
    tiny_tokenizer("<s> $A").save_pretrained("gemma")
    recipe = {"version": 1, "name": "test", "allocation": "least-error", "weigh_by": "energy", "widths": "per_layer"}
    own = {"score": "obs", "compensation": {"method": "ridge"}}
    recipe |= {"container": "any", "size": {"params": "86%"}, "spaces": {spaces: own}}
    Path("recipe.json").write_text(json.dumps(recipe))
    ok("prune", "gemma", "--recipe", "recipe.json", *TEXT, "-o", "out")
    kept = [len(site["kept"]) for site in read_json("out/ckpt_prune.json")["sites"]]
    assert len(set(kept)) > 1
    ok("verify", "out", "--against", "gemma")
    tokens = torch.arange(12)[None]
    with quiet_transformers(), torch.no_grad():
        ours, theirs = (
            ckpt_prune.load("out"),
            AutoModelForCausalLM.from_pretrained("out", trust_remote_code=True),
        )
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    again = run("evaluate", "out", "--trust-remote-code", "--text", "calib.txt", "--window", "16", "--samples", "2")
    assert again.exit_code == 0
    assert "per-layer" not in again.stderr
