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

SpaceName = Literal["qk", "heads", "mlp"]
"""Spaces that recipes, plans and statistics speak of."""
Modality = Literal["text", "image"]

KINDS: tuple[Literal["weight"], Literal["bias"]] = ("weight", "bias")
"""Tensors that a module of a block may have."""


class _Description(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Space(_Description):
    """An axis that several tensors of a block share, counted in units that are kept or dropped whole.

    Attributes:
        unit: what one unit is called in tables.
        units: the dimension that counts the units of the dense model.
        rounding: how the published methods round `units × ratio` to a number of dropped units (METHODS section 2).
        config: config key → dimensions whose product, times the units kept, is its new value.
    """

    unit: str
    units: str
    rounding: Literal["floor", "ceil"]
    config: dict[str, list[str]]


class ColumnSpace(Space):
    """A space that ends in the columns of one linear module, which compensation rewrites.

    Attributes:
        producers: linear module → how many times the space stands in its rows, one after the other (a fused gate and
            up projection holds it twice).
        consumer: the linear module whose columns are the axis.
        consumer_unit: dimensions whose product is the consumer's columns per unit.
        scale: the tensor of a block that multiplies the consumer's output, element by element, before it is added to
            the residual stream (layer scale), or None.
    """

    producers: dict[str, int]
    consumer: str
    consumer_unit: list[str]
    scale: str | None = None


class LogitSpace(Space):
    """The axis inside a head that q and k share and that ends in the attention logits, a kept set for every head.

    Attributes:
        query, key: the linear modules whose rows are heads × units.
    """

    query: str
    key: str


class Residual(_Description):
    """How a model reads from and adds to its residual stream, where rotations can be folded into what does.

    Attributes:
        norm: what stands before each read: an RMSNorm (rms) or a LayerNorm (layer).
        reads: norm of a block → linear modules it feeds.
        writes: linear modules whose output is added to the stream.
        values: the linear module that makes the values; the consumer of the heads reads them.
        starts: modules whose tables make up the stream before the first block.
        final: the norm before the head.
    """

    norm: Literal["rms", "layer"]
    reads: dict[str, list[str]]
    writes: list[str]
    values: str
    starts: list[str]
    final: str


class Architecture(_Description):
    """One class of a family: the base model and a head on it, or the base model alone.

    Attributes:
        auto: the transformers Auto class that users load it with.
        head: module path of the linear that a tied embedding stands in for, or None.
        pooled: modules that see one token of a sequence only.
    """

    auto: str
    head: str | None = None
    pooled: list[str] = Field(default_factory=list)


class Family(_Description):
    """One architecture.

    Attributes:
        model_type: `model_type` in config.json.
        base: prefix of the base model in the classes with a head; a checkpoint of the base model alone lacks it.
        architectures: stock transformers class → what it is.
        architecture: the class at hand.
        prefixed: whether the tensors of the base model begin with `base` on disk.
        modality: what the model reads.
        special_tokens: of an image, beside its patches: the class token, and DeiT's distillation token.
        layers: module path of the list of blocks.
        block: prefix of a block's tensor names on disk, with `{block}` for its index.
        entry: modules that run before the blocks, those that are there.
        exit: modules between the last block and the head, in order, those that are there.
        embedding: module of the token embedding.
        lookups: modules whose two-dimensional tensors are looked up or added, never multiplied.
        dimensions: dimension → config keys to try in order.
        spaces: what can be pruned.
        rope: whether q and k are rotated by position before they meet.
        bias_slots: linear module → the config key that gives it a bias, or true where it always has one; a module
            that is not listed has no bias in this family.
        heads_divide_hidden: whether the config class refuses a head count that does not divide the hidden size.
        heads_fill_hidden: whether the stock class always has heads that together are as wide as the hidden size.
        mlp_ratio: the config key that says the width of the mlp as an integer multiple of the hidden size.
        mlp_gated: with `mlp_ratio`: two thirds of the multiple, rounded up to a multiple of eight.
        sliding_window: the config key that turns sliding-window attention on, where the family has it.
        residual: how blocks read from and add to the residual stream, where rotations can be folded in.
        unrotatable: why not, where they cannot.
        stand_ins: families that compute the same function from the same tensors, to relabel to when this one's
            config cannot say the new shape, in the order to try them.
    """

    model_type: str
    base: str
    architectures: dict[str, Architecture]
    architecture: str
    prefixed: bool = True
    modality: Modality = "text"
    special_tokens: int = 0
    layers: str
    block: str
    entry: list[str]
    exit: list[str] = Field(default_factory=list)
    embedding: str | None = None
    lookups: list[str]
    dimensions: dict[str, list[str]]
    spaces: dict[SpaceName, ColumnSpace | LogitSpace]
    rope: bool = False
    bias_slots: dict[str, str | bool] = Field(default_factory=dict)
    heads_divide_hidden: bool = False
    heads_fill_hidden: bool = False
    mlp_ratio: str | None = None
    mlp_gated: bool = False
    sliding_window: str | None = None
    residual: Residual | None = None
    unrotatable: str | None = None
    stand_ins: list[str] = Field(default_factory=list)

    # ---- the class at hand ------------------------------------------------------------------------------------

    @property
    def auto_class(self) -> str:
        """The transformers Auto class that loads this architecture."""
        return self.architectures[self.architecture].auto

    @property
    def head(self) -> str | None:
        """Module path of the head that a tied embedding stands in for."""
        return self.architectures[self.architecture].head

    @property
    def pooled(self) -> list[str]:
        """Modules that see one token of a sequence only."""
        return self.architectures[self.architecture].pooled

    @property
    def causal(self) -> bool:
        """Whether this is a causal language model."""
        return self.auto_class == "AutoModelForCausalLM"

    def on_disk(self, path: str) -> str:
        """A module path, or the beginning of one, as tensors on disk have it."""
        prefix = f"{self.base}."
        if not path.startswith(prefix) and self.auto_class != "AutoModel":
            return path
        return f"{prefix if self.prefixed else ''}{path.removeprefix(prefix)}"

    # ---- spaces -----------------------------------------------------------------------------------------------

    @property
    def columns(self) -> dict[SpaceName, ColumnSpace]:
        """The spaces that end in the columns of a projection."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, ColumnSpace)}

    @property
    def logits(self) -> LogitSpace | None:
        """The space inside a head that q and k share, where it can be pruned."""
        space = self.spaces.get("qk")
        return space if isinstance(space, LogitSpace) else None

    def modules(self, space: SpaceName) -> list[str]:
        """Linear modules of a block that have the space as an axis."""
        found = self.spaces[space]
        if isinstance(found, LogitSpace):
            return [found.query, found.key]
        return [*found.producers, found.consumer]

    def producers(self, space: SpaceName) -> dict[str, int]:
        """Linear modules that have the space in their rows → how many times, one after the other."""
        found = self.spaces[space]
        return dict.fromkeys(self.modules(space), 1) if isinstance(found, LogitSpace) else found.producers

    def site_units(self, config: Any, space: SpaceName) -> int:
        """Units of a site: of q and k those of every head, elsewhere those of the space."""
        heads = self.dimension(config, "query_heads") if space == "qk" else 1
        return self.units(config, space) * heads

    @property
    def linears(self) -> list[str]:
        """Every linear module of a block that some space names, once."""
        return list(dict.fromkeys(module for space in self.spaces for module in self.modules(space)))

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """A linear module of a block → all that read the same input, itself first; in the order of computation."""
        found: dict[str, tuple[str, ...]] = {}
        for space in self.columns.values():
            producers = tuple(space.producers)
            found |= {producers[0]: producers, space.consumer: (space.consumer,)}
        return found

    @property
    def producer_inputs(self) -> list[str]:
        """Of `inputs` those that are no consumer: linears that read the residual stream."""
        consumers = {space.consumer for space in self.columns.values()}
        return [first for first in self.inputs if first not in consumers]

    def tensor(self, block: int, module: str, kind: Literal["weight", "bias"] = "weight") -> str:
        """On-disk name of a block's tensor."""
        return f"{self.block.format(block=block)}{module}.{kind}"

    def scale(self, block: int, space: SpaceName) -> str | None:
        """On-disk name of the layer scale of a space's consumer, (d_out,), or None where it has none."""
        own = self.columns[space].scale
        return None if own is None else f"{self.block.format(block=block)}{own}"

    def dimension(self, config: Any, name: str) -> int:
        """A dimension read off a transformers config; `group` is query heads per KV head."""
        if name == "group":
            return self.dimension(config, "query_heads") // self.dimension(config, "kv_heads")
        if name == "mlp" and self.mlp_ratio is not None:
            return self.mlp_width(self.dimension(config, "hidden"), getattr(config, self.mlp_ratio))
        for key in self.dimensions[name]:
            value = getattr(config, key, None)
            if value is not None:
                return int(value)
        if name == "head_dim":
            return self.dimension(config, "hidden") // self.dimension(config, "query_heads")
        raise UserError(f"config.json of type {self.model_type} lacks {' or '.join(self.dimensions[name])}")

    def mlp_width(self, hidden: int, ratio: int) -> int:
        """Columns of the mlp under an integer `mlp_ratio`."""
        width = int(hidden * ratio)
        return (int(width * 2 / 3) + 7) // 8 * 8 if self.mlp_gated else width

    def per_unit(self, config: Any, dimensions: list[str]) -> int:
        """Product of dimensions: how many columns or heads one unit of a space stands for."""
        return prod(self.dimension(config, name) for name in dimensions)

    def units(self, config: Any, space: SpaceName) -> int:
        """Units of a space in the dense model; of qk, those of one head."""
        return self.dimension(config, self.spaces[space].units)

    def unit_columns(self, config: Any, space: SpaceName) -> int:
        """Consumer columns per unit; 1 for a space without a consumer."""
        found = self.spaces[space]
        return self.per_unit(config, found.consumer_unit) if isinstance(found, ColumnSpace) else 1

    def tokens(self, config: Any) -> int:
        """Tokens of one sample: the context length of a text model, at most 2048, or those of the config's images."""
        if self.modality == "image":
            return self.image_tokens(config, _pair(config.image_size))
        return min(2048, int(getattr(config, "max_position_embeddings", 2048)))

    def image_tokens(self, config: Any, size: tuple[int, ...]) -> int:
        """Tokens of an image of `size` (height, width): patches and special tokens."""
        return patches(config, size) + self.special_tokens

    def uses_sliding_window(self, config: Any) -> bool:
        """Whether this checkpoint's attention really is windowed."""
        return self.sliding_window is not None and bool(getattr(config, self.sliding_window, None))

    def of(self, architecture: str) -> "Family":
        """The same family with another of its classes at hand; paths lose the base prefix where it is the base model.

        Raises:
            KeyError: the family has no such class.
        """
        described = self.model_copy(update={"architecture": architecture})
        if described.architectures[architecture].auto != "AutoModel":
            return described
        prefix = f"{self.base}."
        bare = {
            "prefixed": False,
            "layers": self.layers.removeprefix(prefix),
            "block": self.block.removeprefix(prefix),
            "entry": [path.removeprefix(prefix) for path in self.entry],
            "exit": [path.removeprefix(prefix) for path in self.exit],
            "lookups": [path.removeprefix(prefix) for path in self.lookups],
            "embedding": self.embedding and self.embedding.removeprefix(prefix),
        }
        return described.model_copy(update=bare)


def _pair(value: Any) -> tuple[int, int]:
    """Height and width of a config's image or patch size, one number or two."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def patches(config: Any, size: tuple[int, ...] | None = None) -> int:
    """Patches of an image of `size` (height, width); of the config's own size by default."""
    height, width = size or _pair(config.image_size)
    rows, columns = _pair(config.patch_size)
    return (height // rows) * (width // columns)


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
def load_family(model_type: str, variant: str | None = None) -> Family:
    """The description of a family as it stands in its file, the first class named.

    Args:
        model_type: of config.json.
        variant: a config key that is true and changes the description (`variants` in the file), or None.

    Raises:
        UserError: there is none; the message lists the known ones and says where a description goes.
    """
    if model_type not in known_families():
        known = ", ".join(known_families())
        raise UserError(
            f"model_type {model_type!r} is not a family this version knows ({known}): "
            "a new one is a JSON description in ckpt_prune/architectures/families/"
        )
    values = _description(model_type)
    variants = values.pop("variants", {})
    if variant is not None:
        changes = variants[variant]
        values |= changes | {"spaces": values["spaces"] | changes.get("spaces", {})}
    return Family.model_validate({"architecture": next(iter(values["architectures"])), **values})


@cache
def variants_of(model_type: str) -> tuple[str, ...]:
    """Config keys that change a family's description where they are true."""
    return tuple(_description(model_type).get("variants", {})) if model_type in known_families() else ()


def described(config: dict[str, Any]) -> Family:
    """The description of a config's family as it stands in its file, with the variant that the config chooses."""
    model_type = config["model_type"]
    return load_family(model_type, next((key for key in variants_of(model_type) if config.get(key)), None))


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
    family = described(config)
    declared = next(iter(config.get("architectures") or []), "")
    # This tool's remote code names a class after the stock one it stands for.
    declared = declared.removeprefix("Pruned")
    return family.of(declared if declared in family.architectures else family.architecture)
