"""A model: a checkpoint with its family and config, and what follows from the three."""

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import processor_fingerprint, tokenizer_fingerprint
from ckpt_prune.common.errors import UserError
from ckpt_prune.model.context import context_length
from ckpt_prune.model.cuts import KeptUnits, RemainingLines, list_cuts, remaining_lines
from ckpt_prune.model.family import Family
from ckpt_prune.model.family_keys import GROUPED
from ckpt_prune.model.matching import match_family, orient_checkpoint
from ckpt_prune.model.skeleton import PAIRS, is_stored_buffer, parse_config, stock_class
from ckpt_prune.model.spaces import Axis, Kind, SpaceName, axis_dim
from ckpt_prune.modeling_pruned import layer_config

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
TensorSpecs = Mapping[str, TensorSpec]
"""Name of a tensor on disk → dtype and shape."""
Width = int | list[int]
"""Columns of a module: of all blocks, or of each where they differ."""
BlockWidths = Mapping[SpaceName, int]
"""Units of each space that a block keeps; of q and k, in every head."""

_INPUT = "/input"
_MOST_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint with its family and config.

    Attributes:
        checkpoint: where its tensors are.
        family: the description of its architecture, with the class that the checkpoint holds.
        config: parsed by transformers.
    """

    checkpoint: Checkpoint
    family: Family
    config: PreTrainedConfig

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Model":
        """The model that a checkpoint holds.

        Raises:
            UserError: its family is not known, its config has a setting that the family's description does not hold
                for, or transformers refuses it.
        """
        family, config = match_family(checkpoint), parse_config(checkpoint.config)
        family.check_config(config)
        seen = orient_checkpoint(checkpoint, family)
        if seen.stated:
            config = parse_config(seen.config)
        found = cls(seen, family.with_config(config), config)
        if not found.spaced_blocks:
            raise UserError(
                f"{family.model_type} with {family.leading} {getattr(config, family.leading or '')} in config.json is "
                "not supported: none of its blocks has experts"
            )
        return found

    @classmethod
    def open(cls, path: str | Path) -> "Model":
        """The model in a folder, or of a Hub id."""
        return cls.of(Checkpoint.open(path))

    def with_config(self, config: PreTrainedConfig) -> "Model":
        """The same tensors read under another config."""
        return replace(self, config=config)

    # ---- dimensions -------------------------------------------------------------------------------------------

    def dimension(self, name: str) -> int:
        """A dimension by the family's name for it; of an output whose blocks differ, that of its first block."""
        if name not in self._dimensions:
            self._dimensions[name] = self.family.dimension(self._counted, name)
        return self._dimensions[name]

    @cached_property
    def _dimensions(self) -> dict[str, int]:
        """Those that were asked for: every line that is cut asks, and a config of transformers is slow to answer."""
        return {}

    @cached_property
    def _counted(self) -> PreTrainedConfig:
        return layer_config(self.config, 0) if self.has_remote_code else self.config

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.dimension("layers")

    @property
    def spaced_blocks(self) -> range:
        """Blocks that have the spaces of the family: all but those that come before them (`Family.leading`)."""
        leading = self.family.leading
        return range(0 if leading is None else int(getattr(self.config, leading) or 0), self.blocks)

    def inputs(self, block: int) -> dict[str, tuple[str, ...]]:
        """`Family.inputs` of a block: nothing of one that comes before those with spaces."""
        return self.family.inputs if block in self.spaced_blocks else {}

    def weights(self, block: int) -> list[str]:
        """On-disk weights of a block's linear modules that spaces lie on."""
        return [self.tensor(block, module) for module in self.family.linears] if block in self.spaced_blocks else []

    def units(self, space: SpaceName) -> int:
        """Units of a space that a width counts; of q and k, those of one head."""
        return self.family.spaces[space].count(self.dimension)

    def site_units(self, space: SpaceName) -> int:
        """Units of a site: of q and k those of every head, elsewhere those of the space."""
        return self.family.spaces[space].site_units(self.dimension)

    def copies(self, space: SpaceName) -> int:
        """How many times the counted units stand in a site."""
        return self.family.spaces[space].copies(self.dimension)

    @property
    def expert_groups(self) -> int:
        """Groups of neighbouring experts that keep as many each; 1 if the router may send a token to any experts."""
        experts = self.family.experts
        count, sent = (1, 1) if experts is None else experts.grouping(self.config)
        return count if sent < count else 1

    def multiple(self, space: SpaceName) -> int:
        """What numbers of kept units have to be multiples of, for the router and for the products of stock experts.

        Experts are as many in every group of the router. Columns of experts, and what one config key says together with
        them, are multiples of `GROUPED`, unless the dense model's are not.
        """
        family, own = self.family, self.family.spaces[space]
        if own.ends == "experts" and family.experts is not None:
            return family.experts.grouping(self.config)[0]
        of_experts = own.experts or any(
            each.experts and self.share_width_key(name, space) for name, each in family.spaces.items()
        )
        return GROUPED if of_experts and self.units(space) % GROUPED == 0 else 1

    def share_width_key(self, space: SpaceName, other: SpaceName) -> bool:
        """Whether one key of the config says how wide both spaces are."""
        units = self.family.spaces[space].units
        return units in self.family.together and units == self.family.spaces[other].units

    def unit_columns(self, space: SpaceName) -> int:
        """Columns of the consumer per unit; 1 for a space without a consumer."""
        columns = self.family.columns.get(space)
        return 1 if columns is None else columns.columns.per_unit(self.dimension)

    def consumer_columns(self, space: SpaceName, units: Tensor) -> Tensor:
        """Columns of a space's consumer that some units of a site lie on, int64, in the dense model."""
        return self.family.columns[space].columns.lines(units, self.site_units(space), self.dimension)

    def config_values(self, widths: BlockWidths) -> dict[str, int]:
        """Config keys and values that say how many units of each space there are."""
        kept = {self.family.spaces[space].units: count for space, count in widths.items()}
        # A key that two spaces share (query heads: KV groups times those of each) is the product of both widths.
        return {
            key: count * prod(kept.get(factor, self.dimension(factor)) for factor in factors)
            for space, count in widths.items()
            for key, factors in self.family.spaces[space].config.items()
        }

    def with_widths(self, widths: BlockWidths) -> "Model":
        """This model under a config of so many units of each space; its tensors stay those of the dense model."""
        config = copy.copy(self.config)
        if not isinstance(getattr(type(config), "head_dim", None), property):
            # Where the config leaves it out, it would be derived from the head count, which may change.
            config.head_dim = self.dimension("head_dim")
        for key, value in self.config_values(widths).items():
            setattr(config, key, value)
        return self.with_config(config)

    def widths_of(self, block: int, tensors: Mapping[str, Tensor]) -> dict[SpaceName, int]:
        """Units of each space that a block's tensors have, of any widths.

        Args:
            block: its index.
            tensors: by on-disk name.
        """
        spaces = self.family.spaces
        noted = tensors.get(self._widths_name(block))
        if noted is not None:
            return dict(zip(spaces, noted.tolist(), strict=True))
        values = {name: space for name, space in spaces.items() if space.ends == "values"}
        # Values may be narrower than heads are wide: the block's config says so, and all else is counted without.
        own_config = layer_config(self.config, block) if values else self.config
        known = {name: getattr(own_config, next(iter(space.config)), None) for name, space in values.items()}
        found: dict[SpaceName, int] = {name: known[name] or self.units(name) for name in values}
        others = {name: space for name, space in spaces.items() if name not in values}
        inside = {(axis, i.module): name for name, space in values.items() for axis, i in space.incidences}

        def lines(axis: Axis, module: str) -> int:
            size = int(tensors[self.tensor(block, module)].shape[axis_dim(axis)])
            name = inside.get((axis, module))
            return size if name is None else size // found[name] * self.units(name)

        crossed = [(i.module, axis) for space in others.values() for axis, i in space.incidences]
        # Spaces that stand side by side are counted last: how often depends on the others.
        for name, space in sorted(others.items(), key=lambda item: item[1].per is not None):
            # Lines that no other space takes from, where there are any.
            own = [(axis, i) for axis, i in space.incidences if crossed.count((i.module, axis)) == 1]
            axis, incidence = (own or space.incidences)[-1]
            if self.tensor(block, incidence.module) not in tensors:
                continue  # an expert that is gone, or a block without the spaces
            found[name] = lines(axis, incidence.module) // incidence.per_unit(self.dimension)
            if space.per is not None:
                outer = next((found[other] for other, each in others.items() if each.units == space.per), None)
                heads = lines("columns", self.family.attention.output) // self.dimension("head_dim")
                found[name] //= heads if outer is None else outer
        return {name: found[name] for name in spaces if name in found}

    def _widths_name(self, block: int) -> str:
        """Under which a block's tensors may tell their widths."""
        return f"{self.family.block.format(block=block)}widths"

    def note_widths(self, block: int, tensors: Mapping[str, Tensor], widths: BlockWidths) -> dict[str, Tensor]:
        """A block's tensors with what they do not tell by their shapes: half of the heads, or heads half as wide.

        Args:
            block: its index.
            tensors: by on-disk name.
            widths: units of the spaces that are pruned.
        """
        if not any(space.ends == "values" for space in self.family.spaces.values()):
            return dict(tensors)
        told = torch.tensor([widths.get(space, self.units(space)) for space in self.family.spaces])
        return {**tensors, self._widths_name(block): told}

    @property
    def tokens(self) -> int:
        """Tokens of one sample: the context length of a text model, at most 2048, or those of the config's images."""
        if self.family.modality == "audio":
            return self.dimension("positions")
        if self.family.modality == "image":
            return self.image_tokens(self.family.usual or _pair(self.config.image_size))
        context = context_length(self.config)
        return _MOST_TOKENS if context is None else min(_MOST_TOKENS, context)

    def image_tokens(self, size: tuple[int, ...]) -> int:
        """Tokens of an image of `size` (height, width): patches and special tokens."""
        return image_tokens(self.family, self.config, size)

    @property
    def uses_sliding_window(self) -> bool:
        """Whether this checkpoint's attention really is windowed."""
        key = self.family.sliding_window
        return key is not None and bool(getattr(self.config, key, None))

    # ---- tensors ----------------------------------------------------------------------------------------------

    def tensor(self, block: int, module: str, kind: Kind = "weight") -> str:
        """On-disk name of a block's tensor."""
        return self.family.tensor(block, module, kind)

    def has(self, module: str, kind: Literal["weight", "bias"] = "weight") -> bool:
        """Whether blocks have such a tensor."""
        return self.tensor(self.spaced_blocks.start, module, kind) in self.checkpoint.tensors

    @cached_property
    def _expert_weights(self) -> dict[str, int]:
        modules = self.family.expert_modules.items()
        return {self.tensor(block, module): expert for block in range(self.blocks) for module, (expert, _) in modules}

    def expert_of(self, weight: str) -> int | None:
        """The expert that a weight on disk is of; None where it is of no single one."""
        return self._expert_weights.get(weight)

    def block_names(self, block: int) -> list[str]:
        """On-disk names of a block's tensors."""
        prefix = self.family.block.format(block=block)
        return [name for name in self.checkpoint.tensors if name.startswith(prefix)]

    def read_block(self, block: int) -> dict[str, Tensor]:
        """A block's tensors."""
        return self.checkpoint.read(self.block_names(block))

    def outside(self) -> list[str]:
        """On-disk names of what stands outside the blocks: embeddings, norms, heads."""
        prefixes = tuple(self.family.block.format(block=block) for block in range(self.blocks))
        return [name for name in self.checkpoint.tensors if not name.startswith(prefixes)]

    @property
    def shapes(self) -> dict[str, TensorSpec]:
        """Name → dtype and shape of every tensor."""
        return {name: (info.dtype, info.shape) for name, info in self.checkpoint.tensors.items()}

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The same without buffers that models compute themselves."""
        return {name: shape for name, shape in self.shapes.items() if not is_stored_buffer(name)}

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding: its class can tie them, and the config says so."""
        can = getattr(stock_class(self.family.architecture, self.config), "_tied_weights_keys", None)
        return bool(can and getattr(self.config, "tie_word_embeddings", False))

    @property
    def has_remote_code(self) -> bool:
        """Whether it is an output whose blocks no stock class has: they may differ, and its config asks for code."""
        return bool(self.checkpoint.config.get("auto_map"))

    @property
    def dtype(self) -> torch.dtype:
        """The type that most bytes of the checkpoint are in."""
        return self.checkpoint.dtype

    @property
    def reader_fingerprint(self) -> str | None:
        """Fingerprint of what turns data into the model's input: the tokenizer, or the image processor."""
        read = tokenizer_fingerprint if self.family.modality == "text" else processor_fingerprint
        return read(self.checkpoint.path)

    # ---- what stays -------------------------------------------------------------------------------------------

    def remaining_lines(self, kept: KeptUnits) -> RemainingLines:
        """What stays of a block's linear modules where these units do (`cuts.stays`)."""
        modules = [*self.family.linears, *(space.measured for space in self.family.expert_spaces.values())]
        sizes = {module: self._shape(module) for module in modules}
        sizes |= {each.module: self._shape(each.module) for s in self.family.spaces.values() for each in s.tables}
        return remaining_lines(self.family, self.dimension, kept, sizes)

    def shapes_at(self, widths: Sequence[BlockWidths]) -> dict[str, TensorSpec]:
        """Name → dtype and shape of every tensor where blocks keep so many units, before any bias is added.

        Args:
            widths: of every block; a space that is left out stays whole.
        """
        shapes = self.shapes
        known: dict[tuple[tuple[SpaceName, int], ...], RemainingLines] = {}
        for block, own in enumerate(widths):
            key = tuple(own.items())
            if key not in known:
                known[key] = self.remaining_lines({s: self.family.spaces[s].first(n, self.dimension) for s, n in key})
            for module, kind, dim, lines in list_cuts(known[key]):
                name = self.tensor(block, module, kind)
                if name in shapes:
                    dtype, shape = shapes[name]
                    shapes[name] = dtype, (*shape[:dim], len(lines), *shape[dim + 1 :])
            for space, described in self.family.rotary_spaces.items():
                if own.get(space, self.units(space)) < self.units(space):
                    heads = next((n for s, n in own.items() if self.family.spaces[s].units == described.per), None)
                    shapes[self.pairs_name(block)] = torch.int16, (own[space] * (heads or self.copies(space)),)
            for space in self.family.expert_spaces.keys() & own.keys():
                gone = (m for m, (expert, _) in self.family.expert_modules.items() if expert >= own[space])
                for module in gone:
                    shapes.pop(self.tensor(block, module), None)
        return shapes

    def pairs_name(self, block: int) -> str:
        """On-disk name of the tensor that says which rotary pairs a block keeps, where some are gone."""
        owner = self.family.attention.query.rpartition(".")[0]
        return f"{self.family.block.format(block=block)}{owner}.{PAIRS}"

    def kept_pairs(self, kept: KeptUnits) -> Tensor | None:
        """What that tensor holds: the pairs of the first KV head that stays, then those of the next.

        Args:
            kept: spaces of a block that are pruned.

        Returns:
            int16; None where no pair is gone.
        """
        for name, space in self.family.rotary_spaces.items():
            if name in kept:
                own, count = kept[name], space.count(self.dimension)
                for other, units in kept.items():
                    if self.family.spaces[other].units == space.per:
                        own = own[torch.isin(own // count, units)]
                return (own % count).to(torch.int16)
        return None

    def map_experts(self, block: int, kept: KeptUnits, rewritten: Set[str] = frozenset()) -> dict[str, str]:
        """Weights of the experts that stay where others of a block go: new name on disk → the dense model's.

        Args:
            block: its index.
            kept: units that stay, of every space that is pruned.
            rewritten: linear modules of an expert that are left out.
        """
        stay = next((kept[space].tolist() for space in self.family.expert_spaces if space in kept), [])
        roles = [] if self.family.experts is None else [m for m in self.family.experts.roles if m not in rewritten]
        return {
            self.tensor(block, each.format(expert=number)): self.tensor(block, each.format(expert=expert))
            for each in roles
            for number, expert in enumerate(stay)
        }

    def drop_experts(self, block: int, tensors: Mapping[str, Tensor], kept: KeptUnits) -> dict[str, Tensor]:
        """A block's tensors without those of experts that go; the others are numbered anew.

        Args:
            block: its index.
            tensors: by on-disk name.
            kept: units that stay, of every space that is pruned.
        """
        moved = self.map_experts(block, kept)
        if not moved:
            return dict(tensors)
        own = {self.tensor(block, module) for module in self.family.expert_modules}
        found = {name: tensor for name, tensor in tensors.items() if name not in own}
        return found | {name: tensors[before] for name, before in moved.items()}

    def line_numbers(self, module: str, dim: int) -> Tensor:
        """All rows (dim 0) or columns of a linear module's dense weight."""
        return torch.arange(self._shape(module)[dim])

    def _shape(self, module: str) -> tuple[int, ...]:
        """Of a linear module's dense weight, or of a table."""
        tensors, first = self.checkpoint.tensors, self.spaced_blocks.start
        name = self.tensor(first, module)
        return tensors[name if name in tensors else self.tensor(first, module, "itself")].shape

    def unit_weights(self, space: SpaceName) -> int:
        """Weights, without biases, that go with one unit of a space."""
        found = 0
        for axis, incidence in self.family.spaces[space].incidences:
            found += incidence.per_unit(self.dimension) * self._shape(incidence.module)[1 - axis_dim(axis)]
        tables = self.family.spaces[space].tables
        return found + sum(table.per_unit(self.dimension) * prod(self._shape(table.module)[:-1]) for table in tables)

    # ---- statistics -------------------------------------------------------------------------------------------

    def moments_name(self, block: int, key: str) -> str:
        """On-disk weight that statistics file moments under.

        A space has the name of the module that `Space.measured` says, and so has a linear module that is a consumer.
        A space within another has the other's.
        Any other linear module has its own with a suffix: the moments of queries stand under the bare name.
        """
        consumers = {space.consumer for space in self.family.consumers.values()}
        for name, space in self.family.spaces.items():
            if key == name or (key == space.measured and key in consumers):
                return self.tensor(block, space.measured)
        return self.tensor(block, key) + _INPUT

    def site_name(self, block: int, space: SpaceName) -> str:
        """What statistics file a site's effects under: as its moments, with a suffix where it is within another."""
        name = self.moments_name(block, space)
        return name if space not in self.family.columns or space in self.family.consumers else f"{name}/{space}"

    @property
    def consumer_widths(self) -> dict[str, Width]:
        """Consumer's on-disk weight, with `{block}` for the block → its width."""
        found: dict[str, Width] = {}
        for name, space in self.family.consumers.items():
            width: Width = self.units(name) * self.unit_columns(name)
            if self.has_remote_code:
                names = (self.tensor(block, space.consumer) for block in self.spaced_blocks)
                own = [0] * self.spaced_blocks.start + [self.checkpoint.tensors[each].shape[1] for each in names]
                width = own[-1] if len(set(own) - {0}) == 1 else own
            found[f"{self.family.block}{space.consumer}.weight"] = width
        return found

    @property
    def linear_widths(self) -> dict[str, int]:
        """Linear modules that are no consumer, by `moments_name` with `{block}` → the width of their input.

        Of those that read one input, the first.
        """
        hidden = self.dimension("hidden")
        return {f"{self.family.block}{first}.weight{_INPUT}": hidden for first in self.family.producer_inputs}

    @property
    def router_experts(self) -> dict[str, int]:
        """Router's on-disk weight, with `{block}` for the block → experts."""
        routers = self.family.expert_spaces.items()
        return {f"{self.family.block}{space.measured}.weight": self.units(name) for name, space in routers}

    @property
    def query_heads(self) -> dict[str, tuple[int, int]]:
        """Query's on-disk weight, with `{block}` for the block → heads and their width; where logits can be pruned."""
        return {
            f"{self.family.block}{space.measured}.weight": (space.copies(self.dimension), space.count(self.dimension))
            for space in self.family.spaces.values()
            if space.ends == "logits"
        }

    @property
    def turned_heads(self) -> dict[str, tuple[int, int]]:
        """Query's on-disk weight, with `{block}` for the block → query heads and pairs of each, where pairs can go."""
        return {
            f"{self.family.block}{space.measured}.weight": (self.dimension("query_heads"), space.count(self.dimension))
            for space in self.family.rotary_spaces.values()
        }


def _pair(value: Any) -> tuple[int, int]:
    """Height and width of a config's image or patch size, one number or two."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def patches(config: Any, size: tuple[int, ...] | None = None) -> int:
    """Patches of an image of `size` (height, width); of the config's own size by default."""
    height, width = size or _pair(config.image_size)
    rows, columns = _pair(config.patch_size)
    return (height // rows) * (width // columns)


def image_tokens(family: Family, config: Any, size: tuple[int, ...]) -> int:
    """Tokens of an image of `size` (height, width): patches, special tokens and registers."""
    registers = 0 if family.registers is None else int(getattr(config, family.registers))
    return patches(config, size) + family.special_tokens + registers
