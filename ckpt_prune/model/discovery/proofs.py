"""Three proofs that a space is one, on a twin's tensors as its files hold them, by the incidences of its description.

1. Its units in another order, in every tensor that has them, change no output. Where blocks hand on more than hidden
   states, this holds also if it is done in one block alone, unless all blocks are to keep the same units.
2. In another order in any one of these tensors alone they do: none is named idly. Where all blocks are to keep the same
   units, so they do in any one block alone.
3. The stock class with fewer units computes what it computes with those units set to zero. Where one config key states
   the width of two stacks of blocks, that is its linear modules with fewer.

Whole experts have no third proof: a router gives their share to others. The class must load with fewer.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.model.cuts import list_cuts, remaining_lines
from ckpt_prune.model.discovery.twin import Twin, make_skeleton_config, run
from ckpt_prune.model.family import Family
from ckpt_prune.model.family_keys import SpaceProof
from ckpt_prune.model.nested_keys import find_key, with_keys
from ckpt_prune.model.skeleton import Names, stock_class
from ckpt_prune.model.spaces import AnySpace, Axis, Incidence, Kind, expert_of, first_expert_spaces, product

SAME = 2e-4
"""Outputs are the same if no number differs by more of the largest: a sum in another order, in float32."""
_FEWER = 8
"""Columns that the third proof takes away, so that experts stay a multiple of eight wide."""

State = dict[str, Tensor]


class StatedElsewhereError(UserError):
    """A config key states the width of a space, and of a module outside the blocks."""


class Prover:
    """Proves the spaces of a family on a twin of its class.

    Args:
        family: of the twin's config, with its spaces.
    """

    def __init__(self, family: Family, twin: Twin) -> None:
        self.family, self.twin = family.of(twin.architecture).with_config(twin.parsed), twin
        self.class_: Any = stock_class(twin.architecture, twin.parsed)
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(twin.model, dict(twin.model.state_dict()))
        self.state = self._split({name: tensor.detach().clone() for name, tensor in saved.items()})
        self.dense = twin.outputs()
        self.blocks = range(self.dimension("layers"))
        self._stored = self._joined(self.state)

    def dimension(self, name: str) -> int:
        return self.family.dimension(self.twin.parsed, name)

    @cached_property
    def _own(self) -> State:
        """The twin's own tensors by their names on disk, as far as its class stores them as they are."""
        names, tensors, own = Names(self.twin.model), self.twin.model.state_dict(), dict[str, Tensor]()
        for name, stored in self._stored.items():
            held = [tensors[each] for each in names.parameters(name)]
            if len(held) == 1 and torch.equal(held[0], stored):
                own[name] = held[0]
        return own

    def prove(self, name: str) -> SpaceProof:
        """Prove a space, by the name that recipes have for it; of experts' columns that of one that sees tokens."""
        spaces = self.family.spaces
        own = [each for each in spaces if expert_of(each) is not None and each.startswith(f"{name}.")] or [name]
        together = alone = False
        for each in own:
            space = spaces[each]
            together, each_block = self._is_dense(self._permuted(each)), self._blocks_with(each)
            if together and self.family.passes_on and not space.same_units:
                together = all(self._is_dense(self._permuted(each, blocks=[block])) for block in each_block)
            modules = list(dict.fromkeys([*space.modules, *(table.module for table in space.tables)]))
            alone = together and not any(self._is_dense(self._permuted(each, module)) for module in modules)
            if alone and space.same_units:
                alone = not any(self._is_dense(self._permuted(each, blocks=[block])) for block in each_block)
            if alone or not together:
                break
        fewer = self._fewer(name) if together and alone else None
        return SpaceProof(together=together, alone=alone, fewer=fewer)

    # ---- tensors -------------------------------------------------------------------------------------------------

    def _split(self, state: State) -> State:
        """Return tensors as descriptions name them: stacks of experts apart, and weights as (outputs, inputs)."""
        experts = self.family.experts
        for name, tensor in list(state.items()):
            for stack, (part,) in ({} if experts is None else experts.stacks).items():
                if name.endswith(f".{stack}"):
                    prefix = name.removesuffix(stack)
                    del state[name]
                    for number, own in enumerate(self._turned(part, tensor)):
                        state[f"{prefix}{part.format(expert=number)}"] = own
            if name.removesuffix(".weight").endswith(tuple(f".{each}" for each in self.family.transposed)):
                state[name] = tensor.T
        return state

    def _joined(self, state: Mapping[str, Tensor]) -> State:
        """Undo `_split`."""
        joined = dict(state)
        experts = self.family.experts
        for stack, (part,) in ({} if experts is None else experts.stacks).items():
            for block in self.blocks:
                prefix = self.family.block.format(block=block)
                count = self.dimension(experts.count if experts else "")
                names = [f"{prefix}{part.format(expert=number)}" for number in range(count)]
                present = [joined.pop(name) for name in names if name in joined]
                if present:
                    joined[f"{prefix}{stack}"] = self._turned(part, torch.stack(present)).contiguous()
        for name, tensor in joined.items():
            if name.removesuffix(".weight").endswith(tuple(f".{each}" for each in self.family.transposed)):
                joined[name] = tensor.T.contiguous()
        return joined

    @property
    def _kinds(self) -> tuple[str, ...]:
        return () if self.family.experts is None else self.family.experts.kinds

    def _of_expert(self, block: int, module: str, expert: int, kind: str) -> str:
        return f"{self.family.block.format(block=block)}{module.format(expert=expert)}.{kind}"

    def _turned(self, part: str, stack: Tensor) -> Tensor:
        experts = self.family.experts
        return stack.mT if experts is not None and experts.transposed and part.endswith(".weight") else stack

    @torch.no_grad()
    def _outputs(
        self, state: Mapping[str, Tensor], config: Any = None, *, narrow: Mapping[str, int] | None = None
    ) -> Tensor:
        """Return what the stock class computes with these tensors; UserError if it does not load them all.

        Args:
            narrow: its linear modules take the shapes of the tensors, as remote code makes them, whatever its config,
                and these numbers of modules (`Space.attributes`) are others.
        """
        parsed = make_skeleton_config(self.twin.config if config is None else config)
        joined = self._joined(state)
        if narrow is not None:
            return self._narrow_outputs(joined, parsed, narrow)
        if config is None and joined.keys() == self._stored.keys():
            changed = {name: each for name, each in joined.items() if not torch.equal(each, self._stored[name])}
            if changed.keys() <= self._own.keys():  # to build another model would take most of the time
                for name, tensor in changed.items():
                    self._own[name].copy_(tensor)
                outputs = self.twin.outputs()
                for name in changed:
                    self._own[name].copy_(self._stored[name])
                return outputs
        try:
            model, found = self.class_.from_pretrained(
                None,
                config=parsed,
                state_dict={name: tensor.clone() for name, tensor in joined.items()},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                dtype=torch.float32,
            )
        except (ValueError, RuntimeError) as error:
            raise UserError(one_line(error)) from error
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found[kind]:
                names = [each if isinstance(each, str) else each[0] for each in found[kind]]
                outside = [each for each in names if not each.startswith(f"{self.family.layers}.")]
                if config is not None and outside and kind == "mismatched_keys":
                    module = min(outside).rpartition(".")[0]
                    raise StatedElsewhereError(f"its config key also states a width of {module}, outside the blocks")
                first = min(names)
                raise UserError(f"{kind.replace('_', ' ')}, such as {first}")
        return run(model.eval(), self.twin.batch)

    def _narrow_outputs(self, state: Mapping[str, Tensor], parsed: Any, numbers: Mapping[str, int]) -> Tensor:
        names, model = Names(self.class_(parsed)), self.class_(parsed).float()
        for disk, tensor in state.items():
            for parameter in names.parameters(disk):  # one: fused tensors are of spaces that are not fixed
                owner, _, attribute = parameter.rpartition(".")
                module: Any = model.get_submodule(owner)
                getattr(module, attribute).data = tensor
                if hasattr(module, "nf"):  # Conv1D
                    module.nf = tensor.shape[-1]
        for path, number in numbers.items():
            owner, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(owner), attribute, number)
        return run(model.eval(), self.twin.batch)

    def _is_dense(self, state: Mapping[str, Tensor]) -> bool:
        return is_same(self._outputs(state), self.dense)

    # ---- units ---------------------------------------------------------------------------------------------------

    def _order(self, space: AnySpace) -> Tensor:
        """Return units of a site in another order: each copy's own, moved on by one."""
        count, copies = space.count(self.dimension), space.copies(self.dimension)
        return (torch.arange(copies)[:, None] * count + torch.roll(torch.arange(count), 1)).flatten()

    def _permuted(self, name: str, only: str | None = None, blocks: Sequence[int] | None = None) -> State:
        """Return the tensors with units of a space in another order, in all modules or one, in all blocks or some."""
        space, state = self.family.spaces[name], dict(self.state)
        order, blocks = self._order(space), self._blocks_with(name) if blocks is None else blocks
        for axis, incidence in [*space.incidences, *(("table", table) for table in space.tables)]:
            if only in (None, incidence.module):
                self._each_tensor(state, axis, incidence, order, blocks)
        if space.kind == "experts" and only is None:
            for block in blocks:
                for module in self.family.experts.roles if self.family.experts else ():
                    for kind in self._kinds:
                        for new, old in enumerate(order.tolist()):
                            tensor = self.state.get(self._of_expert(block, module, old, kind))
                            if tensor is not None:
                                state[self._of_expert(block, module, new, kind)] = tensor
        return state

    def _blocks_with(self, name: str) -> list[int]:
        """Return the blocks that have every linear module of a space."""
        space = self.family.spaces[name]
        if name in self.family.pooling:
            return [self.blocks[-1]]  # which it is a site of
        names = [[self.family.tensor(block, module) for module in space.modules] for block in self.blocks]
        present = [block for block, own in zip(self.blocks, names, strict=True) if self.state.keys() >= set(own)]
        if name in self.family.columns:
            consumer, parsed = self.family.columns[name].consumer, self.twin.parsed
            columns = {block: self.state[self.family.tensor(block, consumer)].shape[1] for block in present}
            present = [block for block in present if self.family.fits(parsed, name, columns[block])]
        return [block for block in present if not self.family.lacks(self.twin.parsed, block, space)]

    def _each_tensor(
        self, state: State, axis: Axis, incidence: Incidence, order: Tensor, blocks: Sequence[int]
    ) -> None:
        """Put the units on one axis of a module of these blocks in another order, in place of the state's tensors."""
        count = len(order)
        lines = torch.stack([incidence.lines(torch.tensor([unit]), count, self.dimension) for unit in range(count)])
        moved = lines[order]
        for block in blocks:
            for kind in get_args(Kind):
                name = self.family.tensor(block, incidence.module, kind)
                if name not in state or (kind == "bias" and axis == "columns"):
                    continue
                tensor = state[name]
                dim = (
                    0
                    if kind == "bias"
                    else incidence.table_dim(tensor.dim())
                    if axis == "table"
                    else int(axis != "rows")
                )
                index = torch.arange(tensor.shape[dim])
                index[lines.flatten()] = moved.flatten()
                state[name] = tensor.index_select(dim, index)

    # ---- fewer units ---------------------------------------------------------------------------------------------

    def _fewer(self, name: str) -> bool | None:
        """Compare the class with fewer units with the wide one, whose last units are zero."""
        spaces = self.family.spaces
        space = spaces[first_expert_spaces(spaces)[name]]
        count = space.count(self.dimension)
        multiple = self.family.multiples.get(space.units)
        step = _FEWER if multiple is None or multiple.fraction else self.dimension("hidden")
        choices: Sequence[int] = [count - step] if count > 2 * _FEWER else range(count - 1, 0, -1)
        refused: UserError | None = None
        for kept in choices:
            try:
                return self._compare(name, space, count, kept)
            except UserError as error:  # some classes take heads only that divide the hidden size
                refused = error
        if refused is not None:
            raise refused
        return None

    def _compare(self, name: str, space: AnySpace, count: int, kept: int) -> bool | None:
        spaces = self.family.spaces
        named = [
            each for each in spaces if each == name or (expert_of(each) is not None and each.startswith(f"{name}."))
        ]
        if space.units in self.family.together:
            named += [each for each, own in spaces.items() if own.units == space.units and each not in named]
        narrow = space.fixed is not None or self.family.shares_width(space)
        config = None if narrow else with_keys(self.twin.config, self._values(space, kept))
        cut, zeroed = dict(self.state), dict(self.state)
        by_spaces: dict[tuple[str, ...], list[int]] = {}
        blocks_with = {each: self._blocks_with(each) for each in named}
        for block in self.blocks:
            by_spaces.setdefault(tuple(each for each in named if block in blocks_with[each]), []).append(block)
        for own, blocks in by_spaces.items():
            for module, kind, dim, lines in self._list_cuts(own, kept, blocks):
                for block in blocks:
                    tensor_name = self.family.tensor(block, module, kind)
                    if tensor_name in cut:
                        tensor = cut[tensor_name]
                        mask = torch.zeros(tensor.shape[dim])
                        mask[lines] = 1
                        cut[tensor_name] = tensor.index_select(dim, lines)
                        shape = [-1 if each == dim else 1 for each in range(tensor.dim())]
                        zeroed[tensor_name] = zeroed[tensor_name] * mask.view(shape)
        if space.kind == "experts":
            experts = self.family.experts
            gone = {
                self._of_expert(block, module, number, kind)
                for block in self.blocks
                for module in (experts.roles if experts else ())
                for number in range(kept, count)
                for kind in self._kinds
            }
            self._outputs({each: tensor for each, tensor in cut.items() if each not in gone}, config)
            return None
        numbers = {
            f"{self.family.layers}.{block}.{path}": kept * product(factors, self.dimension)
            for each in named
            for path, factors in spaces[each].attributes.items()
            for block in blocks_with[each]
        }
        return is_same(self._outputs(cut, config, narrow=numbers if narrow else None), self._outputs(zeroed))

    def _list_cuts(
        self, names: Sequence[str], kept: int, blocks: Sequence[int]
    ) -> Iterable[tuple[str, Kind, int, Tensor]]:
        """List the tensors of blocks with these spaces that lose lines if the first units stay (`cuts.list_cuts`)."""
        spaces = {name: self.family.spaces[name] for name in names}
        shapes = {}
        for module in {each for own in spaces.values() for each in [*own.modules, *(t.module for t in own.tables)]}:
            weights = (self.state.get(self.family.tensor(b, module, k)) for b in blocks for k in ("weight", "itself"))
            shapes[module] = next(tuple(each.shape) for each in weights if each is not None)
        first = {name: space.first(kept, self.dimension) for name, space in spaces.items()}
        return list_cuts(remaining_lines(self.family, self.dimension, first, shapes))

    def _values(self, space: AnySpace, kept: int) -> dict[str, Any]:
        if space.units in self.family.multiples:
            multiple = self.family.multiples[space.units]
            return multiple.values(self.twin.parsed, self.family.stage, multiple.ratio(self.dimension("hidden"), kept))
        values = {key: kept * product(factors, self.dimension) for key, factors in space.config.items()}
        if find_key(self.twin.config, self.family.head_key) is not None and self.family.dimensions["head_dim"]:
            values[self.family.head_key] = self.dimension("head_dim")
        return {key: self.family.as_listed(self.twin.parsed, key, value) for key, value in values.items()}


def is_same(outputs: Tensor, others: Tensor) -> bool:
    """Return whether two models' outputs are the same but for the order of their sums."""
    return bool((outputs - others).abs().max() <= SAME * others.abs().max().clamp_min(1.0))
