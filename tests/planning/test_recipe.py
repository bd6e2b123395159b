from pathlib import Path

import pytest
import yaml

from ckpt_prune.errors import UserError
from ckpt_prune.planning.recipe import Recipe, json_schema
from ckpt_prune.planning.recipe_file import load_recipe, shipped_recipes
from ckpt_prune.planning.recovery_recipe import RecoveryRecipe, RecoverySettings

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
}
"""The published methods: score, compensation, target."""

GOOD = """\
version: 1
name: mine
ratio: 0.3
spaces:
  heads:
    score: rcpu
  mlp:
    score: wanda-sp
    compensation:
      method: ridge
      lambda: 0.1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path, *args) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(str(path), *args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_are_the_published_methods(name):
    loaded = load_recipe(name)
    assert loaded.name == name
    assert loaded.summary
    assert loaded.source
    for space in loaded.spaces.values():
        assert (space.score, space.compensation.method, loaded.target) == SHIPPED[name]
    assert set(loaded.spaces) == ({"mlp"} if name == "vbp" else {"heads", "mlp"})


CORP = {"qk": ("logit-energy", "logit", None), "heads": ("corp", "affine", None), "mlp": ("corp", "affine", "floor")}


@pytest.mark.parametrize(
    ("name", "spaces"),
    [("corp", {"qk", "mlp"}), ("corp-mlp", {"mlp"}), ("corp-qk", {"qk"}), ("corp-heads", {"heads", "mlp"})],
)
def test_shipped_recipes_of_corp_round_down(name, spaces):
    loaded = load_recipe(name)
    assert (loaded.name, loaded.target, bool(loaded.summary), bool(loaded.source)) == (name, "dense", True, True)
    assert {s: (own.score, own.compensation.method, own.rounding) for s, own in loaded.spaces.items()} == {
        space: CORP[space] for space in spaces
    }


def test_every_shipped_recipe_loads():
    assert set(shipped_recipes()) >= set(SHIPPED)
    for name in shipped_recipes():
        assert load_recipe(name).name == name
    assert load_recipe("ridge-perplexity").perplexity_grid == [10.0**e for e in range(-6, 7)]
    assert load_recipe("ridge-perplexity").spaces["mlp"].compensation.lambda_units == "absolute"
    assert load_recipe("ridge-folds").needs_folds
    assert load_recipe("flap-global").widths == "per_layer"


def test_what_a_recipe_needs():
    needs = {name: (load_recipe(name).needs_moments, load_recipe(name).needs_gram("mlp")) for name in SHIPPED}
    assert needs["magnitude"] == (False, False)
    assert {n for n, (moments, _) in needs.items() if not moments} == {"magnitude"}
    assert {n for n, (_, gram) in needs.items() if not gram} == {"magnitude", "wanda-sp", "flap", "flap-global", "vbp"}


def test_a_recipe_says_what_it_says(tmp_path):
    loaded = load_recipe(str(write(tmp_path, GOOD)))
    assert (loaded.ratio, loaded.ratio_of("heads"), loaded.target, loaded.container) == (0.3, 0.3, "dense", "auto")
    assert loaded.spaces["heads"].compensation.method == "none"
    assert (loaded.spaces["mlp"].compensation.method, loaded.spaces["mlp"].compensation.strength) == ("ridge", 0.1)


KEYS = (
    "version, name, summary, source, ratio, target, true_sequential, size, allocation, weigh_by, widths, container, "
    "spaces, mask, rotation, recovery, export"
)
SPACE_KEYS = "score, ratio, rounding, multiple_of, compensation"
COMPENSATION_KEYS = "method, lambda, lambda_units, lambda_grid, lambda_by, candidates, shares"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("ratio:", "raito:", 3, f"unknown key raito: did you mean 'ratio'? allowed here: {KEYS}"),
        ("ratio:", "zzz:", 3, f"unknown key zzz: allowed here: {KEYS}"),
        ("  mlp:", "  mpl:", 7, "unknown key spaces.mpl: did you mean 'mlp'? allowed here: qk, heads, mlp"),
        (
            "    compensation:",
            "    compensate:",
            9,
            f"unknown key spaces.mlp.compensate: did you mean 'compensation'? allowed here: {SPACE_KEYS}",
        ),
        (
            "lambda:",
            "lamda:",
            11,
            f"unknown key spaces.mlp.compensation.lamda: did you mean 'lambda'? allowed here: {COMPENSATION_KEYS}",
        ),
        (
            "ratio: 0.3",
            "ratio: much",
            3,
            "ratio: input should be a valid number, unable to parse string as a number, got 'much'",
        ),
        ("ratio: 0.3", "ratio: 1", 3, "ratio: input should be less than 1, got 1"),
        ("ratio: 0.3", "ratio: -0.1", 3, "ratio: input should be greater than or equal to 0, got -0.1"),
        ("version: 1", "version: 2", 1, "version: input should be 1, got 2"),
        (
            "score: wanda-sp",
            "score: wanda",
            8,
            "spaces.mlp.score: unknown score 'wanda': did you mean 'wanda-sp'? allowed here: magnitude, "
            "activation-energy, active-probability, variance, wanda-sp, rcpu, rcpu-code, flap, corp, obs, logit-energy",
        ),
        ("method: ridge", "method: rotation", 9, "spaces.mlp.compensation: method rotation has no lambda"),
        (
            "lambda: 0.1",
            "lambda_grid: [0.1, 1.0]",
            9,
            "spaces.mlp.compensation: lambda_grid and lambda_by go together",
        ),
        ("    score: rcpu", "    ratio: 0.1", 5, "spaces.heads.score is missing"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_key(tmp_path, old, new, line, message):
    assert GOOD.count(old) == 1
    path = write(tmp_path, GOOD.replace(old, new))
    assert refusal(path) == f"{path}, line {line}: {message}"


RECOVERY_KEYS = "epochs, lr, batch, accumulate, schedule, only, layers, held_out, patience, samples, seed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  epoch: 2", f"unknown key recovery.epoch: did you mean 'epochs'? allowed here: {RECOVERY_KEYS}"),
        ("  zzz: 2", f"unknown key recovery.zzz: allowed here: {RECOVERY_KEYS}"),
        (
            "  ratio: 0.5",
            f"unknown key recovery.ratio: ratio stands at the top of a recipe; allowed here: {RECOVERY_KEYS}",
        ),
        ("  epochs: 0", "recovery.epochs: input should be greater than or equal to 1, got 0"),
        ("  held_out: 0", "recovery.held_out: input should be greater than 0, got 0"),
        ("  held_out: 1", "recovery.held_out: input should be less than 1, got 1"),
        ("  lr: 0", "recovery.lr: input should be greater than 0, got 0"),
        ("  lr: .nan", "recovery.lr: input should be a finite number, got nan"),
        ("  lr: .inf", "recovery.lr: input should be a finite number, got inf"),
        ("  samples: 1", "recovery.samples: input should be greater than or equal to 2, got 1"),
        ("  seed: -1", "recovery.seed: input should be greater than or equal to 0, got -1"),
        ("  only: heads", "recovery.only: input should be 'mlp' or 'attention', got 'heads'"),
        ("  schedule: step", "recovery.schedule: input should be 'cosine' or 'constant', got 'step'"),
        ("  layers: 5", "recovery.layers: input should be a valid string, got 5"),
        ("  layers: '5'", "recovery.layers: '5' is not a range of blocks: say A:B, such as 0:4, 4: or :4"),
        ("  layers: a:b", "recovery.layers: 'a:b' is not a range of blocks: say A:B, such as 0:4, 4: or :4"),
    ],
)
def test_a_mistake_in_recovery_is_named_by_its_key(tmp_path, text, message):
    path = write(tmp_path, GOOD + f"recovery:\n{text}\n")
    assert refusal(path) == f"{path}, line 13: {message}"


EXPORT_KEYS = "task, opset, dtype, cache, optimize, tolerance, format, validate"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  dtyp: fp16", f"unknown key export.dtyp: did you mean 'dtype'? allowed here: {EXPORT_KEYS}"),
        ("  dtype: int8", "export.dtype: input should be 'fp32' or 'fp16', got 'int8'"),
        ("  format: gguf", "export.format: input should be 'onnx', got 'gguf'"),
        ("  opset: 17", "export.opset: input should be greater than or equal to 18, got 17"),
        ("  opset: 24", "export.opset: input should be less than or equal to 23, got 24"),
        ("  optimize: tensorrt", "export.optimize: input should be 'cpu', 'cuda' or 'none', got 'tensorrt'"),
        ("  cache: 3", "export.cache: input should be a valid boolean, unable to interpret input, got 3"),
        ("  tolerance: 0", "export.tolerance: input should be greater than 0, got 0"),
    ],
)
def test_a_mistake_in_export_is_named_by_its_key(tmp_path, text, message):
    path = write(tmp_path, GOOD + f"export:\n{text}\n")
    assert refusal(path) == f"{path}, line 13: {message}"


def test_export_has_defaults_and_can_be_set_by_one_key(tmp_path):
    found = load_recipe(str(write(tmp_path, GOOD)), ("export.format=onnx", "export.validate=false")).export
    assert found is not None
    assert found.model_dump(by_alias=True) == {
        "task": "auto",
        "opset": None,
        "dtype": "fp32",
        "cache": None,
        "optimize": "none",
        "tolerance": None,
        "format": "onnx",
        "validate": False,
    }


def test_a_recipe_without_export_keeps_the_digest_it_had_before_there_was_any(tmp_path):
    plain = load_recipe(str(write(tmp_path, GOOD)))
    assert "export" not in plain.canonical_json()
    assert load_recipe(str(write(tmp_path, GOOD)), ("export.format=onnx",)).digest != plain.digest


@pytest.mark.parametrize("value", ["true", "3", "[epochs]"])
def test_recovery_is_a_mapping(tmp_path, value):
    path = write(tmp_path, GOOD + f"recovery: {value}\n")
    assert refusal(path).startswith(f"{path}, line 12: recovery: keys are expected ({RECOVERY_KEYS}), got ")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "allocation: across-layers\n",
            "allocation across-layers gives every block its own widths, which no stock model can load: "
            "say widths: per_layer to accept remote code, or allocation: uniform",
        ),
        (
            "allocation: across-layers\nwidths: per_layer\ntarget: sequential\n",
            "allocation across-layers compares all blocks before any is pruned: target: dense",
        ),
    ],
)
def test_contradictions_are_named(tmp_path, extra, message):
    path = write(tmp_path, GOOD + extra)
    assert refusal(path) == f"{path}: {message}"


def test_every_mistake_is_in_the_one_line(tmp_path):
    path = write(tmp_path, GOOD.replace("ratio: 0.3", "ratio: 3").replace("score: rcpu", "score: rcp"))
    first, second = refusal(path).split("; ")
    assert first == f"{path}, line 3: ratio: input should be less than 1, got 3"
    assert second.startswith(f"{path}, line 6: spaces.heads.score: unknown score 'rcp': did you mean 'rcpu'?")


def test_a_key_given_twice_is_refused(tmp_path):
    path = write(tmp_path, GOOD + "ratio: 0.5\n")
    assert refusal(path) == f"{path}, line 12: ratio is given twice"
    path = write(tmp_path, GOOD.replace("      lambda: 0.1", "      lambda: 0.1\n      lambda: 0.2"))
    assert refusal(path) == f"{path}, line 12: spaces.mlp.compensation.lambda is given twice"


def test_bad_yaml(tmp_path):
    path = write(tmp_path, GOOD + "  : [\n")
    assert refusal(path).startswith(f"{path} is not YAML: ")
    assert "line 12" in refusal(path)


@pytest.mark.parametrize("text", ["", "- 1\n- 2\n", "just text\n"])
def test_not_a_mapping(tmp_path, text):
    path = write(tmp_path, text)
    assert refusal(path) == f"{path} is not a recipe: a mapping of keys is expected (`ckpt-prune recipe show rcpu`)"


def test_the_wrong_file(tmp_path):
    path = write(tmp_path, "model_type: llama\nhidden_size: 16\n")
    assert refusal(path) == f"{path} is not a recipe: it has neither name nor spaces (`ckpt-prune recipe show rcpu`)"
    path.write_bytes(b"\xff\xfe\x00binary")
    assert refusal(path) == f"{path} cannot be read as text: a recipe is a YAML file"


def test_code_in_yaml_is_not_run(tmp_path):
    path = write(tmp_path, GOOD.replace("name: mine", "name: !!python/object/apply:os.getcwd []"))
    assert refusal(path).startswith(f"{path} is not YAML: could not determine a constructor")


def test_an_unknown_name():
    message = refusal("rcup")
    assert message.startswith(
        "no recipe 'rcup': did you mean 'rcpu'? shipped are best, best-uniform, corp, corp-heads, corp-mlp, corp-qk, "
    )
    assert message.endswith("; or give a path to a .yaml file")


# ---- overrides -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E+2", 100.0), ("0.5", 0.5), ("2", 2.0), (".5", 0.5), ("1.e-2", 0.01)]
)
def test_numbers_on_the_command_line(text, value):
    loaded = load_recipe("ridge", (f"spaces.mlp.compensation.lambda={text}",))
    assert loaded.spaces["mlp"].compensation.strength == value
    assert loaded.spaces["heads"].compensation.strength == 0.01


def test_overrides_of_every_kind():
    loaded = load_recipe(
        "rcpu",
        (
            "target=dense",
            "name=other",
            "spaces.mlp.multiple_of=8",
            "spaces.heads.compensation={method: grail, lambda: 1e-2}",
        ),
    )
    assert (loaded.target, loaded.name, loaded.spaces["mlp"].multiple_of) == ("dense", "other", 8)
    assert (loaded.spaces["heads"].compensation.method, loaded.spaces["heads"].compensation.lam) == ("grail", 0.01)
    grid = load_recipe("ridge-folds", tuple(f"spaces.{s}.compensation.lambda_grid=[1e-3, 1]" for s in ("heads", "mlp")))
    assert grid.spaces["mlp"].compensation.lambda_grid == [1e-3, 1.0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ratio", "--set ratio: expected key=value, for example spaces.mlp.ratio=0.3"),
        ("=1", "--set =1: expected key=value, for example spaces.mlp.ratio=0.3"),
        ("ratio=[", "--set ratio=[: '[' is not a YAML value"),
        ("ratio.x=1", "--set ratio.x=1: ratio holds a value, not keys"),
    ],
)
def test_bad_overrides(tmp_path, override, message):
    assert refusal(write(tmp_path, GOOD), (override,)) == message


ALIASED = """\
version: 1
name: mine
spaces:
  heads: &both
    score: rcpu
    ratio: 0.4
    compensation: {method: ridge, lambda: 0.1}
  mlp: *both
