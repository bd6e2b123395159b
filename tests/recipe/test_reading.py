"""Recipe files: keys that are set from outside, aliases, and what no recipe holds."""

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.recipe.recipes import GOOD, refusal, write


def test_a_recipe_without_export_keeps_the_digest_it_had_before_there_was_any(tmp_path):
    plain = load_recipe(str(write(tmp_path, GOOD)))
    assert "export" not in plain.canonical_json()
    assert load_recipe(str(write(tmp_path, GOOD)), ("export.format=onnx",)).digest != plain.digest


# ---- overrides -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E+2", 100.0), ("0.5", 0.5), ("2", 2.0), (".5", 0.5), ("1.e-2", 0.01)]
)
def test_numbers_on_the_command_line(text, value):
    loaded = load_recipe("ridge", (f"spaces.mlp.compensation.lambda={text}",))
    assert loaded.spaces["mlp"].compensation.strength == value
    assert loaded.spaces["heads"].compensation.by_rule
    assert not loaded.spaces["mlp"].compensation.by_rule


@pytest.mark.parametrize("recipe", ["ridge", "ridge-folds", "ridge-perplexity", "corp"])
@pytest.mark.parametrize("method", ["none", "rotation"])
def test_a_method_without_a_strength_leaves_that_of_the_recipe_out(recipe, method):
    loaded = load_recipe(recipe, (f"spaces.mlp.compensation.method={method}",))
    compensation = loaded.spaces["mlp"].compensation
    assert (compensation.method, compensation.lam, compensation.lambda_grid, compensation.lambda_by) == (
        method,
        None,
        None,
        None,
    )
    (other,) = loaded.spaces.keys() - {"mlp"}
    assert loaded.spaces[other].compensation == load_recipe(recipe).spaces[other].compensation


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


def test_columns_go_in_multiples_of_the_graphs_blocks_where_their_size_is_asked_for():
    def multiples(*changes: str) -> list[int]:
        full_recipe = load_recipe("ridge", ("export.dtype=int4", *changes))
        assert FullRecipe.model_validate(full_recipe.model_dump(by_alias=True, exclude_none=True)) == full_recipe
        return [full_recipe.spaces[space].multiple_of for space in ("heads", "mlp")]

    assert multiples() == [1, 1]
    assert multiples("export.block_size=64") == [1, 64]
    assert multiples("export.block_size=64", "spaces.mlp.multiple_of=128") == [1, 128]


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
    spaces = load_recipe(str(write(tmp_path, ALIASED)), changes).spaces
    assert [(settings.ratio, settings.compensation.strength, settings.multiple_of) for settings in spaces.values()] == [
        (0.4, 0.1, 1),
        (0.7, 2, 4),
    ]
    merged = ALIASED.replace("mlp: *both", "mlp: {<<: *both, score: wanda-sp}")
    spaces = load_recipe(str(write(tmp_path, merged)), changes).spaces
    assert [settings.compensation.strength for settings in spaces.values()] == [0.1, 2]


@pytest.mark.parametrize("override", ["spaces.mlp.ratio=0.1", "spaces.mlp={score: rcpu, ratio: 0.1}"])
def test_a_space_s_own_ratio_that_is_set_beside_the_ratio_option_stays(tmp_path, override):
    path = write(tmp_path, GOOD.replace("    score: rcpu", "    score: rcpu\n    ratio: 0.9"))
    loaded = load_recipe(str(path), (override,), 0.4)
    assert [loaded.ratio_of("heads"), loaded.ratio_of("mlp")] == [0.4, 0.1]
    with pytest.raises(UserError, match=r"size and spaces\.mlp\.ratio both say how much goes: leave one out"):
        load_recipe(str(path), (override,), None, {"params": "70%"})


def bomb(link: str) -> str:
    """A recipe of some hundred bytes that stands for 2**29 values."""
    lines = ["a0: &a0 {x: 1, y: 2}"]
    return "\n".join(lines + [f"a{i}: &a{i} {link.format(f'*a{i - 1}')}" for i in range(1, 30)])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (bomb("{{x: {0}, y: {0}}}"), "its aliases stand for more than 20000 values"),
        (bomb("[{0}, {0}]"), "its aliases stand for more than 20000 values"),
        (bomb("{{<<: [{0}, {0}]}}"), "its aliases stand for more than 20000 values"),
        ("ratio: &a [*a]", "it refers to itself"),
        ("ratio: " + "[" * 2000, "nested too deeply: 30 levels are read"),
        ("ratio: " + "[" * 30 + "]" * 30, "nested too deeply: 30 levels are read"),
        ("&a0 0: 0\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 60)), "nested too deeply"),
        ("ratio: " + "9" * 5001, "Exceeds the limit (4300 digits) for integer string conversion"),
    ],
)
def test_what_no_recipe_holds(tmp_path, text, reason):
    path = write(tmp_path, text)
    assert refusal(path).startswith(f"{path} is not YAML: {reason}")
