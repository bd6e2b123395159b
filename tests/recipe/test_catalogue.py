"""The list of recipes, whose words follow from the recipes."""

import pytest

from ckpt_prune.recipe.catalogue import GOALS, Entry, group_recipes
from ckpt_prune.recipe.names import Goal
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.recipe.recipes import refusal, write

RIDGE = {"score": "rcpu", "compensation": {"method": "ridge"}}


def entry(**top: object) -> Entry:
    values = {"version": 1, "name": "mine"} | ({} if "mask" in top else {"spaces": {"mlp": RIDGE}}) | top
    return Entry.of(FullRecipe.model_validate(values))


@pytest.mark.parametrize(
    ("top", "goal"),
    [
        ({}, "paper"),
        ({"mask": {"method": "wanda", "pattern": "2:4"}}, "zeros"),
        ({"recovery": {}}, "recovery"),
        ({"mask": {"method": "wanda", "pattern": "2:4"}, "recovery": {}}, "recovery"),
        ({"recovery": {}, "goal": "vision"}, "vision"),
    ],
)
def test_what_a_recipe_is_for(top, goal):
    assert entry(**top).goal == goal


@pytest.mark.parametrize(
    ("top", "loads"),
    [
        ({}, "stock"),
        ({"container": "any"}, "stock, else own code"),
        ({"container": "seed_oss"}, "stock"),
        ({"container": "remote"}, "own code"),
        ({"widths": "per_layer"}, "own code"),
        ({"spaces": {"qk": {"score": "logit-energy"}}, "container": "any"}, "own code"),
        ({"spaces": {"qk": {"score": "logit-energy"}}, "container": "padded"}, "stock"),
        ({"mask": {"method": "wanda", "pattern": "2:4"}, "rotation": {"kind": "per-layer"}}, "own code"),
        ({"mask": {"method": "wanda", "pattern": "2:4"}, "rotation": {"kind": "shared"}}, "stock"),
    ],
)
def test_what_loads_the_output(top, loads):
    assert entry(**top).loads == loads


BY_GRADIENTS = {"spaces": {"mlp": {"score": "taylor1"}}}
BY_PERPLEXITY = {"score": "rcpu", "compensation": {"method": "ridge", "lambda_grid": [1, 2], "lambda_by": "perplexity"}}


@pytest.mark.parametrize(
    ("top", "needs", "calibration"),
    [
        ({}, "any", "ckpt-prune calibrate --folds 2"),
        ({"spaces": {"mlp": {"score": "magnitude"}}}, "none", None),
        ({"spaces": {"mlp": {"score": "magnitude"}}, "recovery": {}}, "text or images", None),
        (BY_GRADIENTS, "text or statistics", "ckpt-prune calibrate --collect moments,taylor"),
        (BY_GRADIENTS | {"recovery": {}}, "text", None),
        ({"spaces": {"mlp": BY_PERPLEXITY}}, "text", None),
    ],
)
def test_what_it_is_measured_on(top, needs, calibration):
    catalogue_entry = entry(**top)
    assert (catalogue_entry.needs, catalogue_entry.calibration) == (needs, calibration)


def test_every_shipped_recipe_is_in_one_group_and_states_its_time():
    recipes = [load_recipe(name) for name in shipped_recipes()]
    groups = group_recipes(recipes)
    assert list(groups) == list(GOALS)
    assert sorted(catalogue_entry.recipe.name for entries in groups.values() for catalogue_entry in entries) == list(
        shipped_recipes()
    )
    assert [recipe.name for recipe in recipes if recipe.time is None] == []
    assert load_recipe("ridge").time == 1
    assert load_recipe("magnitude").time < 1 < load_recipe("best").time


def test_goals_and_times_are_checked(tmp_path):
    text = "version: 1\nname: mine\nspaces: {mlp: {score: magnitude}}\n"
    assert "goal" in refusal(write(tmp_path, text + "goal: fun\n"))
    assert "time" in refusal(write(tmp_path, text + "time: 0\n"))
    assert set(GOALS) == set(Goal.__args__)