"""


def test_an_override_changes_one_place_of_those_that_share_an_alias(tmp_path):
    changes = ("spaces.mlp.ratio=0.7", "spaces.mlp.compensation.lambda=2", "spaces.mlp.multiple_of=4")
    found = load_recipe(str(write(tmp_path, ALIASED)), changes).spaces
    assert [(own.ratio, own.compensation.strength, own.multiple_of) for own in found.values()] == [
        (0.4, 0.1, 1),
        (0.7, 2, 4),
    ]
    merged = ALIASED.replace("mlp: *both", "mlp: {<<: *both, score: wanda-sp}")
    found = load_recipe(str(write(tmp_path, merged)), changes).spaces
    assert [own.compensation.strength for own in found.values()] == [0.1, 2]


def test_a_space_that_is_not_there_and_is_no_mapping_is_named_twice(tmp_path):
    path = write(tmp_path, GOOD.replace("spaces:", "spaces:\n  mpl: 3"))
    assert refusal(path) == (
        f"{path}, line 5: unknown key spaces.mpl: did you mean 'mlp'? allowed here: qk, heads, mlp; "
        f"{path}, line 5: spaces.mpl: keys are expected ({SPACE_KEYS}), got 3"
    )


def test_an_override_with_an_unknown_key_is_refused():
    message = refusal("rcpu", ("spaces.mlp.ration=0.5",))
    assert message.endswith(f"unknown key spaces.mlp.ration: did you mean 'ratio'? allowed here: {SPACE_KEYS}")


def test_the_ratio_option_replaces_every_ratio(tmp_path):
    path = write(tmp_path, GOOD.replace("    score: rcpu", "    score: rcpu\n    ratio: 0.9"))
    loaded = load_recipe(str(path), (), 0.4)
    assert [loaded.ratio_of("heads"), loaded.ratio_of("mlp")] == [0.4, 0.4]
    assert "ratio: input should be less than 1" in refusal(path, (), 1.0)


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
        assert Recipe.model_validate_json(loaded.canonical_json()) == loaded


def test_a_chosen_strength_takes_the_grids_place():
    fixed = load_recipe("ridge-perplexity").with_strength(10.0)
    assert fixed.perplexity_grid is None
    assert {s.compensation.strength for s in fixed.spaces.values()} == {10.0}
    assert {s.compensation.lambda_units for s in fixed.spaces.values()} == {"absolute"}


def test_the_schema_accepts_shipped_recipes_and_refuses_mistakes():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    for path in shipped_recipes().values():
        jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), schema)
    for old, new in (("ratio:", "raito:"), ("ratio: 0.3", "ratio: 1"), ("score: rcpu", "score: nothing")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(GOOD.replace(old, new)), schema)
    jsonschema.validate(yaml.safe_load(GOOD + "recovery: {}\n"), schema)
    for bad in ("{epoch: 1}", "{epochs: 0}", "{held_out: 1}", "{lr: 0}", "{only: heads}", "true"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(GOOD + f"recovery: {bad}\n"), schema)


def test_the_schema_names_every_score_and_method():
    definitions = json_schema()["$defs"]
    assert "rcpu" in definitions["SpaceRecipe"]["properties"]["score"]["enum"]
    assert "rotation-scale" in definitions["Compensation"]["properties"]["method"]["enum"]
    assert definitions["Compensation"]["additionalProperties"] is False
    assert "lambda" in definitions["Compensation"]["properties"]


def test_digests_of_recipes_that_know_no_masks():
    """As they were before recipes could have any: plans hold them."""
    assert load_recipe("rcpu").digest == "79a58290aebc3918f07727b83c73a892b47080e30d5fe7a79e7bb7e6b8b463dd"
    assert load_recipe("corp").digest == "82878a4f33fea773391803d001326fd6f108ddc1e1adecf159b7a7ead68b92e4"


# ---- recovery --------------------------------------------------------------------------------------------------

LACO = {"laco-wanda-50": "wanda-50", "laco-sparsegpt-2-4": "sparsegpt-2-4", "laco-flap": "flap"}


@pytest.mark.parametrize("name", LACO)
def test_shipped_recipes_with_recovery_are_those_without_and_the_papers_settings(name):
    ours, backbone = load_recipe(name), load_recipe(LACO[name])
    described = {"name", "summary", "source", "recovery"}
    assert ours.model_dump(exclude=described) == backbone.model_dump(exclude=described)
    assert backbone.recovery is None
    assert ours.recovery is not None
    assert ours.recovery.epochs == 10
    assert (ours.recovery.samples, ours.recovery.lr, ours.recovery.only, ours.recovery.layers) == (None,) * 4
    assert ours.source == f"LaCo (ACL 2026 long.1342), Algorithm 1; {backbone.source}"
    assert ours.summary.endswith("; what stays of each block trained right after (LaCo).")
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert "# lr is left out: 5e-5 as in the paper at its hidden size of 4096" in text


def test_which_shipped_recipes_recover():
    assert {name for name in shipped_recipes() if load_recipe(name).recovery} == set(LACO)


@pytest.mark.parametrize("name", ["rcpu", "wanda-50", "magnitude", "denoise-rotator-wanda-50"])
def test_recovery_may_be_added_to_any_recipe_and_changes_nothing_else(name):
    plain, ours = load_recipe(name), load_recipe(name, ("recovery.epochs=2",))
    assert ours.recovery == RecoveryRecipe(epochs=2)
    assert ours.model_dump(exclude={"recovery"}) == plain.model_dump(exclude={"recovery"})
    assert (ours.needs_moments, ours.collect) == (plain.needs_moments, plain.collect)
    assert ours.digest != plain.digest
    assert '"recovery"' not in plain.canonical_json()
    assert load_recipe(name, ("recovery={}",)).recovery == RecoveryRecipe()


def test_the_digest_is_of_every_key_of_recovery():
    """Also of the learning rate's default, which is none: it depends on the model."""
    changes = {
        **{"epochs": 3, "lr": 0.1, "batch": 9, "accumulate": 2, "schedule": "constant", "only": "mlp"},
        **{"layers": "'0:1'", "held_out": 0.2, "patience": 9, "samples": 64, "seed": 1},
    }
    assert set(changes) == set(RecoveryRecipe.model_fields)
    digests = {load_recipe("laco-flap", (f"recovery.{key}={value}",)).digest for key, value in changes.items()}
    assert len(digests | {load_recipe("laco-flap").digest}) == len(changes) + 1


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [(None, range(5)), (":", range(5)), ("0:5", range(5)), ("1:", range(1, 5)), (":2", range(2)), (" 2 : 3 ", [2])],
)
def test_blocks_of_a_range(layers, blocks):
    assert list(RecoverySettings(layers=layers).blocks(5)) == list(blocks)


