"""Imports go one way: no circles between modules or between rooms, lazy and type-checking imports included.

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
