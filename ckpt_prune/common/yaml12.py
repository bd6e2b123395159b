"""YAML with the numbers of version 1.2, from files nobody vouches for."""

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml

from ckpt_prune.common.errors import one_line


class Yaml12Loader(yaml.SafeLoader):
    """A safe loader that reads numbers as YAML 1.2 does.

    PyYAML reads YAML 1.1, where 2:4 is the number 124 in base sixty, 010 is 8 and 1e-3 is text. It goes some frames
    deeper at every level, so levels are counted: a text is refused in every process, or in none.
    """

    _level = 0

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {  # noqa: RUF012 - as PyYAML declares it
        first: [
            (tag, pattern) for tag, pattern in pairs if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        ]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._level == _DEEPEST:
            raise ValueError(_TOO_DEEP)
        self._level += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._level -= 1
        return node


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


Yaml12Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _decimal)

_MOST_VALUES = 20_000
"""Keys and values of a text, every alias counted as what it stands for."""
_DEEPEST = 30
"""Levels of a text, every alias counted as what it stands for."""
_TOO_DEEP = f"nested too deeply: {_DEEPEST} levels are read"


def read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the node of a YAML text, and its value.

    Raises:
        ValueError: it is not YAML, has too many levels, refers to itself, holds a value that cannot be read, or stands
            for too many values: 500 bytes of aliases can stand for any number. The message is one line.
    """
    try:
        root = _compose(text)
        if root is None:
            return None, None
        # PyYAML puts what a merge key stands for into the node itself.
        return root, Yaml12Loader("").construct_document(deepcopy(root) if "<<" in text else root)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        # PyYAML's constructors take what a tag says for granted: !!timestamp of a list, !!int of nothing.
        raise ValueError(f"a value is not of the type that its tag says ({one_line(error)})") from error


@lru_cache(maxsize=128)
def _compose(text: str) -> yaml.Node | None:
    """The node of a text, which nobody may change: a command asks for a recipe's several times, and PyYAML is slow."""
    root = yaml.compose(text, Loader=Yaml12Loader)
    values, levels = (0, 0) if root is None else _measure(root, {})
    if values > _MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {_MOST_VALUES} values")
    if levels > _DEEPEST:
        raise ValueError(_TOO_DEEP)
    return root


def _measure(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the values that a node stands for and their levels; each node is looked at once."""
    if id(node) in known:
        if not known[id(node)][0]:
            raise ValueError("it refers to itself")
        return known[id(node)]
    known[id(node)] = (0, 0)
    children = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
    inner = [_measure(each, known) for each in children] if isinstance(children, list) else []
    known[id(node)] = 1 + sum(values for values, _ in inner), 1 + max((levels for _, levels in inner), default=0)
    return known[id(node)]
