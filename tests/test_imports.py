"""Imports go one way, and lead to what there is: no circles between modules or rooms, lazy imports included."""

import ast
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import ckpt_prune

PACKAGE = Path(ckpt_prune.__file__).parent
ROOT = PACKAGE.parent


@cache
def modules(folder: Path = PACKAGE) -> dict[str, Path]:
    names = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(*, lazy: bool = True) -> dict[str, set[str]]:
    """Module → modules of this package that it imports: anywhere, or where it is imported itself."""
    paths = modules()
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported = graph[name] = set()
        tree = parse(path)
        for node in ast.walk(tree) if lazy else tree.body:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name in paths}
            elif isinstance(node, ast.ImportFrom) and node.module in paths:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (inside & paths.keys()) or {node.module}
        imported -= {name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph[node]):
            if nodes := walk(other, [*path, node]):
                return nodes
        done.add(node)
        return []

    return next((nodes for node in sorted(graph) if (nodes := walk(node, []))), [])


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") > 1 or (PACKAGE / module.split(".")[-1]).is_dir() else module


def test_no_module_imports_itself_by_way_of_others():
    assert circle(imports()) == []


def test_no_room_imports_itself_by_way_of_others():
    rooms: dict[str, set[str]] = {}
    for module, imported in imports().items():
        rooms.setdefault(room(module), set()).update(room(other) for other in imported)
    for name, others in rooms.items():
        others.discard(name)
    assert circle(rooms) == []


COMMANDS = ("prune", "quantize", "export", "evaluate", "plan", "convert", "frontier.checkpoints", "frontier.graphs")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_without_packages_of_extras(command):
    """Packages that read or write one kind of file are imported when such a file is asked for."""
    graph, left, reached = imports(lazy=False), [f"ckpt_prune.runner.{command}"], set[str]()
    while left:
        module = left.pop()
        reached.add(module)
        left += graph[module] - reached
    assert {"gguf", "libgguf", "peft", "xllamacpp"}.isdisjoint(
        name for module in reached for name in top_packages(modules()[module])
    )


def top_packages(path: Path) -> set[str]:
    """Packages that a file imports where it is imported itself."""
    names = set()
    for node in parse(path).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_recipes_and_reports_are_read_without_torch():
    """Modules are imported in one process, so that the first which loads torch is named."""
    stages = [name for name, path in modules(PACKAGE / "stages").items() if path.stem in ("keys", "show", "records")]
    assert len(stages) > 20
    names = [
        *stages,
        "ckpt_prune.stages.recipe_files",
        "ckpt_prune.stages.report",
        "ckpt_prune.runner.sections",
        "ckpt_prune.runner.read_recipe",
    ]
    script = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {names}:\n"
        "    import_module(name)\n"
        "    loaded = {'torch', 'transformers'} & sys.modules.keys()\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
        "from ckpt_prune.stages.recipe_files import load_recipe\n"
        "assert load_recipe('rcpu').has('spaces')\n"
        "assert 'torch' not in sys.modules, 'reading a recipe loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names_of(path: Path) -> set[str]:
    """Names that a module defines or imports at its top level."""
    names: set[str] = set()
    nodes: list[ast.AST] = [parse(path)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name):
            names |= {node.id} if isinstance(node.ctx, ast.Store) else set()
        else:
            nodes += ast.iter_child_nodes(node)
    return names


def missing(script: ast.Module) -> list[str]:
    """Names of this package and its tests that a script imports and that do not exist."""
    existing = modules() | modules(ROOT / "tests")
    absent = []
    for node in ast.walk(script):
        if isinstance(node, ast.Import):
            absent += [alias.name for alias in node.names if is_own(alias.name) and alias.name not in existing]
        elif isinstance(node, ast.ImportFrom) and not node.level and is_own(node.module or ""):
            names = [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in existing]
            absent += [f"{node.module}.{name}" for name in names if not has(str(node.module), name)]
    return absent


def has(module: str, name: str) -> bool:
    """Whether a module has a name, perhaps one that only exists once the module has run."""
    path = (modules() | modules(ROOT / "tests")).get(module)
    return path is not None and (name in names_of(path) or hasattr(import_module(module), name))


def is_own(module: str) -> bool:
    return module.split(".")[0] in (PACKAGE.name, "tests")


def test_every_import_names_what_exists():
    scripts = [path for room in ("ckpt_prune", "tests", "tools") for path in sorted((ROOT / room).rglob("*.py"))]
    # The toy stage is part of the package only in a process that adds it.
    scripts = [path for path in scripts if path.parent != ROOT / "tests" / "stages" / "toy" / "scale"]
    assert len(scripts) > 500
    assert {str(path): gone for path in scripts if (gone := missing(parse(path)))} == {}


def test_an_import_of_nothing_is_found():
    script = "from ckpt_prune.job.job import Job, Nothing\nfrom ckpt_prune.nowhere import some\nimport ckpt_prune.no"
    assert missing(ast.parse(script)) == ["ckpt_prune.job.job.Nothing", "ckpt_prune.nowhere.some", "ckpt_prune.no"]
