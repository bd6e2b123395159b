"""Documents: links lead somewhere, recipes and their keys are all named, citations hold."""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from ckpt_prune.cli.command import Command
from ckpt_prune.model import family_keys
from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import ConsumerSpace, Incidence, RotarySpace, Space, StrictModel
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.stages import STAGES
from ckpt_prune.stages.recipe_files import json_schema, load_recipe
from tests.cli.test_help import EVERY
from tools import families, runtimes
from tools.lowest import constraints

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckpt_prune"
RECIPES = ROOT / "recipes" / "README.md"
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        RECIPES,
        ROOT / "CHANGELOG.md",
        *ROOT.glob("recipes/guides/*.md"),
        *ROOT.glob("tools/**/*.md"),
        *PACKAGE.rglob("README.md"),
        families.PAGE,
        runtimes.PAGE,
    )
)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
CITED = re.compile(r"([\w/]+)/README\.md(?:, sections? (\d+)(?: and (\d+))?)?")


def prose(path: Path) -> str:
    """A document without its fenced code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    slugs = set()
    for heading in headings(path):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        slugs.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return slugs


def dangling(path: Path) -> Iterator[str]:
    """Relative links of a document that lead nowhere."""
    for link in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(name: str):
    assert list(dangling(ROOT / name)) == []


def inline_commands(path: Path) -> Iterator[tuple[Command, list[str]]]:
    """Commands of ckpt-prune in the sentences and tables of a document, each with what is given to it."""
    for code in re.findall(r"`([^`\n]+)`", prose(path)):
        words = code.partition(", then ")[0].removeprefix("ckpt-prune ").split()
        for length in (2, 1):
            if (command := EVERY.get(" ".join(words[:length]))) is not None:
                yield command, words[length:]
                break


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_in_sentences_have_options_that_there_are(name: str):
    for command, given in inline_commands(ROOT / name):
        flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        options = {word.partition("=")[0].strip("[]") for word in given if re.match(r"\[?-[-a-z]", word)}
        assert options <= flags | {"--help", "-h"}, (command.name, given)


def test_the_page_of_families_is_that_of_the_descriptions() -> None:
    """`python tools/families.py` writes it."""
    assert families.PAGE.read_text(encoding="utf-8") == families.page()


def test_the_page_of_runtimes_is_that_of_their_data() -> None:
    """`python tools/runtimes.py` writes it."""
    assert runtimes.PAGE.read_text(encoding="utf-8") == runtimes.page()
    assert runtimes.front_table() in runtimes.README.read_text(encoding="utf-8")


def test_every_key_of_a_description_is_explained() -> None:
    text = (families.ROOM / "README.md").read_text(encoding="utf-8")
    added = {"architecture", "used_for", "variant", "prefixed", "outside", "angles"}
    models = (Family, *family_keys_models(), *(Space, ConsumerSpace, RotarySpace, Incidence))
    keys = {key for model in models for key in model.model_fields} - added
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def family_keys_models() -> list[type[StrictModel]]:
    return [value for value in vars(family_keys).values() if isinstance(value, type) and issubclass(value, StrictModel)]


def test_links_that_lead_nowhere_are_noticed(tmp_path: Path):
    (tmp_path / "other.md").write_text("# A `b` c: d\n\n## E\n\n## E\n")
    links = "other.md", "other.md#a-b-c-d", "other.md#e-1", "https://a.b/c", "#here", "no.md", "other.md#f", "#there"
    document = tmp_path / "README.md"
    document.write_text("# Here\n" + " ".join(f"[x]({link})" for link in links) + "\n```\n[x](code.md)\n```\n")
    assert list(dangling(document)) == ["no.md", "other.md#f", "#there"]


def test_every_page_is_linked_from_the_front_page_or_from_where_it_leads_for_all_of_them():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    linked = {link.partition("#")[0] for page in pages for link in LINK.findall(prose(page))}
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes" / "guides").glob("*.md")}
    assert {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("README.md")} <= linked
    assert {"recipes/README.md", "tools/README.md", "CONTRIBUTING.md"} | guides <= linked


def test_every_shipped_recipe_is_named():
    text = RECIPES.read_text(encoding="utf-8")
    assert [name for name, file in shipped_recipes().items() if not file.changes and f"`{name}`" not in text] == []


def keys_of(schema: Any) -> set[str]:
    """Every key of a JSON schema's objects."""
    if isinstance(schema, list):
        return set().union(*map(keys_of, schema))
    if not isinstance(schema, dict):
        return set()
    properties = schema.get("properties", {})
    return set(properties).union(*map(keys_of, schema.values()))


