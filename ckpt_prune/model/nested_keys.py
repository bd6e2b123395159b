"""Keys of configs, with dots between nested ones: `decoder.hidden_size` is that of the config under `decoder`."""

import copy
from collections.abc import Mapping
from functools import reduce
from typing import Any


def read_key(config: Any, key: str) -> Any:
    """Return what a config of transformers has under a key; None if it, or one on the way, has nothing."""
    return reduce(lambda own, name: getattr(own, name, None), key.split("."), config)


def set_key(config: Any, key: str, value: Any) -> None:
    """Set a key of a config of transformers. Configs on the way are copied, so that others keep theirs."""
    outer, _, inner = key.partition(".")
    if inner:
        nested = copy.copy(getattr(config, outer))
        set_key(nested, inner, value)
        value = nested
    setattr(config, outer, value)


def with_keys(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with some values changed."""
    changed = dict(values)
    for key, value in changes.items():
        outer, _, inner = key.partition(".")
        changed[outer] = with_keys(changed[outer], {inner: value}) if inner else value
    return changed


def find_key(values: Mapping[str, Any], key: str) -> Any:
    """Return what a config.json has under a key; None if it, or one on the way, has nothing."""
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def flat_keys(values: Mapping[str, Any], within: str) -> dict[str, Any]:
    """Return the values of a config.json's own keys, and of those of the config under `within` and its text's.

    Args:
        within: key of a nested config; there may be none.
    """
    flat = dict(values)
    for name in (within, f"{within}.text_config"):
        nested = find_key(values, name)
        flat |= {f"{name}.{key}": value for key, value in nested.items()} if isinstance(nested, Mapping) else {}
    return flat
