"""A part of a composite as a checkpoint of its own, and its way back into the whole."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers
from transformers import PreTrainedConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint, PartOf
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.composite import Composite, Part, load_composite
from ckpt_prune.model.descriptions import (
    OF_THE_FUNCTION,
    OUTSIDE_KEY,
    keys_of,
    known_families,
    load_family,
    variants_of,
)
from ckpt_prune.model.fitting import ties_on_disk, untangled
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config, stock_names


def part_of(whole: Checkpoint, name: str) -> Checkpoint:
    """A part of a composite as the checkpoint of a stock class: its tensors under that class's names, and its config.

    The config carries a description of the part: that of its family without the containers and the spaces that the
    whole's own class has no room for.

    Args:
        whole: the checkpoint of the composite.
        name: of the part.

    Raises:
        UserError: it is no composite, it has no such part, or the part is of no known family.
    """
    composite = load_composite(str(whole.config.get("model_type")))
    part = composite.part(name)
    whole = untangled(whole, ties_on_disk(whole, composite_names(whole.config)))
    config = parse_config(whole.config)
    own = _part_config(composite, part, name, config)
    own["architectures"] = [_stock_class(own, part)]
    own[OUTSIDE_KEY] = _description(own, part)
    stock = stock_names({k: v for k, v in own.items() if k != OUTSIDE_KEY}, own["architectures"][0])
    held = composite_names(whole.config)
    names: dict[str, str] = {}
    for stored in whole.tensors:
        for parameter in held.parameters(stored):
            inside = _inside(part, parameter)
            if inside is not None and inside in stock.model.state_dict():
                names[stock.saved_as(inside)] = stored
    tensors = {inner: replace(whole.tensors[stored], name=inner) for inner, stored in names.items()}
    return replace(whole, config=own, tensors=tensors, within=PartOf(whole, name, part.config or "", names))


def composite_names(config: Mapping[str, Any]) -> Names:
    """What the stock class of a composite saves and loads.

    Raises:
        UserError: transformers refuses the config.
    """
    composite = load_composite(str(config["model_type"]))
    return Names(build_skeleton(parse_config(dict(config)), composite.architecture))


def composite_config(part: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """The whole's config.json with what has changed in that of a part.

    Args:
        part: as `part_of` gives it.
        config: of the part, as it is to be.
    """
    within = part.within
    assert within is not None
    found = copy.deepcopy(within.whole.config)
    inner = found.get(within.key)
    place = inner if isinstance(inner, dict) else found  # files of old say the text model's keys beside the others
    heads = ("num_attention_heads", "num_key_value_heads")
    for key, value in config.items():
        same = key in part.config and part.config[key] == value
        # A width of heads that was derived stays so, where no head goes.
        derived = key == "head_dim" and all(part.config.get(each) == config.get(each) for each in heads)
        if not same and not derived:
            place[key] = value
    return found


def _part_config(composite: Composite, part: Part, name: str, config: PreTrainedConfig) -> dict[str, Any]:
    nested = config if part.config is None else getattr(config, part.config)
    values: dict[str, Any] = nested.to_dict()
    model_type = part.family or values["model_type"]
    if part.described is None and model_type not in known_families():
        raise UserError(
            f"--part {name} of {composite.model_type} is a {model_type}, which this version has no description of"
        )
    values["model_type"] = model_type
    if part.auto == "AutoModelForCausalLM":
        values["tie_word_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    for key, inside in part.drops.items():
        if isinstance(values.get(key), dict):
            values[key] = {each: value for each, value in values[key].items() if each not in inside}
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")}


def _stock_class(config: Mapping[str, Any], part: Part) -> str:
    if part.described is not None:
        return str(next(iter(part.described["architectures"])))
    family = load_family(config["model_type"])
    for architecture, own in family.architectures.items():
        if own.auto == part.auto and hasattr(transformers, architecture):
            return architecture
    raise UserError(f"the description of {family.model_type} has no class for {part.auto}")


def _description(config: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """What is known of the part's family, but for what the whole has no room for."""
    if part.described is not None:
        return part.described
    model_type = config["model_type"]
    variant = next((key for key in variants_of(model_type) if config.get(key)), None)
    family = load_family(model_type, variant)
    spaces = {name: space.model_dump(exclude_defaults=True) for name, space in family.spaces.items()}
    for name, why in part.keeps.items():
        if name in spaces:
            spaces[name]["whole"] = why
    for name, space in family.spaces.items():
        spaces[name] |= {"rows": [row.model_dump() for row in space.rows], "config": space.config}
    stated: dict[str, Any] = {"spaces": spaces, "stand_ins": []}
    inherits = [key for key in OF_THE_FUNCTION if key in keys_of(model_type) and key not in stated]
    return {"extends": model_type, "inherits": inherits, "model_type": model_type, **stated}


def _inside(part: Part, parameter: str) -> str | None:
    for outer, inner in part.modules.items():
        if parameter.startswith(f"{outer}."):
            rest = parameter.removeprefix(f"{outer}.")
            return f"{inner}.{rest}" if inner else rest
    return None