@pytest.mark.parametrize("layers", ["0:6", "5:", ":0", "3:3", "3:1", "9:12"])
def test_blocks_that_are_not_there(layers):
    with pytest.raises(UserError) as caught:
        RecoverySettings(layers=layers).blocks(5)
    assert str(caught.value) == f"layers {layers}: the model has blocks 0 to 4, say 0:5 for all"


def test_the_learning_rate_is_the_papers_at_its_hidden_size():
    settings = RecoverySettings()
    assert settings.rate(4096) == 5e-5
    assert settings.rate(1024) == pytest.approx(2e-4)
    assert RecoverySettings(lr=0.3).rate(1024) == 0.3


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


def test_shipped_best_recipes_say_what_they_are():
    best, uniform = load_recipe("best"), load_recipe("best-uniform")
    described = {"name", "summary", "source", "widths"}
    assert best.model_dump(exclude=described) == uniform.model_dump(exclude=described)
    assert (best.widths, uniform.widths) == ("per_layer", "uniform")
    assert (best.target, best.true_sequential, best.allocation, best.container) == ("drift", True, "least-error", "any")
    assert best.weighed_by_effect
    assert best.needs_folds
    assert best.collect == ("moments", "gram")
    assert {s: (own.score, own.compensation.method) for s, own in best.spaces.items()} == {
        "heads": ("obs", "auto"),
        "mlp": ("obs", "auto"),
    }
    assert (best.size, best.ratio) == (None, 0.2)


