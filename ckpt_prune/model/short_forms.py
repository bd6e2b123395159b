"""Short forms of descriptions: what follows from the rest of a file, by `standard_spaces.json`, is not stated in it."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from ckpt_prune.model.spaces import KIND_OF_SPACE

_EFFECTS = ("scale", "multiplier", "gate", "norm")
_WHOLE_SPACE = {"unit", "units", "rounding", "rows", "config"}
"""Keys of a space that is stated in full, as in descriptions of earlier versions: nothing is added to it."""


def merge_descriptions(stated: Mapping[str, Any], changes: Mapping[str, Any], *merged: str) -> dict[str, Any]:
    """Return a description with the keys of `changes` in place of its own.

    What `merged` keys hold changes one by one, and of a space that states no rows the single keys.
    """
    values = {**stated, **changes}
    for key in merged:
        if isinstance(stated.get(key), dict) and isinstance(changes.get(key), dict):
            values[key] = {**stated[key], **changes[key]}
    for name, space in _spaces(changes).items() if "spaces" in merged else ():
        if "rows" not in space:
            values["spaces"][name] = {**_spaces(stated).get(name, {}), **space}
    return values


def complete_description(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description with everything that its keys imply. What is not of the right type is left as it is."""
    values = dict(stated)
    if not all(isinstance(values.get(key, {}), dict) for key in ("dimensions", "attention", "spaces")):
        return values
    stated_keys = {name: _to_list(keys) for name, keys in values.get("dimensions", {}).items()}
    usual = {"hidden": ["hidden_size"], "layers": ["num_hidden_layers"], "query_heads": ["num_attention_heads"]}
    usual = {name: stated_keys.get(name, keys) for name, keys in usual.items()}
    usual |= {"kv_heads": usual["query_heads"], "head_dim": ["head_dim"]}
    usual |= {"mlp": ["intermediate_size"]} if "mlp" in values.get("spaces", {}) else {}
    values["dimensions"] = usual | stated_keys
    rotary = values.pop("rotary", None)
    values["spaces"] = ({"rotary": rotary} if rotary else {}) | values.get("spaces", {})
    values["spaces"] = {name: _complete_space(name, values) for name in values["spaces"]}
    if isinstance(values.get("bias_slots"), dict):
        slots: dict[str, Any] = {}
        for named, slot in values["bias_slots"].items():
            slots |= dict.fromkeys(_linears(named, values, "rows", "columns"), slot)
        values["bias_slots"] = {module: slot for module, slot in slots.items() if slot is not False}
    residual = values.get("residual")
    if isinstance(residual, dict) and isinstance(residual.get("reads"), dict):
        written = [values.get("attention", {}).get("output")]
        written += [module for name in _spaces(values) for module in _linears(name, values, "columns")]
        starts = [values["embedding"]] if values.get("embedding") and "projections" not in residual else []
        reads = {
            norm: [module for each in _to_list(fed) for module in _linears(each, values, "rows")]
            for norm, fed in residual["reads"].items()
        }
        values["residual"] = {"writes": [*dict.fromkeys(written)], "starts": starts, **residual, "reads": reads}
    return values


def shorten_description(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description without the keys of spaces that `complete_description` adds by itself."""
    values, full = dict(stated), complete_description(stated)["spaces"]
    for name, space in stated["spaces"].items():
        for key in space:
            fewer = {each: value for each, value in values["spaces"][name].items() if each != key}
            shorter = values | {"spaces": values["spaces"] | {name: fewer}}
            values = shorter if complete_description(shorter)["spaces"] == full else values
    spaces = {
        name: {key: _alone(value) if key in ("rows", "columns", "tables") else value for key, value in space.items()}
        for name, space in values["spaces"].items()
    }
    return values | {"spaces": spaces}


def _alone(stated: Any) -> Any:
    """Return incidences with the module's name in place of one that says nothing else."""
    if isinstance(stated, list):
        return [_alone(each) for each in stated]
    return stated["module"] if stated.keys() == {"module"} else stated


@cache
def _standard_spaces() -> dict[str, Any]:
    file = resources.files("ckpt_prune.model") / "standard_spaces.json"
    spaces: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return spaces


def _complete_space(name: str, values: Mapping[str, Any]) -> Any:
    stated, dimensions = values["spaces"][name], values["dimensions"]
    if not isinstance(stated, dict):
        return stated
    kind = {"kind": KIND_OF_SPACE.get(name, "columns")}
    if stated.keys() >= _WHOLE_SPACE:
        return stated | kind
    keys = {each: tried[0] for each, tried in dimensions.items() if tried}
    is_grouped = dimensions["kv_heads"][:1] != dimensions["query_heads"][:1]
    # Query heads that all read one key head go without it.
    names = [f"grouped {name}"] if is_grouped and stated.get("units") != "query_heads" else []
    names += [f"{name} of experts"] if values.get("experts") else []
    names += [f"{name} in {stated.get('pairs')}"]
    standard = next((each for each in names if each in _standard_spaces()), name)
    text = json.dumps(_standard_spaces().get(standard, {}))
    for role, module in {**values.get("attention", {}), **(values.get("experts") or {}), **keys}.items():
        text = text.replace(f"{{{role}}}", module) if isinstance(module, str) else text
    space: dict[str, Any] = json.loads(text)
    outer = _spaces(values).get(space.get("part_of", ""), {})
    space |= {key: outer[key] for key in _EFFECTS if key in outer} | stated
    if "config" not in stated and stated.get("units") in keys and name in KIND_OF_SPACE:
        space["config"] = {keys[stated["units"]]: []}
    for key in space.keys() & {"rows", "columns", "tables"}:
        every = [{"module": each} if isinstance(each, str) else each for each in _to_list(space[key])]
        space[key] = every if isinstance(space[key], list) else every[0]
    return space | kind


def _linears(named: str, values: Mapping[str, Any], *axes: str) -> list[str]:
    """Return the linear modules that `attention` or a space's name stands for, or the module that is named."""
    attention, space = values.get("attention", {}), _spaces(values).get(named)
    if named == "attention":
        roles = ("query", "key", "value", "output") if "columns" in axes else ("query", "key", "value")
        return [*dict.fromkeys(attention[role] for role in roles if role in attention)]
    incidences = [each for axis in axes for each in _to_list((space or {}).get(axis, []))]
    return [named] if space is None else [each["module"] for each in incidences if isinstance(each, dict)]


def _to_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _spaces(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    spaces = values.get("spaces")
    return {name: own for name, own in spaces.items() if isinstance(own, dict)} if isinstance(spaces, dict) else {}
