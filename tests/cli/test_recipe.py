"""`recipe`, and how invalid recipes are refused."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckpt_prune
from ckpt_prune.cli.main import COMMANDS
from ckpt_prune.recipe.shipped import recipe_text, shipped_recipes, text_of_recipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.cli.running import TEXT, ok, options_of, read_json, read_refusal, run
from tests.gguf_files.tiny import save

TOP = (
    "version, name, summary, source, goal, time, ratio, target, true_sequential, size, allocation, weigh_by, widths, "
    "layers, container, runs_on, spaces, vocabulary, depth, bare, hidden, rotation, mask, low_rank, recovery, "
    "quantize, export"
)
PACKAGE = Path(ckpt_prune.__file__).parent
OTHERS = {
    "--merge",
    "--mmproj",
    "--model-path",
    "--no",
    "--no-deps",
    "--pooling",
    "--prefix",
    "--repo-type",
    "--revision",
    "--target",
}
"""Options of other tools' commands."""
GOOD = "version: 1\nname: mine\nspaces:\n  mlp: {score: rcpu, compensation: {method: rotation}}\n"


def list_recipes(*options: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads(ok("recipe", "list", *options, "--json"))}


def test_the_first_list_is_short_and_the_lists_together_have_all():
    first, papers, every = list_recipes(), list_recipes("--papers"), list_recipes("--all")
    assert len(first) <= 13
    assert {"best-uniform", "best", "ridge", "magnitude", "depth", "values", "sparsegpt", "corp-mlp"} <= first.keys()
    assert not first.keys() & papers.keys()
    assert sorted([*first, *papers]) == sorted(every) == list(shipped_recipes())
    assert [name for name, entry in every.items() if entry["default"]] == ["best-uniform"]
    best = first["best"]
    assert (best["goal"], best["data"], best["target"]) == ("loss", ["text", "images", "statistics"], "drift")
    assert best["calibration"] == "ckpt-prune calibrate --folds 4"
    assert first["laco-flap"]["calibration"] is None


def test_the_first_list_is_one_table():
    table, legend = ok("recipe", "list").split("\n\n")
    rows = [re.split("  +", line) for line in table.splitlines()]
    assert rows[0] == ["you want", "recipe", "time", "loads with", "data"]
    assert ["stock classes", "magnitude", "0.03", "stock", "none"] in rows
    assert [row[1] for row in rows[1:]] == list(list_recipes())
    assert legend.startswith("best-uniform is the default.")
    lines = f"{table}\n\n{legend}".splitlines()
    assert (len(lines) <= 24, max(map(len, lines)) <= 80) == (True, True)


@pytest.mark.parametrize("option", ["--papers", "--all"])
def test_the_long_lists_have_a_table_and_summaries_for_each_goal(option):
    *groups, legend = ok("recipe", "list", option).split("\n\n")
    entries = list_recipes(option)
    lines = [re.split("  +", line) for group in groups for line in group.splitlines()[2:]]
    assert [line[0] for line in lines] == list(entries)
    for name, time, loads, _, summary in (line if len(line) == 5 else [*line, ""] for line in lines):
        assert [time, loads, summary] == [
            f"{entries[name][key]:g}" if key == "time" else entries[name][key] for key in ("time", "loads", "summary")
        ]
    assert legend.startswith("time: of pruning, as a multiple of ridge.")


def test_show_keeps_comments_and_explains_every_key():
    shown = ok("recipe", "show", "rcpu")
    text = recipe_text(shipped_recipes()["rcpu"])
    assert shown.startswith(text)
    assert shown.startswith("#")
    assert yaml.safe_load(shown) == yaml.safe_load(text)
    explained = re.findall(r"^#   ([\w.*]+): \S", shown[len(text) :], re.MULTILINE)
    assert {"target", "spaces.*.score", "spaces.*.compensation.method"} <= set(explained)


