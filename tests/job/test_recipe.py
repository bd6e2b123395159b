import pytest
import yaml

from ckpt_prune.model.descriptions import load_family
from ckpt_prune.recipe.shipped import recipe_text, shipped_recipes
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import json_schema, load_recipe
from ckpt_prune.stages.recovery.keys import Recovery
from tests.recipe.recipes import GOOD, write

SHIPPED = {
    "flap": ("flap", "bias", "dense"),
    "flap-global": ("flap", "bias", "dense"),
    "grail": ("wanda-sp", "grail", "sequential"),
    "magnitude": ("magnitude", "none", "dense"),
    "rcpu": ("rcpu", "rotation", "sequential"),
    "rcpu-scale": ("rcpu", "rotation-scale", "sequential"),
    "rcpu-v1-least-squares": ("rcpu", "least-squares", "sequential"),
    "ridge": ("rcpu", "ridge", "sequential"),
    "vbp": ("variance", "bias", "dense"),
    "wanda-sp": ("wanda-sp", "none", "sequential"),
    "wanda-sp-code": ("wanda-sp-code", "none", "sequential"),
}
"""The published methods: score, compensation, target."""


def test_every_shipped_recipe_loads():
    assert set(shipped_recipes()) >= set(SHIPPED)
    for name in shipped_recipes():
        assert load_recipe(name).name == name
    assert load_recipe("ridge-perplexity").perplexity_grid == [10.0**e for e in range(-6, 7)]
    assert load_recipe("ridge-perplexity").spaces["mlp"].compensation.lambda_units == "absolute"
    assert load_recipe("ridge-folds").needs_folds
    assert load_recipe("flap-global").widths == "per_layer"


def test_what_a_recipe_needs():
    needs = {name: (load_recipe(name).needs_moments, load_recipe(name).gram_for("mlp") is not None) for name in SHIPPED}
    assert needs["magnitude"] == (False, False)
    assert {n for n, (moments, _) in needs.items() if not moments} == {"magnitude"}
    without = {"magnitude", "wanda-sp", "wanda-sp-code", "flap", "flap-global", "vbp"}
    assert {n for n, (_, gram) in needs.items() if not gram} == without


# ---- identity --------------------------------------------------------------------------------------------------


def test_the_digest_is_of_the_meaning_not_of_the_text(tmp_path):
    same = "spaces: {mlp: {compensation: {lambda: 1.0e-1, method: ridge}, score: wanda-sp}, heads: {score: rcpu}}\n"
    rewritten = write(tmp_path, "# a comment\nname: mine\nratio: 0.30\nversion: 1\n" + same)
    first = load_recipe(str(rewritten)).digest
    assert first == load_recipe(str(write(tmp_path, GOOD))).digest
    assert first != load_recipe(str(write(tmp_path, GOOD.replace("0.1", "0.2")))).digest


def test_canonical_json_reads_back():
    for name in shipped_recipes():
        loaded = load_recipe(name)
        bare = loaded.model_copy(update={"goal": None, "time": None})
        assert FullRecipe.model_validate_json(loaded.canonical_json()) == bare
        assert loaded.digest == bare.digest


def test_the_schema_accepts_shipped_recipes_and_refuses_mistakes():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    checker = jsonschema.validators.validator_for(schema)
    checker.check_schema(schema)
    # `jsonschema.validate` would check the schema again each time: a fifth of a second.
    validate = checker(schema).validate
    for file in shipped_recipes().values():
        validate(yaml.safe_load(recipe_text(file)))
    for old, new in (("ratio:", "raito:"), ("ratio: 0.3", "ratio: 1"), ("score: rcpu", "score: nothing")):
        with pytest.raises(jsonschema.ValidationError):
            validate(yaml.safe_load(GOOD.replace(old, new)))
    validate(yaml.safe_load(GOOD + "recovery: {}\n"))
    for bad in ("{epoch: 1}", "{epochs: 0}", "{held_out: 1}", "{lr: 0}", "{only: heads}", "true"):
        with pytest.raises(jsonschema.ValidationError):
            validate(yaml.safe_load(GOOD + f"recovery: {bad}\n"))


# ---- recovery --------------------------------------------------------------------------------------------------


def test_the_digest_is_of_every_key_of_recovery():
    """Also of the learning rate's default, which is none: it depends on the model."""
    changes = {
        **{"epochs": 3, "lr": 0.1, "batch": 9, "accumulate": 2, "schedule": "constant", "only": "mlp"},
        **{"layers": "'0:1'", "held_out": 0.2, "patience": 9, "samples": 64, "seed": 1},
        **{"norms": True, "teacher": "pruned", "method": "scales"},
    }
    of_snows = {"operations": 2, "ridge": 0.1, "iterations": 9}
    assert {*changes, *of_snows} == set(Recovery.model_fields)
    assert (
        len(
            {load_recipe("wanda", ("recovery.method=snows",)).digest}
            | {load_recipe("wanda", ("recovery.method=snows", f"recovery.{k}={v}")).digest for k, v in of_snows.items()}
        )
        == 4
    )
    plain = "recovery={epochs: 10, batch: 4}"
    digests = {load_recipe("flap", (plain, f"recovery.{key}={value}")).digest for key, value in changes.items()}
    assert len(digests | {load_recipe("flap", (plain,)).digest}) == len(changes) + 1


