"""The list of tests that `--thorough` alone runs names tests that there are."""

import ast

from tests.conftest import ROOT, THOROUGH


def test_every_name_is_that_of_a_test() -> None:
    for name in THOROUGH:
        file, *path = name.split("::")
        nodes: list[ast.AST] = [ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))]
        for part in path:
            nodes = [each for node in nodes for each in node.body if getattr(each, "name", None) == part]  # type: ignore[attr-defined]
        assert len(nodes) == 1, name
