"""A model: a checkpoint with its family and config, and what follows from the three."""

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import (
    PROCESSORS,
    TOKENIZER_FILES,
    fingerprint_files,
    processor_fingerprint,
    tokenizer_fingerprint,
)
from ckpt_prune.checkpoint.side_files import reader_files
from ckpt_prune.model.context import context_length, image_size, image_tokens
from ckpt_prune.model.cuts import KeptUnits, RemainingLines, list_cuts, remaining_lines
from ckpt_prune.model.described import is_as_described
from ckpt_prune.model.family import Family, inputs_of, linears_of
from ckpt_prune.model.family_keys import GROUPED
from ckpt_prune.model.matching import match_family, orient_checkpoint, tied_by_description
from ckpt_prune.model.nested_keys import set_key
from ckpt_prune.model.skeleton import PAIRS, is_stored_buffer, parse_config, stock_class
from ckpt_prune.model.spaces import AnySpace, Axis, Kind, SpaceName, axis_dim, product, recipe_space, spaces_among

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
TensorSpecs = Mapping[str, TensorSpec]
"""On-disk name of a tensor → dtype and shape."""
Width = int | list[int]
"""Columns of a module: of all blocks that have it, or of each, with 0 for one without it."""
BlockWidths = Mapping[SpaceName, int]
"""Units of each space that a block keeps; of q and k, in every head."""

