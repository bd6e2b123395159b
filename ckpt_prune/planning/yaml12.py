"""YAML with the numbers of version 1.2."""

import re
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
