"""Families: what the project knows of an architecture (read from JSON by `descriptions`).

A description names tensors as they stand on disk; `spaces` says what can be pruned.
"""

import json
from typing import Any, Literal

from pydantic import Field

from ckpt_prune.checkpoint.sentence_modules import ModulesUse
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.family_keys import Architecture, Attention, Experts, Multiple, Refusal, Residual, Rotary
from ckpt_prune.model.purposes import WITHOUT_HEAD, Purpose, purpose_of_class, stock_classes
from ckpt_prune.model.settings import check_settings
from ckpt_prune.model.spaces import (
    AnySpace,
    ConsumerSpace,
    ExpertSpace,
    Kind,
    LogitSpace,
    RotarySpace,
    SpaceName,
    StrictModel,
    ValueSpace,
    expert_of,
    expert_space,
    product,
)

Modality = Literal["text", "image", "audio"]
DATA_OPTIONS: dict[Modality, str] = {"text": "--text", "image": "--images", "audio": "--audio"}
"""What commands are given data of each kind by."""

KINDS: tuple[Literal["weight"], Literal["bias"]] = ("weight", "bias")
"""Tensors that a module of a block may have."""


REMOTE_PREFIX = "Pruned"
"""Of a class of this tool's remote code, before the stock class it stands for."""


