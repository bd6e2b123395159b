"""Families: what the project knows of an architecture, one JSON description each (`families/*.json`).

A description names tensors as they stand on disk. A space (DESIGN: an axis several tensors share) lists its producers,
whose rows are the space's axis, its consumer, whose columns are, and the config keys that carry its width.
"""

import json
from functools import cache
from importlib import resources
from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ckpt_prune.errors import UserError

SpaceName = Literal["heads", "mlp"]
"""Spaces that recipes, plans and statistics speak of."""


class _Description(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Space(_Description):
    """An axis that several tensors of a block share, counted in units that are kept or dropped whole.

    Attributes:
        unit: what one unit is called in tables.
        units: the dimension that counts the units of the dense model.
        rounding: how the published methods round `units × ratio` to a number of dropped units (METHODS section 2).
        producers: linear module → dimensions whose product is its rows per unit.
        consumer: the linear module whose columns are the axis, and which compensation rewrites.
        consumer_unit: dimensions whose product is the consumer's columns per unit.
        config: config key → dimensions whose product, times the units kept, is its new value.
    """

    unit: str
    units: str
    rounding: Literal["floor", "ceil"]
    producers: dict[str, list[str]]
    consumer: str
    consumer_unit: list[str]
    config: dict[str, list[str]]


class Family(_Description):
    """One architecture.

    Attributes:
        model_type: `model_type` in config.json.
        architecture: the stock transformers class.
        layers: module path of the list of blocks.
        block: prefix of a block's tensor names on disk, with `{block}` for its index.
        embedding, rotary, final_norm, head: module paths of what comes before and after the blocks.
        dimensions: dimension → config keys to try in order.
        spaces: what can be pruned.
        bias_slots: linear module → the config key that gives it a bias, or true where it always has one; a module
            that is not listed has no bias in this family.
        heads_divide_hidden: whether the config class refuses a head count that does not divide the hidden size.
        sliding_window: the config key that turns sliding-window attention on, where the family has it.
        stand_ins: families that compute the same function from the same tensors, to relabel to when this one's
            config cannot say the new shape, in the order to try them.
    """

    model_type: str
    architecture: str
    layers: str
    block: str
    embedding: str
    rotary: str
    final_norm: str
    head: str
    dimensions: dict[str, list[str]]
    spaces: dict[SpaceName, Space]
    bias_slots: dict[str, str | bool] = Field(default_factory=dict)
    heads_divide_hidden: bool = False
    sliding_window: str | None = None
    stand_ins: list[str] = Field(default_factory=list)

    def tensor(self, block: int, module: str, kind: Literal["weight", "bias"] = "weight") -> str:
        """On-disk name of a block's tensor."""
        return f"{self.block.format(block=block)}{module}.{kind}"

    def dimension(self, config: Any, name: str) -> int:
        """A dimension read off a transformers config; `group` is query heads per KV head."""
        if name == "group":
            return self.dimension(config, "query_heads") // self.dimension(config, "kv_heads")
        for key in self.dimensions[name]:
            value = getattr(config, key, None)
            if value is not None:
                return int(value)
        if name == "head_dim":
            return self.dimension(config, "hidden") // self.dimension(config, "query_heads")
        raise UserError(f"config.json of type {self.model_type} lacks {' or '.join(self.dimensions[name])}")

    def per_unit(self, config: Any, dimensions: list[str]) -> int:
        """Product of dimensions: how many rows, columns or heads one unit of a space stands for."""
        return prod(self.dimension(config, name) for name in dimensions)

    def units(self, config: Any, space: SpaceName) -> int:
        """Units of a space in the dense model."""
        return self.dimension(config, self.spaces[space].units)

    def unit_columns(self, config: Any, space: SpaceName) -> int:
        """Consumer columns per unit."""
        return self.per_unit(config, self.spaces[space].consumer_unit)

    def uses_sliding_window(self, config: Any) -> bool:
        """Whether this checkpoint's attention really is windowed."""
        return self.sliding_window is not None and bool(getattr(config, self.sliding_window, None))


def _folder() -> Any:
    return resources.files("ckpt_prune.architectures") / "families"


@cache
def known_families() -> tuple[str, ...]:
    """`model_type` of every family with a description, sorted."""
    return tuple(sorted(f.name.removesuffix(".json") for f in _folder().iterdir() if f.name.endswith(".json")))


def _description(model_type: str) -> dict[str, Any]:
    own: dict[str, Any] = json.loads((_folder() / f"{model_type}.json").read_text(encoding="utf-8"))
    parent = own.pop("extends", None)
    return _description(parent) | own if parent else own


@cache
def load_family(model_type: str) -> Family:
    """The description of a family.

    Raises:
        UserError: there is none; the message lists the known ones and says where a description goes.
    """
    if model_type not in known_families():
        known = ", ".join(known_families())
        raise UserError(
            f"model_type {model_type!r} is not a family this version knows ({known}): "
            "a new one is a JSON description in ckpt_prune/architectures/families/"
        )
    return Family.model_validate(_description(model_type))


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint's config.json.

    Raises:
        UserError: no `model_type`, a mixture of experts, or an unknown family.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError("config.json has no model_type, so the family of this checkpoint is unknown")
    experts = next((key for key in _EXPERT_KEYS if config.get(key)), None)
    if experts:
        known = ", ".join(known_families())
        raise UserError(
            f"this checkpoint is a mixture of experts ({experts} in config.json), which is not supported; "
            f"known families: {known}; a description goes in ckpt_prune/architectures/families/"
        )
    return load_family(model_type)
