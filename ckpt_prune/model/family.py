"""Families: what the package knows of an architecture, read from JSON by `descriptions`.

A description names tensors as they stand on disk. model/README.md says what each of its keys means.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field

from ckpt_prune.checkpoint.sentence_modules import ModulesUse
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.family_keys import Attention, Experts, FamilyClass, Found, Multiple, Refusal, ResidualKeys
from ckpt_prune.model.nested_keys import read_key
from ckpt_prune.model.purposes import WITHOUT_HEAD, Purpose, loading_class, purpose_of_class, stock_classes
from ckpt_prune.model.settings import unknown_settings
from ckpt_prune.model.spaces import (
    OUTSIDE,
    AnySpace,
    ConsumerSpace,
    ExpertSpace,
    Kind,
    LogitSpace,
    PoolingSpace,
    RotarySpace,
    Space,
    SpaceName,
    StrictModel,
    ValueSpace,
    expert_of,
    expert_space,
    product,
)

Modality = Literal["text", "pairs", "image", "audio"]
DATA_OPTIONS: dict[Modality, str] = {"text": "--text", "pairs": "--data", "image": "--images", "audio": "--audio"}
"""Options of commands that take data of each kind."""
KINDS: tuple[Literal["weight"], Literal["bias"]] = ("weight", "bias")
"""Tensors that a module of a block may have."""
REMOTE_PREFIX = "Pruned"
"""First part of the names of this tool's remote classes, before the stock class that each stands for."""

QUOTIENTS = {"group": ("query_heads", "kv_heads"), "linear_group": ("linear_value_heads", "linear_heads")}
"""Dimensions that are so many of one for each of another: heads that share their keys."""


_MIXING = ("cross_heads", "linear_heads")
"""Spaces of what mixes tokens beside self-attention."""


def linears_of(spaces: Mapping[SpaceName, Space]) -> list[str]:
    """Return every linear module that some of a block's spaces name, once: those of attention logits first."""
    named = [space for space in spaces.values() if isinstance(space, LogitSpace)]
    return list(dict.fromkeys(module for space in [*named, *_consumers(spaces)] for module in space.modules))


def inputs_of(spaces: Mapping[SpaceName, Space]) -> dict[str, tuple[str, ...]]:
    """Return `Family.inputs` of a block with these spaces."""
    inputs: dict[str, tuple[str, ...]] = {}
    for space in _consumers(spaces):
        producers = tuple(each for each in dict.fromkeys(space.readers) if each not in space.elsewhere)
        inputs |= ({producers[0]: producers} if producers else {}) | {space.consumer: (space.consumer,)}
    return inputs


def _consumers(spaces: Mapping[SpaceName, Space]) -> list[ConsumerSpace]:
    return [space for space in spaces.values() if isinstance(space, ConsumerSpace) and space.part_of is None]