def test_what_auto_chooses_from():
    auto = load_recipe("best").spaces["mlp"].compensation
    assert auto.by_folds
    assert auto.methods(biased=True) == ["none", "bias", "rotation", "rotation-scale", "ridge", "affine"]
    assert auto.methods(biased=False) == ["none", "rotation", "rotation-scale", "ridge"]
    assert not auto.opens_bias
    assert auto.grid == [1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]
    assert auto.drift_shares == [0.0, 0.25, 0.5, 0.75, 1.0]
    ridge = load_recipe("ridge").spaces["mlp"].compensation
    assert (ridge.by_folds, ridge.methods(biased=True), ridge.drift_shares) == (False, ["ridge"], [1.0])
    folds = load_recipe("ridge-folds").spaces["mlp"].compensation
    assert (folds.by_folds, folds.methods(biased=False)) == (True, ["ridge"])
    assert folds.drift_shares == [0.0, 0.25, 0.5, 0.75, 1.0]


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
ALL_METHODS = "none, bias, rotation, rotation-scale, centred-rotation, least-squares, ridge, affine, grail"


@pytest.mark.parametrize(
    ("compensation", "message"),
    [
        ("{method: auto, lambda: 1}", "method auto chooses lambda on folds: lambda and lambda_by do not go with it"),
        (
            "{method: auto, lambda_by: folds}",
            "method auto chooses lambda on folds: lambda and lambda_by do not go with it",
        ),
        ("{method: ridge, candidates: [none]}", "candidates are for method auto, not ridge"),
        ("{method: auto, shares: [0, 1.5]}", "shares of the drift are numbers from 0 to 1"),
        ("{method: auto, shares: [-0.5]}", "shares of the drift are numbers from 0 to 1"),
        (
            "{method: ridge, shares: [0, 1]}",
            "several shares of the drift are chosen from by method auto or lambda_by: folds",
        ),
        ("{method: auto, lambda_grid: [-1, 1]}", "lambda_grid holds a negative strength"),
        ("{method: ridge, lambda_grid: [1, 2]}", "lambda_grid and lambda_by go together"),
    ],
)
def test_contradictions_of_a_compensation(tmp_path, compensation, message):
    path = write(tmp_path, BEST)
    assert refusal(path, (f"{COMPENSATION}={compensation}",)) == f"--set: {COMPENSATION}: {message}"