def test_every_key_of_a_recipe_is_named():
    text = RECIPES.read_text(encoding="utf-8")
    keys = keys_of(json_schema())
    assert {"spaces", "lambda_grid", "retraction", "opset", "flops"} < keys
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_the_recipes_that_are_shown_are_valid(tmp_path: Path):
    shown = re.findall(r"^```yaml\n(version:.*?)^```$", RECIPES.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for index, text in enumerate(shown):
        path = tmp_path / f"{index}.yaml"
        path.write_text(text)
        load_recipe(str(path))
    assert len(shown) == 9


@pytest.mark.parametrize("key", [stage.key for stage in STAGES])
def test_the_class_of_each_stage_shows_a_recipe_that_is_valid(key: str, tmp_path: Path):
    tree = ast.parse((PACKAGE / "stages" / key / "stage.py").read_text(encoding="utf-8"))
    first = next(ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef))
    path = tmp_path / "shown.yaml"
    path.write_text("\n".join(line for line in first.splitlines() if line.startswith("    ")))
    assert getattr(load_recipe(str(path)), key)


def docstrings() -> Iterator[tuple[str, str]]:
    """File, and docstring of it or of something in it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield path.relative_to(PACKAGE).as_posix(), " ".join((ast.get_docstring(node) or "").split())


def test_docstrings_cite_sections_that_exist():
    cited = [(file, match) for file, text in docstrings() for match in CITED.finditer(text)]
    strange = []
    for file, match in cited:
        room, *sections = match.groups()
        path = PACKAGE / room / "README.md"
        numbers = {heading.partition(".")[0] for heading in headings(path)} if path.is_file() else set()
        if not path.is_file() or any(section not in numbers for section in sections if section):
            strange.append(f"{file}: {match.group()}")
    assert strange == []
    assert len(cited) > 20


def test_docstrings_cite_nothing_outside_the_repository():
    outside = re.compile(r"\bMETHODS,? (section|\d)|\bDESIGN\b|\bshared/(METHODS|DESIGN)")
    assert [file for file, text in docstrings() if outside.search(text)] == []


@pytest.mark.parametrize("name", ["transformers", "torch", "onnxruntime", "pydantic"])
def test_the_versions_that_are_tested_are_allowed_and_no_later_transformers(name: str):
    """A later transformers may rename what the exporter and the loading of outputs need: it is tried first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bounds,) = (
        requirement.specifier for requirement in map(Requirement, project["dependencies"]) if requirement.name == name
    )
    (pinned,) = re.findall(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert bounds.contains(pinned)
    oldest = dict(line.split(";")[0].strip().split("==") for line in constraints())[name]
    assert bounds.contains(oldest)
    if name == "transformers":
        major, minor, _ = pinned.split(".")
        assert not bounds.contains(f"{major}.{int(minor) + 1}.0")


# ---- what messages name ----------------------------------------------------------------------------------------------

_PLACE = re.compile(
    r"(?:[\w-]+/)+[\w.-]+\.(?:md|py|sh|txt)\b|\b(?:tools|tests)/\w+|\b(?:CONTRIBUTING|CHANGELOG|FAMILIES|RUNTIMES)\.md\b"
)
"""A file of a checkout, as a text may name it."""


def said_texts() -> Iterator[tuple[str, str]]:
    """Every text of the package that is no docstring or comment, with its place; and what recipes and schema say."""
    for path in sorted((ROOT / "ckpt_prune").rglob("*.py")):
        tree = ast.parse(path.read_text())
        bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
        docs = {id(each.value) for body in bodies for each in body if isinstance(each, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    yield "recipe schema", json.dumps(json_schema())
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        yield path.name, path.read_text()
    for path in sorted((ROOT / "ckpt_prune" / "model").rglob("*.json")):
        yield path.name, path.read_text()


def test_no_message_sends_to_a_file_that_a_wheel_does_not_have():
    """A wheel holds the folder ckpt_prune, and in it recipes: both by the paths that messages may say."""
    kept = {"OUT/onnx/README.md", "custom_generate/generate.py"}  # of an output, and of a model
    named = [(place, match[0]) for place, text in said_texts() for match in _PLACE.finditer(text)]
    assert ("best-scaled.yaml", "ckpt_prune/stages/recovery/README.md") in named
    wrong = [
        (place, name)
        for place, name in named
        if name not in kept and not (name.startswith("ckpt_prune/") and (ROOT / name).is_file())
    ]
    assert wrong == []
