"""YAML with the numbers of version 1.2, from files nobody vouches for."""

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import yaml


class Yaml12Loader(yaml.SafeLoader):
    """A safe loader that reads numbers as YAML 1.2 does.

    PyYAML reads YAML 1.1, where 2:4 is the number 124 in base sixty, 010 is 8 and 1e-3 is text.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {  # noqa: RUF012 - as PyYAML declares it
        first: [
            (tag, pattern) for tag, pattern in found if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        ]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


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


def read_yaml(text: str) -> tuple[yaml.Node | None, Any]:
    """The node of a YAML text, and its value.

    Raises:
        ValueError: it is not YAML, is nested too deeply, refers to itself, holds a value that cannot be read, or stands
            for too many values: 500 bytes of aliases can stand for any number. The message is one line.
    """
    try:
        root = _composed(text)
        if root is None:
            return None, None
        # PyYAML puts what a merge key stands for into the node itself.
        return root, Yaml12Loader("").construct_document(deepcopy(root) if "<<" in text else root)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


@lru_cache(maxsize=32)
def _composed(text: str) -> yaml.Node | None:
    """The node of a text, which nobody may change: a command asks for a recipe's several times, and PyYAML is slow."""
    root = yaml.compose(text, Loader=Yaml12Loader)
    if root is not None and _count(root, {}) > _MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {_MOST_VALUES} values")
    return root


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values that a node stands for; each node is looked at once."""
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError("it refers to itself")
        return known[id(node)]
    known[id(node)] = 0
    children = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
    inner = sum(_count(each, known) for each in children) if isinstance(children, list) else 0
    known[id(node)] = 1 + inner
    return 1 + inner