@pytest.mark.parametrize(
    ("compensation", "message"),
    [
        (
            "{method: auto, candidates: []}",
            "candidates: list should have at least 1 item after validation, not 0, got []",
        ),
        ("{method: auto, shares: []}", "shares: list should have at least 1 item after validation, not 0, got []"),
        (
            "{method: auto, candidates: [rige]}",
            f"candidates.0: unknown candidate 'rige': did you mean 'ridge'? allowed here: {ALL_METHODS}",
        ),
        ("{method: auto, candidates: [auto]}", f"candidates.0: unknown candidate 'auto': allowed here: {ALL_METHODS}"),
        (
            "{method: auto, candidates: [none, logit]}",
            f"candidates.1: unknown candidate 'logit': allowed here: {ALL_METHODS}",
        ),
        ("{method: auto, shares: [.nan]}", "shares.0: input should be a finite number, got nan"),
    ],
)
def test_lists_of_a_compensation(tmp_path, compensation, message):
    path = write(tmp_path, BEST)
    assert refusal(path, (f"{COMPENSATION}={compensation}",)) == f"--set: {COMPENSATION}.{message}"


SIZE = "size={params: 5B}"
NOT_OBS = "allocation least-error needs the errors of every width, which score obs gives, not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("target=dense", f"{COMPENSATION}.shares=[1]"), "spaces.mlp: shares are of the drift: say target: drift"),
        (("spaces.mlp.score=wanda-sp",), f"spaces.mlp: {NOT_OBS} wanda-sp"),
        (("allocation=uniform", "weigh_by=energy"), "weigh_by is for allocation: least-error"),
        (("allocation=uniform", "weigh_by=effect"), "weigh_by is for allocation: least-error"),
        ((SIZE, "ratio=0.3"), "size and ratio both say how much goes: leave one out"),
        ((SIZE, "spaces.mlp.ratio=0.3"), "size and spaces.mlp.ratio both say how much goes: leave one out"),
        (
            (SIZE, "container=padded", "widths=uniform"),
            "size does not go with container padded, which saves nothing where it fills up",
        ),
        (
            ("allocation=across-layers", "target=dense"),
            "spaces.heads: score obs ranks units, and FLAP's rankings compare columns",
        ),
        (
            ("spaces.qk={score: logit-energy, compensation: {method: auto}}",),
            "spaces.qk: method auto is not for this space; allowed here: none, logit",
        ),
        (
            ("spaces.qk={score: obs}",),
            "spaces.qk: score obs does not rank its units; allowed here: logit-energy, magnitude",
        ),
        (
            ("spaces.qk={score: logit-energy}",),
            "allocation least-error adds up what units of every space save, and a dimension of q and k saves less with "
            "fewer heads: leave out spaces.heads or spaces.qk",
        ),
        (("container=llama",), "widths per_layer may need remote code, which container llama rules out"),
    ],
)
def test_contradictions_of_a_budget(tmp_path, changes, message):
    path = write(tmp_path, BEST)
    assert refusal(path, changes) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("{}", "size: a target size has exactly one of params, bytes and flops: {params: 5.0B}"),
        ("{params: 5B, flops: 1T}", "size: a target size has exactly one of params, bytes and flops: {params: 5.0B}"),
        ("{parms: 5B}", "unknown key size.parms: did you mean 'params'? allowed here: params, bytes, flops"),
        ("5B", "size: keys are expected (params, bytes, flops), got '5B'"),
        (
            "{params: 5GiB}",
            "size.params: '5GiB' is not a size in parameters: allowed are 5.0B (K, M, B or T), 5000000000, or a share "
            "of the dense model: 50%",
        ),
    ],
)
def test_a_mistake_in_a_size(tmp_path, size, message):
    path = write(tmp_path, BEST)
    assert refusal(path, (f"size={size}",)) == f"--set: {message}"


