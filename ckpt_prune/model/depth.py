"""A model without some of its blocks: the tensors of the others under new numbers, and a config that says so."""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.nested_keys import find_key, read_key, with_keys
from ckpt_prune.model.skeleton import RefusedConfigError, parse_config, stock_names, stored_key

PER_BLOCK = ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types")
"""Config keys that list a value for every block, in every class that has them."""
NUMBERS = ("mlp_only_layers", "attn_layer_indices")
"""Config keys that list the numbers of some blocks."""
FIRST = ("first_k_dense_replace",)
"""Config keys that count the first blocks, which are of another kind."""
SHARING = ("num_kv_shared_layers", "num_hidden_groups", "hidden_size_per_layer_input")
"""Config keys by which blocks take something from one another, or from one table with a part for each of them."""
_BACKBONE_KEYS = ("out_features", "out_indices", "stage_names")
"""Numbers of the blocks that a backbone returns. No class with a description reads them: without them, the config class
takes the last block."""
_SIMPLE = (bool, int, float, str, type(None), tuple)


def output_tensors(model: Model, block: int, part: str) -> list[str]:
    """Return on-disk names of the tensors by which a part of a block adds to the stream: as zeros they add nothing.

    Args:
        part: attention or mlp, the latter with every expert and shared ones.
    """
    modules = {space.consumer for space in model.family.part_spaces(part).values()}
    names = [model.tensor(block, module, kind) for module in sorted(modules) for kind in KINDS]
    return [name for name in names if name in model.checkpoint.tensors]


def shorten_model(model: Model, kept: Sequence[int]) -> Model:
    """Return the model of some blocks, ascending, numbered anew. Nothing is read or checked (`check_shortened`)."""
    family, checkpoint = model.family, model.checkpoint
    before, after = family.block.split("{block}")
    numbered = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    new_numbers = {old: new for new, old in enumerate(kept)}
    names: dict[str, str] = {}
    for name in (*checkpoint.tensors, *checkpoint.stacks, *checkpoint.aliases.values()):
        match = numbered.match(name)
        if match is None:
            names[name] = name
        elif int(match[1]) in new_numbers:
            names[name] = f"{family.block.format(block=new_numbers[int(match[1])])}{name[match.end() :]}"
    values = shorten_config(model, kept)
    return replace(model, checkpoint=checkpoint.select(names, values), config=parse_config(values))


def shorten_config(model: Model, kept: Sequence[int]) -> dict[str, Any]:
    """Return the config.json of some blocks, ascending."""
    values, config = copy.deepcopy(model.checkpoint.config), model.config
    family = model.family
    count = next(key for key in family.dimensions["layers"] if read_key(config, key) is not None)
    of_spaces = {key for space in family.spaces.values() for key in (*space.config, space.unless) if key}
    listed = PER_BLOCK if family.stage is not None else (*PER_BLOCK, *sorted(of_spaces))
    place, _, count = count.rpartition(".")
    if not place:
        return _shorten_values(values, config, count, listed, kept, model.blocks)
    own = _shorten_values(find_key(values, place), read_key(config, place), count, listed, kept, model.blocks)
    return with_keys(values, {place: own})


