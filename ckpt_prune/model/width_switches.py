"""Configs that state the widths of classes which otherwise derive them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.model.family import Family
from ckpt_prune.model.skeleton import parse_config, stock_names
from ckpt_prune.model.spaces import product


def with_stated_widths(checkpoint: Checkpoint, family: Family) -> Checkpoint:
    """Return the checkpoint under `stating_config`, under which its outputs are stored."""
    config = stating_config(checkpoint.config, family)
    changed = [key for key in {**checkpoint.config, **config} if config.get(key) != checkpoint.config.get(key)]
    if not changed:
        return checkpoint
    stated = {key: checkpoint.config.get(key) for key in changed} | dict(checkpoint.stated)
    return replace(checkpoint, config=config, stated=stated)


def stating_config(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a config.json under which the class has the same tensors, and `family.width_switches` their values.

    The class is asked for the widths, so nothing of how it derives them is known here.
    """
    plain = dict(config)
    if not family.width_switches:
        return plain
    parsed: Any = parse_config(plain)
    if all(getattr(parsed, key, None) == value for key, value in family.width_switches.items()):
        return plain
    changed = plain | family.width_switches
    shapes, others = (stock_names(each, family.architecture).shapes for each in (plain, changed))
    for space in family.consumers.values():
        weights = [family.tensor(block, space.consumer) for block in range(family.dimension(parsed, "layers"))]
        weight_name = next((weight for weight in weights if weight in shapes), None)
        if weight_name is None or shapes[weight_name] == others.get(weight_name):
            continue
        width = shapes[weight_name][0 if space.consumer in family.transposed else 1]
        for key, factors in space.config.items():
            # Published files may have the number under a name that the class takes away (LFM2's block_ff_dim).
            old, class_keys = getattr(parsed, key), {*parsed.to_dict(), *parsed.attribute_map}
            for name in [name for name, value in plain.items() if name not in class_keys and value == old]:
                del changed[name]
            changed[key] = width * product(factors, lambda name: family.dimension(parsed, name))
    return changed
