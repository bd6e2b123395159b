"""A model without some of its blocks: the tensors of those that stay under new numbers, and a config that says so."""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import RefusedConfigError, parse_config, stock_names, stored_key

PER_BLOCK = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Config keys that list a value for every block, in every class that has them."""
SHARING = ("num_kv_shared_layers", "num_hidden_groups")
"""Config keys by which blocks take something from one another."""
_STAGES = ("out_features", "out_indices", "stage_names")
"""What a backbone gives of its blocks, by their numbers. No class with a description reads it: it is left to the
config class, which takes the last."""
_SIMPLE = (bool, int, float, str, type(None), tuple)


def output_tensors(model: Model, block: int, part: str) -> list[str]:
    """On-disk names of the tensors by which a part of a block gives to the stream; as zeros they give nothing.

    Args:
        model: the dense model.
        block: its index.
        part: attention or mlp, that of every expert and of shared ones.
    """
    modules = {space.consumer for space in model.family.part_spaces(part).values()}
    names = [model.tensor(block, module, kind) for module in sorted(modules) for kind in KINDS]
    return [name for name in names if name in model.checkpoint.tensors]


def shorten_model(model: Model, kept: Sequence[int]) -> Model:
    """The model of the blocks that stay, numbered anew. Nothing is read or checked (`check_shortened`).

    Args:
        model: the dense model.
        kept: its blocks that stay, ascending.
    """
    family, checkpoint = model.family, model.checkpoint
    before, after = family.block.split("{block}")
    numbered = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    places = {old: new for new, old in enumerate(kept)}
    names: dict[str, str] = {}
    for name in (*checkpoint.tensors, *checkpoint.stacks, *checkpoint.aliases.values()):
        match = numbered.match(name)
        if match is None:
            names[name] = name
        elif int(match[1]) in places:
            names[name] = f"{family.block.format(block=places[int(match[1])])}{name[match.end() :]}"
    values = shorten_config(model, kept)
    return replace(model, checkpoint=checkpoint.select(names, values), config=parse_config(values))


def shorten_config(model: Model, kept: Sequence[int]) -> dict[str, Any]:
    """The config.json of the blocks that stay.

    Args:
        model: the dense model.
        kept: its blocks that stay, ascending.
    """
    values, config = copy.deepcopy(model.checkpoint.config), model.config
    count = next(key for key in model.family.dimensions["layers"] if getattr(config, key, None) is not None)
    changes: dict[str, Any] = {count: len(kept)}
    for key in PER_BLOCK:
        # What the class derives from a pattern is spelt out: with fewer blocks it would derive another.
        own = getattr(config, key, None)
        if isinstance(own, list) and len(own) == model.blocks:
            changes[key] = [own[block] for block in kept]
    kept_keys = {key: value for key, value in values.items() if key not in _STAGES}
    return kept_keys | {stored_key(key, values, config): value for key, value in changes.items()}


def check_shortened(model: Model, kept: Sequence[int]) -> None:
    """Refuse to drop blocks where the class would then build one that stays otherwise than it was.

    Args:
        model: the dense model.
        kept: its blocks that stay, ascending.

    Raises:
        UserError: with the first block and what differs; or blocks that take something from one another.
    """
    family = model.family
    for key in SHARING:
        if getattr(model.config, key, None):
            raise UserError(
                f"blocks of this {family.model_type} share what they compute ({key} in config.json): all stay"
            )
    try:
        differences = list(islice(_differences(model, kept), 1))
    except RefusedConfigError as error:
        raise UserError(
            f"{type(model.config).__name__} of transformers refuses {len(kept)} of {model.blocks} blocks "
            f"({error.rule}), and the source is fine as it is: drop other blocks, or units of spaces instead"
        ) from error
    for new, old, was, would in differences:
        raise UserError(
            f"block {old} would be block {new}, and the class of {family.model_type} builds that one otherwise "
            f"({was} there, {would} here): keep the blocks before it, or drop others"
        )


def can_shorten(model: Model, kept: Sequence[int]) -> bool:
    """Whether the class builds the blocks that stay as they were."""
    try:
        return next(_differences(model, kept), None) is None
    except RefusedConfigError:
        return False


def _differences(model: Model, kept: Sequence[int]) -> Iterator[tuple[int, int, str, str]]:
    """Blocks that stay and would be built otherwise: new number, old number, what was and what would be."""
    dense = _layers(model, model.checkpoint.config)
    short = _layers(model, shorten_config(model, kept))
    for new, old in enumerate(kept):
        before, after = module_facts(dense[old]), module_facts(short[new])
        for place in {**before, **after}:
            was, would = before.get(place), after.get(place)
            numbers = (was, would) == (old, new) and not isinstance(was, bool)  # a block's own number
            if was != would and not numbers:
                yield new, old, f"{place} {was}", f"{place} {would}"


def _layers(model: Model, config: dict[str, Any]) -> Any:
    return stock_names(config, model.family.architecture).model.get_submodule(model.family.layers)


def module_facts(whole: nn.Module) -> dict[str, Any]:
    """What modules were built with, by path: their classes, plain attributes and the shapes of their parameters."""
    found: dict[str, Any] = {}
    for path, module in whole.named_modules():
        if "drop" in path:
            continue  # drawn in training alone, and more often the deeper a block is
        found[path or "its class"] = type(module).__name__
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found |= {f"{path}.{key}".lstrip("."): each for key, each in own.items() if isinstance(each, _SIMPLE)}
        held = module.named_parameters(recurse=False)
        found |= {f"{path}.{name}".lstrip("."): tuple(each.shape) for name, each in held}
    return found
