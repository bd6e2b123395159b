"""Imports go one way, and lead to what there is: no circles between modules or rooms, lazy imports included.

The methods of a stage import what works on tensors, which knows the stage's class: those imports alone are no circle.
"""

import ast
from pathlib import Path

import ckpt_prune

PACKAGE = Path(ckpt_prune.__file__).parent


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(*, lazily: bool = False) -> dict[str, set[str]]:
    """Module → modules of this package that it imports anywhere; stages may import their own work lazily."""
    known = modules()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        own = found[name] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body if lazily and path.name == "stage.py" else ast.walk(tree):
            if isinstance(node, ast.Import):
                own |= {alias.name for alias in node.names if alias.name in known}
            elif isinstance(node, ast.ImportFrom) and node.module in known:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                own |= (inside & known.keys()) or {node.module}
        own -= {name}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph[node]):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def room(module: str) -> str:
    return module.split(".")[1] if module.count(".") > 1 or (PACKAGE / module.split(".")[-1]).is_dir() else module


def test_no_module_imports_itself_by_way_of_others():
    assert circle(imports(lazily=True)) == []


def test_no_room_imports_itself_by_way_of_others():
    rooms: dict[str, set[str]] = {}
    for module, own in imports().items():
        rooms.setdefault(room(module), set()).update(room(other) for other in own)
    for name, others in rooms.items():
        others.discard(name)
    assert circle(rooms) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def names_of(path: Path) -> set[str]:
    """Names that a module defines or imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing(script: str) -> list[str]:
    """Pieces of this package that a script imports and that are not there."""
    known = modules()
    found = []
    for node in ast.walk(ast.parse(script)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(f"{PACKAGE.name}."):
            continue
        path = known.get(str(node.module))
        there = set() if path is None else names_of(path)
        wanted = [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in known]
        found += [f"{node.module}.{name}" for name in wanted if name not in there]
    return found


def test_tools_import_what_there_is():
    tools = sorted((PACKAGE.parent / "tools").glob("*.py"))
    assert tools
    assert {path.name: gone for path in tools if (gone := missing(path.read_text(encoding="utf-8")))} == {}


def test_what_is_not_there_is_found():
    script = "from ckpt_prune.job.job import Job, Nothing\nfrom ckpt_prune.nowhere import some\nimport ckpt_prune"
    assert missing(script) == ["ckpt_prune.job.job.Nothing", "ckpt_prune.nowhere.some"]