def _shorten_values(
    values: dict[str, Any], config: Any, count: str, listed: Sequence[str], kept: Sequence[int], blocks: int
) -> dict[str, Any]:
    """Return a config.json of some of so many blocks, or one within it.

    Args:
        count: key of their number.
        listed: keys that may list a value for every block.
    """
    changes: dict[str, Any] = {count: len(kept)}
    for key in listed:
        # Written out even if the class derives it from a pattern: with fewer blocks it would derive another.
        per_block = getattr(config, key, None)
        if isinstance(per_block, list) and len(per_block) == blocks and not _is_derived(config, key):
            changes[key] = [per_block[block] for block in kept]
    for key in NUMBERS:
        if numbers := getattr(config, key, None):
            changes[key] = [new for new, old in enumerate(kept) if old in numbers]
    for key in FIRST:
        if first := getattr(config, key, None):
            changes[key] = sum(old < first for old in kept)
    if overrides := values.get("per_layer_config"):
        numbered = {int(block): keys for block, keys in overrides.items()}
        changes["per_layer_config"] = {str(new): numbered[old] for new, old in enumerate(kept) if old in numbered}
    aliases = {alias: changes[key] for alias, key in config.attribute_map.items() if alias in values and key in changes}
    changes |= aliases  # a published BART says its encoder's layers twice
    others = {key: value for key, value in values.items() if key not in _BACKBONE_KEYS}
    return others | {stored_key(key, values, config): value for key, value in changes.items()}


def _is_derived(config: Any, key: str) -> bool:
    """Return whether a config class computes a key from others, and lets nobody state it."""
    of_class = getattr(type(config), getattr(config, "attribute_map", {}).get(key, key), None)
    return isinstance(of_class, property) and of_class.fset is None


def check_shortened(model: Model, kept: Sequence[int]) -> None:
    """Refuse to keep these blocks, ascending, if the class would build one of them differently, or if blocks share."""
    family = model.family
    for key in SHARING:
        if getattr(model.config, key, None):
            raise UserError(
                f"blocks of this {family.model_type} share what they compute ({key} in config.json): all stay"
            )
    try:
        difference = next(_differences(model, kept), None)
    except RefusedConfigError as error:
        raise UserError(
            f"{type(model.config).__name__} of transformers refuses {len(kept)} of {model.blocks} blocks "
            f"({error.rule}), and the source is fine as it is: drop other blocks, or units of spaces instead"
        ) from error
    if difference is not None:
        new, old, before, after = difference
        raise UserError(
            f"block {old} would be block {new}, and the class of {family.model_type} builds that one otherwise "
            f"({before} there, {after} here): keep the blocks before it, or drop others"
        )


def can_shorten(model: Model, kept: Sequence[int]) -> bool:
    """Return whether the class builds these blocks as in the dense model."""
    try:
        return next(_differences(model, kept), None) is None
    except RefusedConfigError:
        return False


def _differences(model: Model, kept: Sequence[int]) -> Iterator[tuple[int, int, str, str]]:
    """Kept blocks that would be built differently: new number, old number, fact before and after."""
    if not model.checkpoint.by_class:
        parse_config(shorten_config(model, kept))  # the config class is asked; the run builds the blocks
        return
    dense = _skeleton_blocks(model, model.checkpoint.config)
    short = _skeleton_blocks(model, shorten_config(model, kept))
    for new, old in enumerate(kept):
        before, after = module_facts(dense[old]), module_facts(short[new])
        for place in {**before, **after}:
            dense_value, short_value = before.get(place), after.get(place)
            is_own_number = (dense_value, short_value) == (old, new) and not isinstance(dense_value, bool)
            if dense_value != short_value and not is_own_number:
                yield new, old, f"{place} {dense_value}", f"{place} {short_value}"


def _skeleton_blocks(model: Model, config: dict[str, Any]) -> Any:
    return stock_names(config, model.family.architecture).model.get_submodule(model.family.layers)


def module_facts(block: nn.Module) -> dict[str, Any]:
    """Return what modules were built with, by path: their classes, plain attributes and the shapes of parameters."""
    facts: dict[str, Any] = {}
    for path, module in block.named_modules():
        if "drop" in path:
            continue  # used in training alone, and often stronger in deeper blocks
        facts[path or "its class"] = type(module).__name__
        attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        facts |= {f"{path}.{key}".lstrip("."): each for key, each in attributes.items() if isinstance(each, _SIMPLE)}
        parameters = module.named_parameters(recurse=False)
        facts |= {f"{path}.{name}".lstrip("."): tuple(each.shape) for name, each in parameters}
    return facts