def test_sizes_do_not_go_with_masks(tmp_path):
    speak = "allocation, widths and size speak of units: they do not go with a mask"
    masked = write(tmp_path, "version: 1\nname: mine\nsize: {params: 50%}\nmask: {method: magnitude}\n")
    assert refusal(masked) == f"{masked}: {speak}"
    assert refusal("wanda-50", ("allocation=least-error",)).endswith(speak)
    assert refusal("wanda-50", (), None, {"params": "50%"}) == (
        "recipe wanda-50 has a mask, which leaves every size as it is: say --ratio"
    )
    assert refusal("wanda-50", ("target=drift",)).endswith(
        "target drift is for spaces, whose consumers are refitted: say sequential with a mask"
    )


def test_a_size_and_a_ratio_replace_each_other(tmp_path):
    path = write(tmp_path, BEST.replace("spaces:", "ratio: 0.4\nspaces:").replace("mlp: {", "mlp: {ratio: 0.1, "))
    sized = load_recipe(str(path), (), None, {"bytes": "9.5GiB"})
    assert sized.size is not None
    assert (sized.size.kind, sized.size.text, sized.ratio, sized.ratio_of("mlp")) == ("bytes", "9.5GiB", 0.2, 0.2)
    again = sized.with_ratio(0.35)
    assert (again.size, again.ratio_of("heads"), again.ratio_of("mlp")) == (None, 0.35, 0.35)
    assert again.spaces["mlp"].compensation == sized.spaces["mlp"].compensation
    path = write(tmp_path, BEST.replace("spaces:", "size: {params: 5e9}\nspaces:"))
    assert load_recipe(str(path)).size.text == "5000000000"
    assert load_recipe(str(path), (), 0.3).size is None
    assert load_recipe(str(path), (), None, {"flops": "70%"}).size.model_dump() == {"flops": "70%"}


