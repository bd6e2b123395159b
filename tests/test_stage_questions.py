"""No code outside the folders of the stages asks for single stages of a recipe or report, but for those below.

A new stage must not be forgotten anywhere, so code asks all stages for what they know (`stages.folders`, `StageKeys`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import ckpt_prune
from ckpt_prune.job.report import CommonReport
from ckpt_prune.stages import STAGES
from ckpt_prune.stages.report import Report

PACKAGE = Path(ckpt_prune.__file__).parent
KEYS = {kind.key for kind in STAGES} - {"spaces"}
"""Of single stages. Spaces stand in the recipe itself, beside the keys that all stages share."""
FIELDS = KEYS | Report.model_fields.keys() - CommonReport.model_fields.keys()
"""Of recipes and reports."""
HOLDERS = {"recipe", "report", "source_report", "prepared", "settled", "start", "preview", "whole", "pruned", "job"}
"""What is asked, by the name it has where it is asked. A plan is not: blocks and units are what it says."""
VALUES = {"values", "recipe"}
"""Names of recipes that are not read yet."""
ALLOWED = {
    "checkpoint/folder_kinds.py": (2, "which files of a folder are its own is read without recipes"),
    "stages/recipe_files.py": (1, "--pattern and --rotate are options for masks alone"),
    "runner/file_target.py": (1, "a file with fewer tokens is measured where both models have them"),
    "runner/fewer_bits.py": (1, "an exported file may have fewer bits than the output"),
    "runner/read_job.py": (1, "samples to train on are chosen by the keys of recovery"),
    "runner/read_recipe.py": (1, "--perplexity-after is an option of recovery alone"),
    "runner/recover.py": (1, "the command recover has a recipe of this one stage"),
    "runner/sweep_points.py": (1, "a point of a sweep is a table of sites"),
    "verification/verify_quantized.py": (1, "weights of few bits are verified without a dense model"),
}
"""Module → how many questions it may ask, and why."""


def is_key(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in KEYS


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imported_keys(tree: ast.Module) -> set[str]:
    """Names of classes of keys that a module imports."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {each.name for node in froms if str(node.module).endswith(".keys") for each in node.names}


def questions(source: str) -> Iterator[str]:
    """The questions of a module: recipe.has("mask"), recipe.get(Mask), "mask" in values, report.mask and the like."""
    tree = ast.parse(source)
    classes = imported_keys(tree)
    for node in ast.walk(tree):
        asked = False
        if isinstance(node, ast.Call):
            function, args = name_of(node.func), node.args
            asked = (function in ("has", "get", "pop") and len(args) == 1 and is_key(args[0])) or (
                function == "get" and bool(args) and name_of(args[0]) in classes
            )
            asked |= function in ("isinstance", "getattr") and (name_of(args[1]) in classes or is_key(args[1]))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = any(map(is_key, sides)) and any(name_of(side) in VALUES or name_of(side) == "key" for side in sides)
        elif isinstance(node, ast.Subscript):
            asked = is_key(node.slice) and name_of(node.value) in VALUES
        elif isinstance(node, ast.Attribute):
            asked = node.attr in FIELDS and name_of(node.value) in HOLDERS
        if asked:
            yield ast.unparse(node)


def test_single_stages_are_asked_for_in_few_places():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        in_folder = module.parts[0] == "stages" and len(module.parts) > 2
        if not in_folder and (asked := list(questions(path.read_text(encoding="utf-8")))):
            found[module.as_posix()] = asked
    counts = {module: len(asked) for module, asked in found.items()}
    assert counts == {module: count for module, (count, _) in ALLOWED.items()}, found
    assert sum(counts.values()) <= 10


def test_questions_are_found():
    source = (
        "from ckpt_prune.stages.mask.keys import Mask\n"
        "recipe.has('mask')\nrecipe.get(Mask)\nisinstance(stage, Mask)\n'mask' in values\nvalues['mask']\n"
        "prepared.recipe.depth\nreport.adapters\ngetattr(recipe, 'export', None)\nstage.key == 'mask'\n"
        "model.has('depth', 'bias')\nplan.depth\nrecipe.ratio\n"
    )
    assert len(list(questions(source))) == 9
