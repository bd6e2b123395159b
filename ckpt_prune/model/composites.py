"""Composites: models made of others, one JSON description each (`composites/*.json`), of which a part can be pruned.

A part is opened as a checkpoint of its own (`extract_part`), and written back into the whole (`merge_part_config`).
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import transformers
from pydantic import Field
from transformers import PreTrainedConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint, PartOf
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.descriptions import (
    FUNCTION_KEYS,
    OUTSIDE_KEY,
    description_keys,
    known_families,
    load_family,
    variants_of,
)
from ckpt_prune.model.skeleton import Names, build_skeleton, parse_config, stock_names
from ckpt_prune.model.spaces import SpaceName, StrictModel
from ckpt_prune.model.ties import apply_ties, ties_on_disk
from ckpt_prune.options.machine import PartName


class Part(StrictModel):
    """A model inside another.

    Attributes:
        config: key of its config in that of the whole; None where that of the whole says it.
        family: the family whose stock class computes the same; that of its own `model_type` by default.
        described: the description of its family where no `model_type` is that of the part alone.
        auto: Auto class of the stock class that it is read as.
        modules: module of the whole → module of the stock class; "" for all of it.
        drops: config keys of the part that the stock class must not see.
        keeps: spaces that stay whole, each with the reason.
        note: what is to be known of how it is calibrated.
    """

    config: str | None = None
    family: str | None = None
    described: dict[str, Any] | None = None
    auto: str
    modules: dict[str, str]
    drops: dict[str, list[str]] = Field(default_factory=dict)
    keeps: dict[SpaceName, str] = Field(default_factory=dict)
    note: str


class Composite(StrictModel):
    """A model made of others.

    Attributes:
        model_type: `model_type` in config.json.
        architecture: stock transformers class of the whole.
        auto: Auto class that loads it.
        parts: that can be pruned.
        refused: those that cannot, each with the reason.
    """

    model_type: str
    architecture: str
    auto: str
    parts: dict[PartName, Part] = Field(default_factory=dict)
    refused: dict[PartName, str] = Field(default_factory=dict)

    def part(self, name: str) -> Part:
        """One of its parts.

        Raises:
            UserError: it has none of this name, or it cannot be pruned; with the reason.
        """
        for known, part in self.parts.items():
            if known == name:
                return part
        for known, why in self.refused.items():
            if known == name:
                raise UserError(f"--part {name} of {self.model_type} cannot be pruned: {why}")
        names = " or ".join([*self.parts, *self.refused])
        raise UserError(f"{self.model_type} has no part {name}, but {names}")

    @property
    def advice(self) -> str:
        """What to say to someone who names no part."""
        if self.parts:
            return f"{self.model_type} is made of several models: --part {' or --part '.join(self.parts)} prunes one"
        why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"{self.model_type} is made of several models, and none of them can be pruned ({why})"


@cache
def known_composites() -> tuple[str, ...]:
    """`model_type` of every composite with a description, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


@cache
def load_composite(model_type: str) -> Composite:
    """The description of a composite.

    Raises:
        UserError: there is none.
    """
    if model_type not in known_composites():
        known = ", ".join(known_composites())
        raise UserError(f"--part is for models that are made of several ({known}), which a {model_type} is not")
    return Composite.model_validate_json((_folder() / f"{model_type}.json").read_text(encoding="utf-8"))


def _folder() -> Any:
    return resources.files("ckpt_prune.model") / "composites"


def extract_part(whole: Checkpoint, name: str) -> Checkpoint:
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
    whole = apply_ties(whole, ties_on_disk(whole, composite_names(whole.config)))
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


def merge_part_config(part: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
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
    inherits = [key for key in FUNCTION_KEYS if key in description_keys(model_type) and key not in stated]
    return {"extends": model_type, "inherits": inherits, "model_type": model_type, **stated}


def _inside(part: Part, parameter: str) -> str | None:
    for outer, inner in part.modules.items():
        if parameter.startswith(f"{outer}."):
            rest = parameter.removeprefix(f"{outer}.")
            return f"{inner}.{rest}" if inner else rest
    return None