# ---- sizes, budgets and choices on folds -----------------------------------------------------------------------

BEST = """\
version: 1
name: mine
target: drift
allocation: least-error
widths: per_layer
spaces:
  heads: {score: obs, compensation: {method: auto}}
  mlp: {score: obs, compensation: {method: auto}}
"""


@pytest.mark.parametrize(
    ("candidates", "methods", "opens"),
    [
        ("[affine, ridge, affine]", ["affine", "ridge"], True),
        ("[least-squares]", ["least-squares"], False),
        ("[grail, bias]", ["grail", "bias"], True),
    ],
)
def test_candidates_that_are_told(candidates, methods, opens):
    auto = load_recipe("best", (f"spaces.mlp.compensation.candidates={candidates}",)).spaces["mlp"].compensation
    assert auto.methods(biased=True) == auto.methods(biased=False) == methods
    assert auto.opens_bias == opens


COMPENSATION = "spaces.mlp.compensation"


SIZE = "size={params: 5B}"


def test_a_recipe_reads_back_with_all_there_is(tmp_path):
    changes = ("weigh_by=energy", f"{COMPENSATION}.candidates=[ridge]", f"{COMPENSATION}.shares=[0.5]", SIZE)
    full = load_recipe(str(write(tmp_path, BEST)), changes)
    assert FullRecipe.model_validate_json(full.canonical_json()) == full
    plain = load_recipe(str(write(tmp_path, BEST)))
    digests = {load_recipe(str(write(tmp_path, BEST)), (change,)).digest for change in changes}
    assert len(digests | {plain.digest}) == 5
    for key in ("size", "weigh_by", "candidates", "shares"):
        assert f'"{key}"' not in plain.canonical_json()
        assert f'"{key}"' in full.canonical_json()


def test_digests_of_recipes_stay_what_they_were():
    """Plans hold them."""
    digests = {
        "rcpu": "79a58290aebc3918f07727b83c73a892b47080e30d5fe7a79e7bb7e6b8b463dd",
        "corp": "82878a4f33fea773391803d001326fd6f108ddc1e1adecf159b7a7ead68b92e4",
        "flap-global": "13c4e9e1b5b7491ca778dd734a1055fe34653c14a34fcaff5fbd12f6a8c77b7a",
        "ridge-folds": "092f242d2fdaecff4ca86573b8709f8a78494f30bcdbb92403842c3fc8c37caf",
        "ridge-perplexity": "ca65ffdebae72ec22e60835b26e04df5a9e8666209f73ae0f50e54134b2bf72b",
        "laco-flap": "d94e9339a9add2431e8ffa10705edb4ad86154d57ab6d1e425aa7f8ae6c03ff1",
        "corp-heads": "046876cab72a908032255dad87e527946ebde068662abebf4d73544b16aa5c96",
    }
    assert {name: load_recipe(name).digest for name in digests} == digests


def test_only_a_strength_that_is_chosen_by_perplexity_is_fixed():
    by_folds = {"method": "ridge", "lambda_grid": [0.1, 1.0], "lambda_by": "folds"}
    spaces = {"mlp": {"score": "rcpu", "compensation": by_folds}}
    recipe = FullRecipe.model_validate({"version": 1, "name": "mine", "spaces": spaces})
    assert recipe.with_strength(0.5) == recipe
    assert recipe.perplexity_grid is None


@pytest.mark.parametrize(
    ("model_type", "target"),
    [("llama", "drift"), ("opt", "drift"), ("gemma3_text", "sequential"), ("olmo2", "sequential")],
)
def test_no_drift_behind_norms(model_type, target):
    """`best` takes no drift behind norms: gemma3-270m had a perplexity of 111.1 with it, 89.7 without (dense 68.6)."""
    recipe = load_recipe("best").at(load_family(model_type))
    assert recipe.target == target
    assert list(recipe.spaces) == (["mlp"] if model_type == "olmo2" else ["heads", "mlp"])  # none of its heads can go


def test_a_space_that_is_to_stay_whole_is_not_among_those_that_meet_a_size_together():
    family = load_family("llama")
    recipe = load_recipe("best", ("spaces.heads.ratio=0",), 0.5).at(family)
    assert list(recipe.spaces) == ["mlp"]
    assert list(load_recipe("ridge", ("spaces.heads.ratio=0",), 0.5).at(family).spaces) == ["heads", "mlp"]
    none = load_recipe("best", ("spaces.heads.ratio=0", "spaces.mlp.ratio=0")).at(family)
    assert list(none.spaces) == ["heads", "mlp"]