def test_with_a_ratio_nothing_else_changes():
    own = load_recipe("rcpu", ("spaces.heads.ratio=0.5",)).with_ratio(0.35)
    assert [own.ratio_of(space) for space in own.spaces] == [0.35, 0.35]
    for name in shipped_recipes():
        recipe = load_recipe(name)
        if recipe.spaces:
            changed = recipe.with_ratio(0.45)
            assert {changed.ratio_of(space) for space in changed.spaces} == {0.45}
            assert changed.with_ratio(recipe.ratio) == recipe.with_ratio(recipe.ratio)
            assert changed.model_dump(exclude={"ratio", "spaces"}) == recipe.model_dump(exclude={"ratio", "spaces"})


def test_a_recipe_reads_back_with_all_there_is(tmp_path):
    changes = ("weigh_by=energy", f"{COMPENSATION}.candidates=[ridge]", f"{COMPENSATION}.shares=[0.5]", SIZE)
    full = load_recipe(str(write(tmp_path, BEST)), changes)
    assert Recipe.model_validate_json(full.canonical_json()) == full
    plain = load_recipe(str(write(tmp_path, BEST)))
    digests = {load_recipe(str(write(tmp_path, BEST)), (change,)).digest for change in changes}
    assert len(digests | {plain.digest}) == 5
    for key in ("size", "weigh_by", "candidates", "shares"):
        assert f'"{key}"' not in plain.canonical_json()
        assert f'"{key}"' in full.canonical_json()


def test_a_recipe_with_a_size_that_is_written_out_is_a_recipe(tmp_path):
    """As outputs and plans have it: with every default."""
    sized = load_recipe("best", size={"params": "70%"})
    assert load_recipe(str(write(tmp_path, sized.canonical_json()))) == sized


def test_digests_of_recipes_that_know_no_budgets():
    """As they were before recipes could have sizes, candidates and shares."""
    known = {
        "flap-global": "13c4e9e1b5b7491ca778dd734a1055fe34653c14a34fcaff5fbd12f6a8c77b7a",
        "ridge-folds": "092f242d2fdaecff4ca86573b8709f8a78494f30bcdbb92403842c3fc8c37caf",
        "ridge-perplexity": "ca65ffdebae72ec22e60835b26e04df5a9e8666209f73ae0f50e54134b2bf72b",
        "laco-flap": "4dd7393f81644818213da605a6d911fed3dd7e30a3b17450f0ba43e4982e872c",
        "corp-heads": "046876cab72a908032255dad87e527946ebde068662abebf4d73544b16aa5c96",
    }
    assert {name: load_recipe(name).digest for name in known} == known