def keys_in(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key path of a recipe; names of spaces are not keys."""
    for key, value in values.items():
        if prefix != "spaces.":
            yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys_in(value, "spaces.*." if prefix == "spaces." else f"{prefix}{key}.")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_key_of_a_shipped_recipe_is_explained_in_a_sentence(name):
    text = recipe_text(shipped_recipes()[name])
    comment = ok("recipe", "show", name).removeprefix(text)
    sentences = dict(re.findall(r"^#   ([\w.*]+): (\S.*(?:\n#     .*)*)", comment, re.MULTILINE))
    assert sentences.keys() == set(keys_in(yaml.safe_load(text)))
    assert all(len(sentence.split()) >= 3 for sentence in sentences.values())


def test_keys_of_a_named_rotation_can_be_changed():
    changed = load_recipe("denoise-rotator-wanda-50", ("rotation.steps=7",)).rotation
    assert (changed.steps, changed.retraction) == (7, "qr")
    assert load_recipe("sparsegpt", ("mask.pattern=1:4",)).ratio == 0.75


def test_copy(place):
    assert ok("recipe", "copy", "rcpu") == "rcpu.yaml\n"
    assert ok("recipe", "copy", "flap", "mein rezept ü.yaml") == "mein rezept ü.yaml\n"
    Path("folder").mkdir()
    assert ok("recipe", "copy", "rcpu", "folder") == "folder/rcpu.yaml\n"
    assert (
        Path("folder/rcpu.yaml").read_text() == Path("rcpu.yaml").read_text() == recipe_text(shipped_recipes()["rcpu"])
    )
    assert ok("recipe", "validate", "mein rezept ü.yaml") == "mein rezept ü.yaml: recipe flap is valid\n"


@pytest.mark.parametrize("name", shipped_recipes())
def test_validate(name):
    assert ok("recipe", "validate", name) == f"{name}: recipe {name} is valid\n"


def test_schema():
    schema = json.loads(ok("recipe", "schema"))
    assert sorted(schema["properties"]) == sorted(TOP.split(", "))
    assert schema["additionalProperties"] is False
    assert "rotation" in schema["$defs"]["Compensation"]["properties"]["method"]["enum"]
    assert "lambda" in schema["$defs"]["Compensation"]["properties"]
    recovery = schema["$defs"]["Recovery"]
    assert recovery["additionalProperties"] is False
    assert all(field["description"] for field in recovery["properties"].values())


# ---- files that are no recipes ---------------------------------------------------------------------------------


def test_a_config_or_a_plan_is_not_a_recipe(place):
    assert read_refusal("recipe", "validate", "dense/config.json") == (
        "dense/config.json is not a recipe: it has neither name nor spaces (`ckpt-prune recipe show rcpu`)"
    )
    ok("plan", "dense", "--recipe", "magnitude", "-o", "plan.json")
    assert read_refusal("prune", "dense", "--recipe", "plan.json", "-o", "out").startswith("plan.json")


# ---- --set and --ratio -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [["--ratio", "50%"], ["--set", "ratio=50%"]])
def test_percentages_are_ratios(place, change):
    def plan(*changes):
        return ok("plan", "dense", "--recipe", "magnitude", *changes, "--json")

    assert plan(*change) == plan(change[0], change[1].replace("50%", "0.5"))


# ---- several, and those of outputs ---------------------------------------------------------------------------------


def test_several_recipes_are_checked_at_once(place):
    assert ok("recipe", "validate", "ridge", "best") == "ridge: recipe ridge is valid\nbest: recipe best is valid\n"
    assert list(json.loads(ok("recipe", "validate", "ridge", "best", "--json"))) == ["ridge", "best"]
    Path("a.yaml").write_text(GOOD.replace("1", "2"))
    Path("b.yaml").write_text(GOOD + "target: late\n")
    assert read_refusal("recipe", "validate", "a.yaml", "ridge", "b.yaml") == (
        "a.yaml, line 1: version: 2 is not 1; b.yaml, line 5: target: late is not one of dense, sequential, drift"
    )


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_that_is_written_out_is_the_same(tmp_path, name):
    recipe = load_recipe(name)
    (tmp_path / "again.yaml").write_text(text_of_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")).digest == recipe.digest


def test_the_recipe_of_an_output_makes_the_same_output(place):
    ok("prune", "dense", "--recipe", "ridge", "--ratio", "0.5", *TEXT, "-o", "first")
    ok("prune", "dense", "--recipe", "first", *TEXT, "-o", "second")
    first, second = read_json("first/ckpt_prune.json"), read_json("second/ckpt_prune.json")
    assert first["files"].keys() >= {"ckpt_prune_recipe.yaml", "model.safetensors"}
    assert "ckpt_prune_recipe.yaml" in first["side_files"]
    assert second["files"] == first["files"]
    assert second["recipe_digest"] == first["recipe_digest"]
    Path("first/ckpt_prune_recipe.yaml").write_text(GOOD)
    assert "ckpt_prune_recipe.yaml" in run("verify", "first").stdout


def test_a_target_that_the_model_changes_is_told_and_kept_by_its_key(place):
    save(Path("gemma"), "gemma3_text", head_dim=16)
    why = "a norm follows the layers that are fitted to the drift, and would enlarge their corrections"
    line = f"target is sequential here, and not drift as the recipe says: {why}"
    assert line in ok("prune", "gemma", "--dry-run", *TEXT).splitlines()
    ok("prune", "gemma", "--recipe", "best-uniform", *TEXT, "-o", "out")
    assert read_json("out/ckpt_prune.json")["changes"] == [
        {"key": "target", "asked": "drift", "used": "sequential", "why": why}
    ]
    assert f"- {line}." in Path("out/README.md").read_text().splitlines()
    assert load_recipe("out").target == "sequential"


def test_widths_per_block_are_not_offered_where_the_recipe_refuses_them(place):
    rounding = ("--set", "quantize.format=int8")
    assert "(--recipe best)" in ok("prune", "dense", "--dry-run", *TEXT)
    assert "(--recipe best)" not in ok("prune", "dense", "--dry-run", *TEXT, *rounding)
    assert read_refusal("prune", "dense", "--recipe", "best", *rounding, "--dry-run", *TEXT).endswith(
        "runtimes of quantised weights run no code of our own: say widths: uniform, or leave out quantize"
    )


def test_every_option_that_is_named_exists():
    known = {option for command in COMMANDS for option in options_of(command)} | {"--help", "--version"}
    unknown = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                unknown |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", node.value)) - known
    assert unknown == OTHERS


def test_what_needs_no_model_loads_no_torch(tmp_path):
    commands = [["--help"], ["recipe", "list"], ["prune", "--help"], ["prune", "m", "--recipe", "rigde", "-o", "o"]]
    code = f"""import sys
from ckpt_prune.cli.main import main
for words in {commands}:
    try:
        main(words)
    except SystemExit:
        pass
print(sorted(sys.modules.keys() & {{"torch", "transformers", "numpy", "onnx"}}))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