class Family(StrictModel):
    """One architecture.

    Attributes:
        model_type: `model_type` in config.json.
        base: prefix of the base model in the classes with a head; a checkpoint of the base model alone lacks it.
        architectures: stock transformers class → what it is. `classes` has more of them.
        architecture: the class at hand.
        used_for: what the modules of its checkpoint's sentence-transformers folder use it for (`modules.use_of`).
        variant: the config key that is true and has changed this description, or None.
        prefixed: whether the tensors of the base model begin with `base` on disk.
        modality: what the model reads.
        special_tokens: of an image, beside its patches: the class token, and DeiT's distillation token.
        registers: the config key that counts tokens of an image beside these, or None.
        layers: module path of the list of blocks.
        block: prefix of a block's tensor names on disk, with `{block}` for its index.
        entry: modules that run before the blocks, those that are there.
        embedding: module of the token embedding.
        flat: whether blocks read the tokens of all samples in one sequence, and an image as patches that are cut out
            beforehand, with the numbers of their rows and columns.
        usual: height and width of the image that costs are told for, where the config says none.
        applied: modules outside the blocks → how often they are multiplied for a token, where that is not once.
        lookups: modules whose two-dimensional tensors are looked up or added, never multiplied; with `{block}` for
            those of a block.
        dimensions: dimension → config keys to try in order.
        attention: its linear modules.
        transposed: linear modules of a block whose weights files hold as (inputs, outputs), as Conv1D does; everywhere
            else they are (outputs, inputs).
        derived: dimensions that no config key of `dimensions` may say → the factors that they are then.
        spaces: what can be pruned, in the order of computation.
        absent: why there is none of a space that families alike have.
        experts: of a block's mlp, where it is a mixture of them.
        leading: the config key that counts blocks that come before those with the spaces and stay whole (one mlp in
            place of experts), or None.
        ahead: the config key that counts blocks behind the last that predict further tokens, which the class does not
            load (`Checkpoint.ignored`), or None.
        together: dimensions that one config key says of several spaces: as many units stay in each.
        spaceless: linear modules of a block that no space lies on, those that are there.
        rope: whether q and k are rotated by position before they meet.
        rotary: how, where whole pairs of q and k can go: the space `rotary` follows from it.
        unpaired: why none can, where q and k are rotated.
        bias_slots: linear module → the config key that gives it a bias, or true where it always has one; a module
            that is not listed has no bias in this family.
        heads_divide_hidden: whether the config class refuses a head count that does not divide the hidden size.
        multiples: dimensions that the config says as multiples of the hidden size.
        positions_behind: the config key of the position that tokens' positions are counted from behind, or None where
            they begin at 0.
        tuples: whether a block returns its hidden states as the first of several things, in versions of transformers
            where its class does not say that it returns a tensor (`blocks.returns_tuple`).
        sliding_window: the config key that turns sliding-window attention on, where the family has it.
        norm_offset: what norms add to their weights before they multiply: 1 where gains are stored less 1.
        residual: how blocks read from and add to the residual stream, where rotations can be absorbed.
        unrotatable: why not, where they cannot.
        refused: settings of the config under which the description does not hold.
        relabel: config key → value, of a config that another family's model is stored under.
        uneven: config keys and values that an output has whose blocks differ in width.
        stand_ins: families that compute the same function from the same tensors, to relabel to when this one's
            config cannot say the new shape, in the order to try them.
        settings: more config keys that leave the description as it is, beside `settings.HARMLESS`; None where it has
            not been held against the config class, and is not guarded. Not inherited.
        outside: JSON of the file, where that is from outside the package.
    """

    model_type: str
    base: str
    architectures: dict[str, Architecture]
    architecture: str
    used_for: ModulesUse | None = None
    variant: str | None = None
    prefixed: bool = True
    modality: Modality = "text"
    special_tokens: int = 0
    registers: str | None = None
    layers: str
    block: str
    entry: list[str]
    embedding: str | None = None
    flat: bool = False
    usual: tuple[int, int] | None = None
    applied: dict[str, float] = Field(default_factory=dict)
    lookups: list[str]
    dimensions: dict[str, list[str]]
    attention: Attention
    transposed: list[str] = Field(default_factory=list)
    derived: dict[str, list[str | int]] = Field(default_factory=dict)
    spaces: dict[SpaceName, AnySpace]
    absent: dict[SpaceName, str] = Field(default_factory=dict)
    experts: Experts | None = None
    leading: str | None = None
    ahead: str | None = None
    together: list[str] = Field(default_factory=list)
    spaceless: list[str] = Field(default_factory=list)
    rope: bool = False
    rotary: Rotary | None = None
    unpaired: str | None = None
    bias_slots: dict[str, str | bool] = Field(default_factory=dict)
    heads_divide_hidden: bool = False
    multiples: dict[str, Multiple] = Field(default_factory=dict)
    positions_behind: str | None = None
    tuples: bool = False
    sliding_window: str | None = None
    norm_offset: float = 0.0
    residual: Residual | None = None
    unrotatable: str | None = None
    refused: list[Refusal] = Field(default_factory=list)
    relabel: dict[str, float | bool | None] = Field(default_factory=dict)
    uneven: dict[str, bool] = Field(default_factory=dict)
    stand_ins: list[str] = Field(default_factory=list)
    settings: list[str] | None = None
    outside: str | None = None

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
    def binary(self) -> bool:
        """Whether its logits say of every token how likely one of two classes is, without an axis of classes."""
        return self.architectures[self.architecture].binary

    @property
    def classes(self) -> dict[str, Architecture]:
        """Every class: those of the description, and for a causal family those of transformers' own mappings."""
        if not self.has_causal:
            return self.architectures
        stock = stock_classes(self.model_type, self.base)
        return {name: Architecture(auto=auto) for name, auto in stock.items()} | self.architectures

    def has_class(self, architecture: str) -> bool:
        """Whether this is one of `classes`. transformers is asked for those only that the description lacks."""
        return architecture in self.architectures or architecture in self.classes

    def class_of(self, auto: str) -> str | None:
        """The first class that an Auto class loads, or None."""
        return next((name for name, each in self.classes.items() if each.auto == auto), None)

    @property
    def purpose(self) -> Purpose | None:
        """What the class at hand is for, in its folder."""
        return purpose_of_class(self.auto_class, binary=self.binary, used_for=self.used_for)

    @property
    def loading_class(self) -> str:
        """The Auto class that users load its checkpoint with: an embedder's is the base model's."""
        return "AutoModel" if self.used_for == "sentence-similarity" else self.auto_class

    @property
    def gives_logits(self) -> bool:
        """Whether what the model is for is read from logits, and not from its last hidden states."""
        return self.purpose not in WITHOUT_HEAD

    @property
    def causal(self) -> bool:
        """Whether this is a causal language model that is there to generate text."""
        return self.purpose == "text-generation"

    @property
    def has_causal(self) -> bool:
        """Whether some class of the family is a causal language model."""
        return any(own.auto == "AutoModelForCausalLM" for own in self.architectures.values())

    def on_disk(self, path: str) -> str:
        """A module path, or the beginning of one, as tensors on disk have it."""
        prefix = f"{self.base}."
        if not path.startswith(prefix) and self.auto_class != "AutoModel":
            return path
        return f"{prefix if self.prefixed else ''}{path.removeprefix(prefix)}"

    # ---- blocks -----------------------------------------------------------------------------------------------

    @property
    def columns(self) -> dict[SpaceName, ConsumerSpace]:
        """The spaces that end in the columns of a consumer."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, ConsumerSpace)}

    @property
    def consumers(self) -> dict[SpaceName, ConsumerSpace]:
        """Those of them that stand in no other: one for every consumer."""
        return {name: space for name, space in self.columns.items() if space.within is None}

    def part_spaces(self, part: str) -> dict[SpaceName, ConsumerSpace]:
        """Those by whose consumers a part of a block, attention or mlp, gives to the stream."""
        own = self.consumers.items()
        return {name: s for name, s in own if (s.consumer == self.attention.output) == (part == "attention")}

    @property
    def logits(self) -> dict[SpaceName, LogitSpace]:
        """The spaces that end in attention logits."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, LogitSpace)}

    @property
    def rotary_spaces(self) -> dict[SpaceName, RotarySpace]:
        """The space of rotary pairs, where the family has one."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, RotarySpace)}

    @property
    def expert_spaces(self) -> dict[SpaceName, ExpertSpace]:
        """The spaces of whole experts."""
        return {name: space for name, space in self.spaces.items() if isinstance(space, ExpertSpace)}

    @property
    def linears(self) -> list[str]:
        """Every linear module of a block that some space names, once."""
        spaces = [*self.logits.values(), *self.consumers.values()]
        return list(dict.fromkeys(module for space in spaces for module in space.modules))

    @property
    def expert_modules(self) -> dict[str, tuple[int, str]]:
        """Linear module of a block → the expert whose it is, and what it does there (`Experts.roles`).

        Empty before a config has said how many experts there are.
        """
        numbers = dict.fromkeys(expert for name in self.spaces if (expert := expert_of(name)) is not None)
        roles = {} if self.experts is None else self.experts.roles
        return {each.format(expert=number): (number, role) for number in numbers for each, role in roles.items()}

    @property
    def labels(self) -> dict[str, str]:
        """Linear module of a block → what tables call it, whatever the family does: q, k, v, o, gate, up or down.

        A fused projection has one label; a gated MLP that stores gate and up as one tensor has up.
        """
        attention = self.attention
        found = {attention.value: "v", attention.key: "k", attention.query: "q", attention.output: "o"}
        for space in self.consumers.values():
            if space.consumer not in found:
                *gates, up = dict.fromkeys(space.readers)
                found |= dict.fromkeys(gates, "gate") | {up: "up", space.consumer: "down"}
        known = set(self.linears)
        return {module: label for module, label in found.items() if module in known}

    def linears_of(self, part: Literal["mlp", "attention"] | None) -> list[str]:
        """Linear modules of a block: those of its attention, all others, or all."""
        attention = set(self.attention.modules)
        return [each for each in self.linears if part is None or (each in attention) == (part == "attention")]

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """A linear module of a block → all that read the same input, itself first; in the order of computation."""
        found: dict[str, tuple[str, ...]] = {}
        for space in self.consumers.values():
            producers = tuple(dict.fromkeys(space.readers))
            found |= {producers[0]: producers, space.consumer: (space.consumer,)}
        return found

    @property
    def producer_inputs(self) -> list[str]:
        """Of `inputs` those that are no consumer: linears that read the residual stream."""
        consumers = {space.consumer for space in self.consumers.values()}
        return [first for first in self.inputs if first not in consumers]

    def tensor(self, block: int, module: str, kind: Kind = "weight") -> str:
        """On-disk name of a block's tensor."""
        return f"{self.block.format(block=block)}{module}{'' if kind == 'itself' else f'.{kind}'}"

    def check_config(self, config: Any) -> None:
        """Refuse a config that the description does not hold for.

        Raises:
            UserError: it has one of the settings in `refused`, or one that the description does not know.
        """
        if self.settings is not None:
            check_settings(self.model_type, self.named_keys, config)
        for refusal in self.refused:
            concerned = refusal.purpose in (None, self.purpose)
            if concerned and refusal.holds(config, lambda name: self.dimension(config, name)):
                found = json.dumps(refusal.found(config))
                raise UserError(
                    f"{self.model_type} with {refusal.key} {found} in config.json is not supported: {refusal.why}"
                )

    @property
    def named_keys(self) -> set[str]:
        """Config keys that the description names."""
        found = {key for keys in self.dimensions.values() for key in keys} | set(self.settings or ())
        found |= {slot for slot in self.bias_slots.values() if isinstance(slot, str)}
        found |= {multiple.key for multiple in self.multiples.values()} | set(self.relabel) | set(self.uneven)
        found |= {key for key in (self.sliding_window, self.variant, self.leading, self.ahead) if key is not None}
        refused = [*self.refused, *(self.residual.refused if self.residual else ())]
        found |= {refusal.key.split(".")[0] for refusal in refused}
        found |= {key for space in self.spaces.values() for key in space.config}
        return found | {space.multiplier for space in self.columns.values() if space.multiplier is not None}

    def scale(self, block: int, space: SpaceName) -> str | None:
        """On-disk name of the layer scale of a space's consumer, (d_out,), or None where it has none."""
        own = self.columns[space].scale
        return None if own is None else f"{self.block.format(block=block)}{own}"

    def dimension(self, config: Any, name: str) -> int:
        """A dimension read off a transformers config; `group` is query heads per KV head, `pairs` those of a head."""
        if name == "group":
            groups = self.dimension(config, "kv_heads")
            return self.dimension(config, "query_heads") // groups if groups else 0  # transformers refuses that one
        if name == "pairs":
            return self.dimension(config, "head_dim") // 2
        if name in self.multiples:
            multiple = self.multiples[name]
            return multiple.width(self.dimension(config, "hidden"), getattr(config, multiple.key))
        for key in self.dimensions[name]:
            value = getattr(config, key, None)
            if value is not None:
                return int(value)
        if name in self.derived:
            return product(self.derived[name], lambda factor: self.dimension(config, factor))
        if name == "head_dim":
            return self.dimension(config, "hidden") // self.dimension(config, "query_heads")
        raise UserError(f"config.json of type {self.model_type} lacks {' or '.join(self.dimensions[name])}")

    def with_config(self, config: Any) -> "Family":
        """The same family with the spaces that blocks have under a config.

        A space inside another (`ConsumerSpace.within`) is left out where it has one unit, or where blocks differ in
        width: there is no one number of its units, and nothing more goes of such a model. Values stay, whose blocks say
        how wide they are. One of experts is there once for each.
        """
        uneven = getattr(config, "is_heterogeneous", False)
        single = {
            name
            for name, space in self.columns.items()
            if space.within is not None
            and not (uneven and isinstance(space, ValueSpace))
            and (uneven or space.count(lambda name: self.dimension(config, name)) <= 1)
        }
        spaces: dict[str, AnySpace] = {}
        for name, space in self.spaces.items():
            if not space.experts:
                spaces |= {} if name in single else {name: space}
            elif self.experts is not None:
                count = self.dimension(config, self.experts.count)
                spaces |= {expert_space(name, expert): space.of_expert(expert) for expert in range(count)}
        return self.model_copy(update={"spaces": spaces})

    def of(self, architecture: str) -> "Family":
        """The same family with another of its classes at hand; paths lose the base prefix where it is the base model.

        Raises:
            KeyError: the family has no such class.
        """
        known = self.architectures if architecture in self.architectures else self.classes
        classes = self.architectures | {architecture: known[architecture]}
        described = self.model_copy(update={"architecture": architecture, "architectures": classes})
        if described.architectures[architecture].auto != "AutoModel":
            return described
        prefix = f"{self.base}."
        bare = {
            "prefixed": False,
            "layers": self.layers.removeprefix(prefix),
            "block": self.block.removeprefix(prefix),
            "entry": [path.removeprefix(prefix) for path in self.entry],
            "lookups": [path.removeprefix(prefix) for path in self.lookups],
            "embedding": self.embedding and self.embedding.removeprefix(prefix),
        }
        return described.model_copy(update=bare)