_INPUT = "/input"
_MOST_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint with its family, whose class in use is the one that the checkpoint holds, and its parsed config."""

    checkpoint: Checkpoint
    family: Family
    config: "PreTrainedConfig"

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Model":
        """Return the model that a checkpoint holds.

        UserError if its family is unknown, the description does not hold for its config, or transformers refuses it.
        """
        family, config = match_family(checkpoint), parse_config(checkpoint.config)
        family.check_config(config)
        oriented = orient_checkpoint(checkpoint, family)
        if oriented.stated:
            config = parse_config(oriented.config)
        model = cls(oriented, family.with_config(config), config)
        present = {space for block in range(model.blocks) for space in model.spaces(block)}
        if present < model.family.spaces.keys():
            spaces = {name: space for name, space in model.family.spaces.items() if name in present}
            model = replace(model, family=model.family.model_copy(update={"spaces": spaces}))
        if not checkpoint.by_class and not is_as_described(model):
            return cls.of(replace(checkpoint, by_class=True))
        return model

    @classmethod
    def open(cls, path: str | Path) -> "Model":
        """Open the model in a folder, or of a Hub id."""
        return cls.of(Checkpoint.open(path))

    def with_config(self, config: "PreTrainedConfig") -> "Model":
        model = replace(self, config=config)
        model.__dict__["_kinds"] = self._kinds  # of the same tensors
        return model

    @property
    def fingerprint(self) -> str:
        return self.checkpoint.fingerprint

    # ---- dimensions -------------------------------------------------------------------------------------------

    def dimension(self, name: str) -> int:
        """Return a dimension by the family's name for it; if blocks differ, that of the first block."""
        if name not in self._dimensions:
            self._dimensions[name] = self.family.dimension(self._first_config, name)
        return self._dimensions[name]

    @cached_property
    def _dimensions(self) -> dict[str, int]:
        """Cache: every cut line asks for dimensions, and a config of transformers is slow to answer."""
        return {}

    @cached_property
    def _first_config(self) -> "PreTrainedConfig":
        if not self.has_remote_code:
            return self.config
        from ckpt_prune.modeling_pruned import layer_config

        return layer_config(self.config, 0)

    @property
    def blocks(self) -> int:
        return self.dimension("layers")

    def spaces(self, block: int) -> Mapping[SpaceName, AnySpace]:
        """Return the spaces of a block, in the order in which they are computed: those all of whose modules it has."""
        return self._kinds[block]

    @cached_property
    def _kinds(self) -> list[Mapping[SpaceName, AnySpace]]:
        """The spaces of every block."""
        before, after = (re.escape(part) for part in self.family.block.split("{block}"))
        of_block, modules_of = re.compile(rf"{before}(\d+){after}(.+)"), defaultdict[int, set[str]](set)
        pooling = self._pooling_modules
        modules_of[self.blocks - 1] |= {each for each in pooling if self.tensor(0, each) in self.checkpoint.tensors}
        named = {module for space in self.family.spaces.values() for module in space.modules}
        for name in self.checkpoint.tensors:
            match = of_block.fullmatch(name)
            if match is not None:
                module = match[2].rpartition(".")[0]
                # A linear module that was factored stands in two.
                modules_of[int(match[1])] |= {module, module.rpartition(".")[0]} & named
        modules_by_block = [frozenset(modules_of[block]) for block in range(self.blocks)]
        kinds = {modules: spaces_among(self.family.spaces, modules) for modules in {*modules_by_block}}
        found: list[Mapping[SpaceName, AnySpace]] = [kinds[modules] for modules in modules_by_block]
        if any(space.wider_than for space in self.family.columns.values()):
            found = [{n: each for n, each in own.items() if self._fits(block, n)} for block, own in enumerate(found)]
        if all(space.unless is None for space in self.family.spaces.values()):
            return found
        lacks = partial(self.family.lacks, self.config)
        return [{n: each for n, each in own.items() if not lacks(block, each)} for block, own in enumerate(found)]

    def _fits(self, block: int, name: SpaceName) -> bool:
        from ckpt_prune.modeling_pruned import layer_config

        space = self.family.columns.get(name)
        config = layer_config(self.config, block) if self.has_remote_code else self.config
        weight = None if space is None else self.checkpoint.tensors.get(self.tensor(block, space.consumer))
        return weight is None or self.family.fits(config, name, weight.shape[1])

    @cached_property
    def dense_widths(self) -> list[dict[SpaceName, int]]:
        """The units of every space that each block has; of q and k, those of one head."""
        counts = {name: space.count(self.dimension) for name, space in self.family.spaces.items()}
        return [{space: counts[space] for space in self.spaces(block)} for block in range(self.blocks)]

    def units(self, space: SpaceName, block: int) -> int:
        """Return the units of a block's space that a width counts; of q and k, those of one head."""
        return self.dense_widths[block][space]

    def unit_counts(self, space: SpaceName) -> list[int]:
        """Return `units` of every block that has a space."""
        return [widths[space] for widths in self.dense_widths if space in widths]

    @property
    def spaced_blocks(self) -> list[int]:
        """Blocks that have spaces; they need not be neighbours."""
        return [block for block, widths in enumerate(self.dense_widths) if widths]

    def blocks_with(self, space: SpaceName) -> list[int]:
        """Return the blocks that have a space."""
        return [block for block, widths in enumerate(self.dense_widths) if space in widths]

    def inputs(self, block: int) -> dict[str, tuple[str, ...]]:
        """Return `Family.inputs` of a block: of those linear modules that its spaces lie on."""
        return inputs_of(self.spaces(block))

    def weights(self, block: int) -> list[str]:
        """Return the on-disk weights of a block's linear modules that its spaces lie on."""
        return [self.tensor(block, module) for module in linears_of(self.spaces(block))]

    def site_units(self, space: SpaceName, block: int) -> int:
        """Return the units of a site: of q and k those of every head, of other spaces as `units`."""
        return self.units(space, block) * self.copies(space)

    def copies(self, space: SpaceName) -> int:
        """Return how often the counted units stand in a site."""
        return self.family.spaces[space].copies(self.dimension)

    @property
    def expert_groups(self) -> int:
        """Groups of neighbouring experts that keep as many each; 1 if the router may send a token to any experts."""
        experts = self.family.experts
        count, sent = (1, 1) if experts is None else experts.grouping(self.config)
        return count if sent < count else 1

    def multiple(self, space: SpaceName) -> int:
        """Return what kept units must be multiples of, for the router and for the products of stock experts.

        Every group of the router keeps as many experts. Columns of experts, and spaces that share their config key, are
        multiples of `GROUPED`, unless the dense model's are not.
        """
        family, described = self.family, self.family.spaces[space]
        if described.kind == "experts" and family.experts is not None:
            return family.experts.grouping(self.config)[0]
        is_of_experts = described.experts or any(
            each.experts and self.share_width_key(name, space) for name, each in family.spaces.items()
        )
        return GROUPED if is_of_experts and not any(n % GROUPED for n in self.unit_counts(space)) else 1

    def stock_step(self, space: SpaceName) -> int:
        """Return what stock widths of a space are multiples of, where no code of its own can hold others.

        Some config classes refuse heads that do not divide the hidden size. A part of another model has no code of its
        own, and its config may state columns as so many times the width of the stream.
        """
        described = self.family.spaces[space]
        heads = described.config.get(next(iter(self.family.dimensions["query_heads"]), ""))
        if self.family.keeps_divisors and heads is not None and described.fixed is None:
            per_unit, units = product(heads, self.dimension), described.count(self.dimension)
            allowed = {count for count in range(1, units + 1) if self.dimension("hidden") % (count * per_unit) == 0}
            return next((step for step in range(1, units) if allowed.issuperset(range(step, units + 1, step))), units)
        multiple = self.family.multiples.get(described.units)
        if self.checkpoint.within is None or multiple is None or multiple.fraction or multiple.gated:
            return 1
        return self.dimension("hidden")

    def share_width_key(self, space: SpaceName, other: SpaceName) -> bool:
        """Return whether one config key says how wide both spaces are."""
        units = self.family.spaces[space].units
        return units in self.family.together and units == self.family.spaces[other].units

    def counted_as(self, space: SpaceName) -> str:
        """Return the first space, by recipes' names, that one config key gives as many units as this one."""
        return next(
            recipe_space(name) for name in self.family.spaces if name == space or self.share_width_key(name, space)
        )

    def unit_columns(self, space: SpaceName) -> int:
        """Return the columns of the consumer per unit; 1 for a space without a consumer."""
        columns = self.family.columns.get(space)
        return 1 if columns is None else columns.columns.per_unit(self.dimension)

    def consumer_columns(self, space: SpaceName, units: Tensor) -> Tensor:
        """Return the columns of a space's consumer that some units of a site lie on, int64, in the dense model."""
        described: Any = self.family.spaces[space]
        lines: Tensor = described.columns.lines(units, described.site_units(self.dimension), self.dimension)
        return lines

    def config_values(self, widths: BlockWidths) -> dict[str, Any]:
        """Return the config keys and values that state how many units of each space there are.

        A value is a number, or a list of those of all blocks.
        """
        kept = {self.family.spaces[space].units: count for space, count in widths.items()}
        # A key that two spaces share (query heads: KV groups times those of each) is the product of both widths.
        values = {
            key: count * product(factors, lambda each: kept[each] if each in kept else self.dimension(each))
            for space, count in widths.items()
            for key, factors in self.family.spaces[space].config.items()
        }
        return {key: self.family.as_listed(self.config, key, value) for key, value in values.items()}

    def with_widths(self, widths: BlockWidths) -> "Model":
        """Return this model under a config with so many units of each space; its tensors stay the dense model's."""
        config = copy.copy(self.config)
        if not self.family.attention.latent and not isinstance(getattr(type(config), "head_dim", None), property):
            # A config without it would derive it from the head count, which may change.
            set_key(config, self.family.head_key, self.dimension("head_dim"))
        for key, value in self.config_values(widths).items():
            set_key(config, key, value)
        return self.with_config(config)

    def widths_of(self, block: int, tensors: Mapping[str, Tensor]) -> dict[SpaceName, int]:
        """Return the units of each space that a block's tensors have.

        Args:
            tensors: by on-disk name, of any widths.
        """
        spaces = self.spaces(block)
        noted = tensors.get(self.widths_name(block))
        if noted is not None:
            return dict(zip(spaces, noted.tolist(), strict=True))
        values = {name: space for name, space in spaces.items() if space.kind == "values"}
        from ckpt_prune.modeling_pruned import layer_config

        # Values may be narrower than heads are wide: the block's config says so, and other spaces are counted without.
        block_config = layer_config(self.config, block) if values else self.config
        stated = {name: getattr(block_config, next(iter(space.config)), None) for name, space in values.items()}
        widths: dict[SpaceName, int] = {name: stated[name] or self.units(name, block) for name in values}
        others = {name: space for name, space in spaces.items() if name not in values}
        inside = {(axis, i.module): name for name, space in values.items() for axis, i in space.incidences}

        def lines(axis: Axis, module: str) -> int:
            size = int(tensors[self.tensor(block, module)].shape[axis_dim(axis)])
            name = inside.get((axis, module))
            return size if name is None else size // widths[name] * self.units(name, block)

        crossed = [(i.module, axis) for space in others.values() for axis, i in space.incidences]
        # Spaces with copies side by side come last, as the number of copies depends on the others.
        for name, space in sorted(others.items(), key=lambda item: item[1].for_each is not None):
            # Lines that no other space takes from, if there are any.
            uncrossed = [(axis, i) for axis, i in space.incidences if crossed.count((i.module, axis)) == 1]
            axis, incidence = (uncrossed or space.incidences)[-1]
            if self.tensor(block, incidence.module) not in tensors:
                continue  # an expert that is gone
            widths[name] = lines(axis, incidence.module) // incidence.per_unit(self.dimension)
            if space.for_each is not None:
                if space.kind == "columns" and space.wider_than is not None:
                    widths[name] //= space.copies(self.dimension)
                    continue
                outer = next((widths[other] for other, each in others.items() if each.units == space.for_each), None)
                heads = lines("columns", self.family.attention.output) // self.dimension("head_dim")
                widths[name] //= heads if outer is None else outer
        return {name: widths[name] for name in spaces if name in widths}

    def widths_name(self, block: int) -> str:
        """Return the name under which `note_widths` puts a block's widths beside its tensors."""
        return f"{self.family.block.format(block=block)}widths"

    def note_widths(self, block: int, tensors: Mapping[str, Tensor], widths: BlockWidths) -> dict[str, Tensor]:
        """Return a block's tensors, and their widths if shapes do not show them (half of the heads, or narrower heads).

        Args:
            widths: units of the spaces that are pruned.
        """
        if not any(space.kind == "values" for space in self.spaces(block).values()):
            return dict(tensors)
        counts = torch.tensor([widths.get(space, units) for space, units in self.dense_widths[block].items()])
        return {**tensors, self.widths_name(block): counts}

    @cached_property
    def tokens(self) -> int:
        """Tokens of one sample: the context length of a text model, at most 2048, or those of the config's images."""
        if self.family.modality == "audio":
            return self.dimension("positions")
        if self.family.modality == "image":
            return self.image_tokens(image_size(self.family, self.config))
        context = context_length(self.config)
        return _MOST_TOKENS if context is None else min(_MOST_TOKENS, context)

    def image_tokens(self, size: tuple[int, ...]) -> int:
        """Return the tokens of an image of `size` (height, width)."""
        return image_tokens(self.family, self.config, size)

    @property
    def uses_sliding_window(self) -> bool:
        """Whether this checkpoint's attention is windowed in fact."""
        key = self.family.sliding_window
        return key is not None and bool(getattr(self.config, key, None))

    # ---- tensors ----------------------------------------------------------------------------------------------

    def tensor(self, block: int, module: str, kind: Kind = "weight") -> str:
        """Return the on-disk name of a block's tensor."""
        return self.family.tensor(block, module, kind)

    def has(self, module: str, kind: Literal["weight", "bias"] = "weight") -> bool:
        """Return whether some block has such a tensor."""
        return any(self.tensor(block, module, kind) in self.checkpoint.tensors for block in range(self.blocks))

    @cached_property
    def biased(self) -> frozenset[str]:
        """Linear modules that have a bias in some block, but those of experts, which get none."""
        modules = self.family.expert_modules
        return frozenset(each for each in self.family.linears if each not in modules and self.has(each, "bias"))

    @cached_property
    def _expert_tensors(self) -> dict[str, int]:
        experts = self.family.experts
        return {
            f"{self.family.block.format(block=block)}{module}.{kind}": expert
            for block in range(self.blocks)
            for module, (expert, _) in self.family.expert_modules.items()
            for kind in (experts.kinds if experts else ())
        }

    def expert_of(self, weight: str) -> int | None:
        """Return the expert that a weight on disk belongs to; None if it is of no single one."""
        return self._expert_tensors.get(weight)

    def block_names(self, block: int) -> list[str]:
        """Return the on-disk names of a block's tensors."""
        return self._names_of_blocks[block]

    @cached_property
    def _names_of_blocks(self) -> list[list[str]]:
        """On-disk names by block, told apart in one pass: models of many experts have 70,000."""
        names = [list[str]() for _ in range(self.blocks)]
        for name in self.checkpoint.tensors:
            block = self._block_of(name)
            if block is not None:
                names[block].append(name)
        return names

    def inside(self, block: int, names: Iterable[str]) -> list[str]:
        """Return those of some on-disk names that are of a block."""
        return [name for name in names if self._block_of(name) == block]

    def read_block(self, block: int) -> dict[str, Tensor]:
        return self.checkpoint.read(self.block_names(block))

    def outside(self, names: Iterable[str] | None = None) -> list[str]:
        """Return those of some on-disk names, by default all, that are of no block: embeddings, norms, heads."""
        names = self.checkpoint.tensors if names is None else names
        return [name for name in names if self._block_of(name) is None]

    def _block_of(self, name: str) -> int | None:
        """Return the block that an on-disk name is of, None if of none; what pools behind the last one is its own."""
        pattern, behind = self._beginnings
        place = pattern.match(name)
        if place is None:
            return self.blocks - 1 if name.startswith(behind) else None
        return int(place[1]) if int(place[1]) < self.blocks else None

    @cached_property
    def _beginnings(self) -> tuple[re.Pattern[str], tuple[str, ...]]:
        """The pattern that names of a block's tensors begin with, and prefixes of what pools behind the last block."""
        before, after = map(re.escape, self.family.block.split("{block}"))
        behind = tuple(f"{self.tensor(self.blocks - 1, module, 'itself')}." for module in self._pooling_modules)
        return re.compile(rf"{before}(\d+){after}"), behind

    @cached_property
    def _pooling_modules(self) -> frozenset[str]:
        """Linear modules outside the blocks that some space lies on."""
        return frozenset(module for space in self.family.pooling.values() for module in space.modules)

    @property
    def shapes(self) -> dict[str, TensorSpec]:
        """Name → dtype and shape of every tensor."""
        return {name: (info.dtype, info.shape) for name, info in self.checkpoint.tensors.items()}

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """`shapes` without buffers that models compute themselves."""
        return {name: shape for name, shape in self.shapes.items() if not is_stored_buffer(name)}

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding: its class can tie them, and the config says so."""
        if not self.checkpoint.by_class:
            return bool(tied_by_description(self.checkpoint, self.family))
        keys = getattr(stock_class(self.family.architecture, self.config), "_tied_weights_keys", None)
        return bool(keys and getattr(self.config, "tie_word_embeddings", False))

    @property
    def has_remote_code(self) -> bool:
        """Whether this is an output that no stock class can load: blocks may differ, and its config asks for code."""
        return bool(self.checkpoint.config.get("auto_map"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the checkpoint's bytes."""
        return self.checkpoint.dtype

    @property
    def reader_fingerprint(self) -> str | None:
        """Fingerprint of what turns data into the model's input: the tokenizer, or the image processor."""
        text = self.family.reads_tokens
        if self.checkpoint.adapter is None:
            return (tokenizer_fingerprint if text else processor_fingerprint)(self.checkpoint.path)
        files = reader_files(self.checkpoint)
        names = TOKENIZER_FILES if text else PROCESSORS
        return fingerprint_files({name: files[name] for name in names if name in files})

    # ---- cuts -------------------------------------------------------------------------------------------------

    def remaining_lines(self, kept: KeptUnits) -> RemainingLines:
        """Return what remains of a block's linear modules and tables if these units stay (`cuts.remaining_lines`)."""
        sizes: dict[str, tuple[int, ...]] = {}
        for name in kept:
            space = self.family.spaces[name]
            for module in {*space.modules, *(table.module for table in space.tables)}:
                sizes[module] = self._shape(module, self.blocks_with(name))
        return remaining_lines(self.family, self.dimension, kept, sizes)

    def shapes_at(self, widths: Sequence[BlockWidths]) -> dict[str, TensorSpec]:
        """Return name → dtype and shape of every tensor if blocks keep so many units, before any bias is added.

        Args:
            widths: of every block; a space that is left out stays whole.
        """
        shapes = self.shapes
        by_widths: dict[tuple[tuple[SpaceName, int], ...], RemainingLines] = {}
        for block, units in enumerate(widths):
            key = tuple(units.items())
            if key not in by_widths:
                first = {space: self.family.spaces[space].first(count, self.dimension) for space, count in key}
                by_widths[key] = self.remaining_lines(first)
            for module, kind, dim, lines in list_cuts(by_widths[key]):
                name = self.tensor(block, module, kind)
                if name in shapes:
                    dtype, shape = shapes[name]
                    shapes[name] = dtype, (*shape[:dim], len(lines), *shape[dim + 1 :])
            for space, rotary in self.family.rotary_spaces.items():
                if space in units and units[space] < self.units(space, block):
                    heads = next((n for s, n in units.items() if self.family.spaces[s].units == rotary.for_each), None)
                    shapes[self.pairs_name(block)] = torch.int16, (units[space] * (heads or self.copies(space)),)
            for space in self.family.expert_spaces.keys() & units.keys():
                prefix = self.family.block.format(block=block)
                for name, expert in self._expert_tensors.items():
                    if expert >= units[space] and name.startswith(prefix):
                        shapes.pop(name, None)
        return shapes

    def pairs_name(self, block: int) -> str:
        """Return the on-disk name of the tensor that says which rotary pairs a pruned block keeps."""
        owner = self.family.attention.query.rpartition(".")[0]
        return f"{self.family.block.format(block=block)}{owner}.{PAIRS}"

    def kept_pairs(self, kept: KeptUnits) -> Tensor | None:
        """Return that tensor: the pairs of the first KV head that stays, then those of the next.

        Args:
            kept: spaces of a block that are pruned.

        Returns:
            int16; None if no pair is gone.
        """
        for name, space in self.family.rotary_spaces.items():
            if name in kept:
                pairs, count = kept[name], space.count(self.dimension)
                for other, units in kept.items():
                    if self.family.spaces[other].units == space.for_each:
                        pairs = pairs[torch.isin(pairs // count, units)]
                return (pairs % count).to(torch.int16)
        return None

    def map_experts(self, block: int, kept: KeptUnits, rewritten: Set[str] = frozenset()) -> dict[str, str]:
        """Return weights of the experts that stay when others go: new name on disk → the dense model's name.

        Args:
            kept: units that stay, of every space that is pruned.
            rewritten: linear modules of an expert that are left out.
        """
        stay = next((kept[space].tolist() for space in self.family.expert_spaces if space in kept), [])
        experts = self.family.experts
        if experts is None:
            return {}
        prefix = self.family.block.format(block=block)
        return {
            f"{prefix}{module.format(expert=new)}.{kind}": f"{prefix}{module.format(expert=old)}.{kind}"
            for module in experts.roles
            for kind in experts.kinds
            for new, old in enumerate(stay)
            if module not in rewritten and f"{prefix}{module.format(expert=old)}.{kind}" in self.checkpoint.tensors
        }

    def drop_experts(self, block: int, tensors: Mapping[str, Tensor], kept: KeptUnits) -> dict[str, Tensor]:
        """Return a block's tensors without those of experts that go; the others are numbered anew."""
        moved = self.map_experts(block, kept)
        if not moved:
            return dict(tensors)
        others = {name: tensor for name, tensor in tensors.items() if name not in self._expert_tensors}
        return others | {name: tensors[before] for name, before in moved.items()}

    def line_numbers(self, block: int, module: str, dim: int) -> Tensor:
        """Return the numbers of all rows (dim 0) or columns of a linear module's dense weight."""
        return torch.arange(self._shape(module, [block])[dim])

    def _shape(self, module: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Shape of a linear module's dense weight, or of a table, in the first of these blocks that has it."""
        tensors, kinds = self.checkpoint.tensors, get_args(Kind)
        names = (self.tensor(block, module, kind) for block in blocks for kind in kinds)
        return next(tensors[name].shape for name in names if name in tensors)

    def unit_weights(self, space: SpaceName) -> int:
        """Return how many weights, without biases, go with one unit of a space."""
        described, blocks = self.family.spaces[space], self.blocks_with(space)
        lines = sum(
            incidence.per_unit(self.dimension) * self._shape(incidence.module, blocks)[1 - axis_dim(axis)]
            for axis, incidence in described.incidences
        )
        for table in described.tables:
            shape = self._shape(table.module, blocks)
            lines += table.per_unit(self.dimension) * prod(shape) // shape[table.table_dim(len(shape))]
        return lines

    # ---- names in statistics ----------------------------------------------------------------------------------

    def moments_name(self, block: int, key: str) -> str:
        """Return the name under which statistics file the moments of a space or a linear module.

        A space, and a linear module that is a consumer, have the weight's name of `Space.measured`; a space within
        another shares the other's. Any other linear module has its own with a suffix: the bare name of the queries'
        weight stands for the moments of queries.
        """
        consumers = {space.consumer for space in self.family.consumers.values()}
        for name, space in self.family.spaces.items():
            if key == name or (key == space.measured and key in consumers):
                return self.tensor(block, space.measured)
        return self.tensor(block, key) + _INPUT

    def site_name(self, block: int, space: SpaceName) -> str:
        """Return the name of a site's effects in statistics: as its moments, with a suffix if it is within another."""
        name = self.moments_name(block, space)
        return name if space not in self.family.columns or space in self.family.consumers else f"{name}/{space}"

    @property
    def consumer_widths(self) -> dict[str, Width]:
        """Consumer's on-disk weight, with `{block}` for the block → its width."""
        widths: dict[str, Width] = {}
        pooling, of_weights = self.family.pooling, defaultdict[str, dict[int, int]](dict)
        for name, space in {**self.family.consumers, **pooling}.items():
            counts = of_weights[self.consumer_weight(name)]
            counts |= {
                block: self.site_units(name, block) * self.unit_columns(name) for block in self.blocks_with(name)
            }
            if self.has_remote_code:
                names = {block: self.tensor(block, space.consumer) for block in counts}
                counts = {block: self.checkpoint.tensors[each].shape[1] for block, each in names.items()}
            columns: Width = [counts.get(block, 0) for block in range(self.blocks)]
            if len(set(counts.values())) == 1 and name not in pooling:
                columns = max(counts.values())
            widths[self.consumer_weight(name)] = columns
        return widths

    def consumer_weight(self, space: SpaceName) -> str:
        """Return the on-disk weight of a consumer, with `{block}` for the block."""
        pooling = self.family.pooling.get(space)
        if pooling is not None:
            return self.tensor(0, pooling.consumer)
        return f"{self.family.block}{self.family.columns[space].consumer}.weight"

    @property
    def widest_consumer(self) -> int:
        """The width of the widest consumer of any block; 0 if there is none."""
        return max((w if isinstance(w, int) else max(w) for w in self.consumer_widths.values()), default=0)

    @property
    def linear_widths(self) -> dict[str, int]:
        """`moments_name` with `{block}`, of the first linear that reads each input of hidden size → that size."""
        hidden = self.dimension("hidden")
        return {f"{self.family.block}{first}.weight{_INPUT}": hidden for first in self.family.producer_inputs}

    @property
    def router_experts(self) -> dict[str, int]:
        """Router's on-disk weight, with `{block}` for the block → experts."""
        routers = self.family.expert_spaces.items()
        return {
            f"{self.family.block}{space.measured}.weight": self.family.spaces[name].count(self.dimension)
            for name, space in routers
        }

    @property
    def query_heads(self) -> dict[str, tuple[int, int]]:
        """Query's on-disk weight, with `{block}` → heads and their width; empty if logits cannot be pruned."""
        return {
            f"{self.family.block}{space.measured}.weight": (space.copies(self.dimension), space.count(self.dimension))
            for space in self.family.logits.values()
        }

    @property
    def turned_heads(self) -> dict[str, tuple[int, int]]:
        """Query's on-disk weight, with `{block}` → query heads and pairs of each; empty if pairs cannot be pruned."""
        return {
            f"{self.family.block}{space.measured}.weight": (self.dimension("query_heads"), space.count(self.dimension))
            for space in self.family.rotary_spaces.values()
        }