class Family(StrictModel):
    """One architecture: the keys of its description, and what the package adds when it reads a checkpoint.

    Attributes:
        architecture: the class in use, one of `classes`.
        used_for: what the sentence-transformers modules of its checkpoint's folder use it for, or None.
        variant: the config key that is true and has changed this description, or None.
        prefixed: whether the tensors of the base model begin with `base` on disk.
        outside: JSON of the description, if it is not one of this package's.
    """

    architecture: str
    used_for: ModulesUse | None = None
    variant: str | None = None
    prefixed: bool = True
    outside: str | None = None

    model_type: str
    base: str
    architectures: dict[str, FamilyClass]
    modality: Modality = "text"
    special_tokens: int = 0
    stage: int | None = None
    stride: float | None = None
    registers: str | None = None
    layers: str
    block: str
    embedding: str | None = None
    cost_image_size: tuple[int, int] | None = None
    multiplied_per_token: dict[str, float] = Field(default_factory=dict)
    lookups: list[str]
    dimensions: dict[str, list[str]]
    attention: Attention
    transposed: list[str] = Field(default_factory=list)
    derived: dict[str, list[str | int]] = Field(default_factory=dict)
    spaces: dict[SpaceName, AnySpace]
    absent: dict[SpaceName, str] = Field(default_factory=dict)
    experts: Experts | None = None
    together: list[str] = Field(default_factory=list)
    spaceless: list[str] = Field(default_factory=list)
    rope: bool = False
    no_rotary: str | None = None
    bias_slots: dict[str, str | bool] = Field(default_factory=dict)
    heads_divide_hidden: bool = False
    multiples: dict[str, Multiple] = Field(default_factory=dict)
    times_in_config: dict[str, int] = Field(default_factory=dict)
    width_switches: dict[str, bool] = Field(default_factory=dict)
    positions_behind: str | None = None
    passes_on: bool = False
    shares_keys: bool = False
    several_streams: bool = False
    sliding_window: str | None = None
    norm_offset: float = 0.0
    residual: ResidualKeys | None = None
    unrotatable: str | None = None
    refused: list[Refusal] = Field(default_factory=list)
    config_as_stand_in: dict[str, float | bool | None] = Field(default_factory=dict)
    config_if_blocks_differ: dict[str, bool] = Field(default_factory=dict)
    stand_ins: list[str] = Field(default_factory=list)
    settings: list[str] | None = None
    found: Found | None = None

    # ---- the class in use -------------------------------------------------------------------------------------

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
    def binary(self) -> bool:
        """Whether its logits tell two classes of every token apart, without an axis of classes."""
        return self.architectures[self.architecture].binary

    @property
    def classes(self) -> dict[str, FamilyClass]:
        """Classes of the description; of a family with a causal model, those of transformers' own mappings too."""
        if not self.has_causal:
            return self.architectures
        stock = stock_classes(self.model_type, self.base)
        return {name: FamilyClass(auto=auto) for name, auto in stock.items()} | self.architectures

    def has_class(self, architecture: str) -> bool:
        return architecture in self.architectures or architecture in self.classes

    def class_of(self, auto: str) -> str | None:
        """Return the first class that an Auto class loads, or None."""
        described = next((name for name, each in self.architectures.items() if each.auto == auto), None)
        # Those of transformers' mappings last: to ask for them imports them.
        return described or next((name for name, each in self.classes.items() if each.auto == auto), None)

    @property
    def purpose(self) -> Purpose | None:
        """The purpose of the class in use, in its folder."""
        return purpose_of_class(self.auto_class, binary=self.binary, used_for=self.used_for)

    @property
    def loading_class(self) -> str:
        """The Auto class that users load the checkpoint with: an embedder's is the base model's."""
        return loading_class(self.auto_class, self.used_for)

    @property
    def gives_logits(self) -> bool:
        """Whether the model's purpose reads logits, and not last hidden states."""
        return self.purpose not in WITHOUT_HEAD

    @property
    def reads_tokens(self) -> bool:
        """Whether blocks are passed texts, or pairs of them, and not images or sounds."""
        return self.modality in ("text", "pairs")

    @property
    def is_stack(self) -> bool:
        """Whether its blocks are one of several stacks in a model of its class."""
        return self.modality == "pairs" or self.stage is not None

    @property
    def can_be_shorter_inside(self) -> bool:
        """Whether blocks of a part may go: the config of the whole counts them by a key of their own."""
        return self.modality in ("pairs", "audio")

    def shares_width(self, space: Space) -> bool:
        """Return whether a config key states the width of a space of all stacks (T5's `d_ff`, swin's `mlp_ratio`)."""
        if self.stage is not None:
            return space.units in self.multiples and not self.multiples[space.units].listed
        return self.modality == "pairs" and not any("coder" in key for key in space.config)

    def width_key(self, space: Space) -> str:
        """Return the config key that states the width of a space."""
        return self.multiples[space.units].key if space.units in self.multiples else next(iter(space.config))

    @property
    def head_key(self) -> str:
        """The config key that states the width of a head, or would if the class had one."""
        return next(iter(self.dimensions["head_dim"]), "head_dim")

    def read_key(self, config: Any, key: str) -> Any:
        """Return what a config has under a key, of a list of all stages that of this one; None if it has nothing."""
        value = read_key(config, key)
        return value[self.stage] if self.stage is not None and isinstance(value, list | tuple) else value

    def _read_width(self, config: Any, key: str) -> Any:
        """Return the number under a key, of a list of all blocks that of those which have the space that it states."""
        value = self.read_key(config, key)
        if not isinstance(value, list | tuple):
            return value
        space = next((each for each in self.spaces.values() if key in each.config), None)
        widths = {own for block, own in enumerate(value) if space is None or not self.lacks(config, block, space)}
        if len(widths) == 1:
            return widths.pop()
        raise UserError(f"config.json lists several widths of blocks under {key}, and this version reads one of all")

    def lacks(self, config: Any, block: int, space: AnySpace) -> bool:
        """Return whether a block lacks a space though it has its linear modules: no unit is apart from the others."""
        return space.unless is not None and bool(getattr(config, space.unless)[block])

    def fits(self, config: Any, name: SpaceName, columns: int) -> bool:
        """Return whether a block whose consumer has so many columns has a space, of two for MLPs of two widths."""
        space = None if expert_of(name) is not None else self.columns.get(name)  # experts are equally wide
        narrower = (each.wider_than for each in self.spaces.values() if isinstance(each, ConsumerSpace))
        if space is None or (space.wider_than is None and name not in narrower):
            return True
        dimension = partial(self.dimension, config)
        return columns == space.site_units(dimension) * space.columns.per_unit(dimension)

    def as_listed(self, config: Any, key: str, value: int) -> Any:
        """Return a new value of a config key of a space; in a list if the config has one of all blocks there."""
        before = read_key(config, key)
        if self.stage is not None or not isinstance(before, list | tuple):
            return value
        space = next(each for each in self.spaces.values() if key in each.config)
        return [own if self.lacks(config, block, space) else value for block, own in enumerate(before)]

    @property
    def causal(self) -> bool:
        """Whether this is a causal language model whose purpose is to generate text."""
        return self.purpose == "text-generation"

    @property
    def has_causal(self) -> bool:
        """Whether some class of the family is a causal language model."""
        return any(each.auto == "AutoModelForCausalLM" for each in self.architectures.values())

    def on_disk(self, path: str) -> str:
        """Return a module path, or the beginning of one, as tensors on disk have it."""
        prefix = f"{self.base}."
        if not path.startswith(prefix) and self.auto_class != "AutoModel":
            return path
        return f"{prefix if self.prefixed else ''}{path.removeprefix(prefix)}"

    @property
    def embedding_weight(self) -> str:
        """On-disk name of the embedding; of no tensor if there is none."""
        return f"{self.on_disk(self.embedding or '')}.weight"

    # ---- blocks -----------------------------------------------------------------------------------------------

    @property
    def columns(self) -> dict[SpaceName, ConsumerSpace]:
        """The spaces that end in the columns of a consumer."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, ConsumerSpace)}

    @property
    def consumers(self) -> dict[SpaceName, ConsumerSpace]:
        """Those of `columns` that stand within no other: one for every consumer."""
        return {name: space for name, space in self.columns.items() if space.part_of is None}

    def part_spaces(self, part: str) -> dict[SpaceName, ConsumerSpace]:
        """Return those by whose consumers a part of a block, attention or mlp, adds to the residual stream.

        Linear attention and state spaces are of neither, and cross-attention is of attention.
        """
        consumers = {name: space for name, space in self.consumers.items() if name != "linear_heads"}
        return {name: s for name, s in consumers.items() if self.mixes(name) == (part == "attention")}

    def mixes(self, space: SpaceName) -> bool:
        """Return whether what a space ends in mixes tokens: attention, linear attention or a state space."""
        return space in _MIXING or self.columns[space].consumer == self.attention.output

    def is_passed_on(self, space: SpaceName) -> bool:
        """Return whether what blocks pass on may be of a space's units (T5's relative positions)."""
        return self.passes_on and space in self.columns and self.mixes(space)

    @property
    def logits(self) -> dict[SpaceName, LogitSpace]:
        """The spaces that end in attention logits."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, LogitSpace)}

    @property
    def rotary_spaces(self) -> dict[SpaceName, RotarySpace]:
        return {name: space for name, space in self.spaces.items() if isinstance(space, RotarySpace)}

    @property
    def pooling(self) -> dict[SpaceName, PoolingSpace]:
        """The spaces of what pools tokens behind the last block, of which this is a site."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, PoolingSpace)}

    def rows_of(self, module: str, tokens: int) -> int:
        """Return how many rows a module behind the blocks reads of a sample of so many tokens: one where it pools."""
        path = module.removeprefix(OUTSIDE)
        return 1 if path in self.pooled else max(1, int(self.multiplied_per_token.get(path, 1) * tokens))

    @property
    def expert_spaces(self) -> dict[SpaceName, ExpertSpace]:
        return {name: space for name, space in self.spaces.items() if isinstance(space, ExpertSpace)}

    @property
    def linears(self) -> list[str]:
        """Every linear module of a block that some space names, once."""
        return linears_of(self.spaces)

    @property
    def expert_modules(self) -> dict[str, tuple[int, str]]:
        """Linear module of a block → the expert it belongs to, and its role (`Experts.roles`).

        Empty before a config has said how many experts there are.
        """
        numbers = dict.fromkeys(expert for name in self.spaces if (expert := expert_of(name)) is not None)
        roles = {} if self.experts is None else self.experts.roles
        return {module.format(expert=n): (n, role) for n in numbers for module, role in roles.items()}

    @property
    def keeps_divisors(self) -> bool:
        """Whether no stock class holds heads that do not divide the hidden size: code of its own alone does."""
        return self.heads_divide_hidden and not self.stand_ins

    @property
    def labels(self) -> dict[str, str]:
        """Linear module of a block → its label in tables, the same in every family: q, k, v, o, gate, up or down.

        Those of linear attention and state spaces are in and out. A fused projection has one label; a gated MLP that
        stores gate and up as one tensor has up.
        """
        attention = self.attention
        labels = {attention.value: "v", attention.key: "k", attention.query: "q", attention.output: "o"}
        for name, space in self.consumers.items():
            if name == "heads":
                labels |= {gate: "gate" for gate in space.readers if gate not in labels}
            elif name == "cross_heads":
                keys, values = space.elsewhere[0], space.elsewhere[-1]
                labels |= {keys: "k", values: "v", space.readers[0]: "q", space.consumer: "o"}
            elif name == "linear_heads":
                labels |= dict.fromkeys(space.readers, "in") | {space.consumer: "out"}
            elif space.consumer not in labels:
                *gates, up = dict.fromkeys(space.readers)
                labels |= dict.fromkeys(gates, "gate") | {up: "up", space.consumer: "down"}
        linears = set(self.linears)
        return {module: label for module, label in labels.items() if module in linears}

    def linears_of(self, part: Literal["mlp", "attention"] | None) -> list[str]:
        """Return linear modules of a block: those of its attention, or of what stands in its place, others, or all."""
        mixing = [space for name in ("heads", *_MIXING) if (space := self.spaces.get(name)) is not None]
        attention = {*self.attention.modules, *(module for space in mixing for module in space.modules)}
        return [each for each in self.linears if part is None or (each in attention) == (part == "attention")]

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Linear module of a block → all that read the same input, itself first; in the order of computation."""
        return inputs_of(self.spaces)

    @property
    def producer_inputs(self) -> list[str]:
        """Those of `inputs` that are no consumer: linears that read the residual stream."""
        consumers = {space.consumer for space in self.consumers.values()}
        return [first for first in self.inputs if first not in consumers]

    def tensor(self, block: int, module: str, kind: Kind = "weight") -> str:
        """Return the on-disk name of a block's tensor."""
        end = "" if kind == "itself" else f".{kind}"
        if module.startswith(OUTSIDE):
            return f"{self.on_disk(module.removeprefix(OUTSIDE))}{end}"
        return f"{self.block.format(block=block)}{module}{end}"

    @property
    def blocks_prefix(self) -> str:
        """The start that the on-disk names of all blocks' tensors have in common."""
        return self.block.partition("{block}")[0]

    def scale(self, block: int, space: SpaceName) -> str | None:
        """Return the on-disk name of the layer scale of a space's consumer, (d_out,), or None."""
        scale = self.columns[space].scale
        return None if scale is None else f"{self.block.format(block=block)}{scale}"

    # ---- under a config ---------------------------------------------------------------------------------------

    def check_config(self, config: Any) -> None:
        """Refuse a config with a setting in `refused`, or with one that the description does not know."""
        if self.settings is not None:
            for key, default in unknown_settings(self.named_keys, config).items():
                value = getattr(config, key)
                if value != default:
                    raise UserError(
                        f"{self.model_type} with {key} {json.dumps(value, default=str)} in config.json is not "
                        f"supported: the description of {self.model_type} does not say what that changes"
                    )
        for refusal in self.refused:
            is_concerned = refusal.purpose in (None, self.purpose)
            if is_concerned and refusal.holds(config, lambda name: self.dimension(config, name)):
                value = json.dumps(refusal.config_value(config))
                raise UserError(
                    f"{self.model_type} with {refusal.key} {value} in config.json is not supported: {refusal.why}"
                )

    @property
    def named_keys(self) -> set[str]:
        keys = {key for tried in self.dimensions.values() for key in tried} | set(self.settings or ())
        keys |= {slot for slot in self.bias_slots.values() if isinstance(slot, str)}
        keys |= (
            {multiple.key for multiple in self.multiples.values()}
            | set(self.config_as_stand_in)
            | set(self.config_if_blocks_differ)
        )
        keys |= {key for key in (self.sliding_window, self.variant) if key is not None}
        refused = [*self.refused, *(self.residual.refused if self.residual else ())]
        keys |= {refusal.key.split(".")[0] for refusal in refused}
        keys |= {key for space in self.spaces.values() for key in space.config}
        return keys | {space.multiplier for space in self.columns.values() if space.multiplier is not None}

    def dimension(self, config: Any, name: str) -> int:
        """Read a dimension off a transformers config.

        Some follow from others: `QUOTIENTS`, and `pairs`, rotary pairs of a head.
        """
        if name in QUOTIENTS:
            several, groups = (self.dimension(config, each) for each in QUOTIENTS[name])
            return several // groups if groups else 0  # transformers refuses that one
        if name == "pairs":
            return self.dimension(config, "head_dim") // 2
        if name in self.multiples:
            multiple = self.multiples[name]
            return multiple.width(self.dimension(config, "hidden"), self.read_key(config, multiple.key))
        for key in self.dimensions[name]:
            value = self._read_width(config, key)
            if value is not None:
                return int(value) // self.times_in_config.get(name, 1)
        if name in self.derived:
            return product(self.derived[name], lambda factor: self.dimension(config, factor))
        if name == "head_dim":
            return self.dimension(config, "hidden") // self.dimension(config, "query_heads")
        raise UserError(f"config.json of type {self.model_type} lacks {' or '.join(self.dimensions[name])}")

    def with_config(self, config: Any) -> "Family":
        """Return the family with the spaces that blocks have under a config.

        A space within another is left out if it has one unit, or if blocks differ in width: there is no one number of
        its units, and such a model loses no more. Values stay, because blocks say how wide they are. A space of
        experts becomes one for each expert.
        """
        uneven = getattr(config, "is_heterogeneous", False)
        left_out = {
            name
            for name, space in self.columns.items()
            if space.part_of is not None
            and not (uneven and isinstance(space, ValueSpace))
            and (uneven or space.count(lambda name: self.dimension(config, name)) <= 1)
        }
        spaces: dict[str, AnySpace] = {}
        for name, space in self.spaces.items():
            if not space.experts:
                spaces |= {} if name in left_out else {name: space}
            elif self.experts is not None:
                count = self.dimension(config, self.experts.count)
                spaces |= {expert_space(name, expert): space.of_expert(expert) for expert in range(count)}
        return self.model_copy(update={"spaces": spaces})

    def of(self, architecture: str) -> "Family":
        """Return the family with another of its classes in use; KeyError if it has none of this name.

        Paths lose the base prefix if the class is the base model.
        """
        all_classes = self.architectures if architecture in self.architectures else self.classes
        classes = self.architectures | {architecture: all_classes[architecture]}
        family = self.model_copy(update={"architecture": architecture, "architectures": classes})
        if family.auto_class != "AutoModel":
            return family
        prefix = f"{self.base}."
        bare = {
            "prefixed": False,
            "layers": self.layers.removeprefix(prefix),
            "block": self.block.removeprefix(prefix),
            "lookups": [path.removeprefix(prefix) for path in self.lookups],
            "embedding": self.embedding and self.embedding.removeprefix(prefix),
        }
        return family.model_copy(update=bare)
