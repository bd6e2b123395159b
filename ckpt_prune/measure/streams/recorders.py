"""Recorders in place of a model's blocks: what it hands each of them, and how it goes on with what they return.

A block needs no code of its own to be run alone. What the stock model passes it beside hidden states (masks, positions,
inputs made for every block) is kept while the model runs with recorders, and passed again when the block runs.
"""

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.streams.state_memory import Allocate
from ckpt_prune.model.spaces import SpaceName

Rows = slice | Tensor | list[int]
"""Numbers of samples."""
RESULTS = (0, 2, 3)
"""How many things a block may return, the first of them hidden states; 0 if it returns these alone."""


@dataclass(frozen=True)
class Carried:
    """Stands for one of the results of the block before: tokens that it has chosen, what its router has seen."""

    place: int


class Handed(NamedTuple):
    """The arguments of a block's call, without the hidden states.

    `added` is what the model adds to these before the block, in their shape: features of images, from one depth of the
    tower for each block (DeepStack, Meng et al. 2024). None if it adds nothing.
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    added: Tensor | None = None


class ByWidth(NamedTuple):
    """A result of the first block that later blocks get as an argument, in two widths.

    Attributes:
        space: the space whose units it has an axis for.
        dense, narrow: for a block with all units, and for one with fewer.
    """

    space: SpaceName
    dense: Tensor
    narrow: Tensor


class _OtherResultsError(Exception):
    """Raised if the model does not go on with the hidden states that a recorder returned."""


class Recorders:
    """Stand-ins for all blocks of a model, which hand on the hidden states that they are passed.

    Args:
        layers: the blocks, whose `forward` is replaced.
        outside: modules outside the blocks. The first of them to run behind the last block tells what it was passed.
        name: of the model, for messages.
        adds: whether the model may add to hidden states between blocks. Recorders then return zeros, so that what the
            next one is passed is what was added, to the bit.
        first: computes what the first block returns, of hidden states and its arguments, where the others are passed
            more than recorders know: what it returns beside hidden states (T5's relative positions), or hidden states
            of another shape (Hiera's stages). None elsewhere.

    Attributes:
        results: how many things the model takes a block to return (`RESULTS`); None before a model has run.
        handed: what each block was passed in the last run.
        entering: the hidden states that the first block was passed in it.
        others: what `first` computed in it beside hidden states.
        leave: turns the hidden states that the last block was passed into those that it returns.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        outside: Iterable[nn.Module],
        name: str,
        *,
        adds: bool = False,
        first: Callable[[Tensor, Handed], tuple[Any, ...]] | None = None,
    ) -> None:
        self.results: int | None = None
        self.handed: list[Handed] = []
        self.leave: Callable[[Tensor], Tensor] = lambda states: states
        self._name, self._count, self._states, self._adds = name, len(layers), torch.empty(0), adds
        self._outside, self._base, self._carries = list(outside), 0.0, True
        self._first, self.others = first, list[Any]()
        self._changed = (
            f"blocks of {name} cannot run one by one: something changes the hidden states between them, or they return "
            "more than the model names"
        )
        for index, layer in enumerate(layers):
            layer.forward = self._recorder(index)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call the model, and return what it returns.

        UserError if blocks do not run one after the other, once each, on what the one before them returned.
        """
        try:
            if self.results is not None:
                return self._call(call)
            result = self._find_results(call)
            if any(handed.added is not None for handed in self.handed):
                self._check_sums(call)
            return result
        finally:
            self._states = torch.empty(0)

    def _call(self, call: Callable[[], Any]) -> Any:
        self.handed.clear()
        return call()

    def _find_results(self, call: Callable[[], Any]) -> Any:
        for self._carries, results in product((True, False), RESULTS):
            self.results = results
            try:
                return self._check_end(call) if self._count == 1 else self._call(call)
            except _OtherResultsError:
                self.results = None
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                self.results = None
                if not self._carries and len(self.handed) in (0, self._count) and self._count > 1:
                    raise  # it comes of no block's results
        raise UserError(self._changed)

    def _check_sums(self, call: Callable[[], Any]) -> None:
        """Refuse a model that does more between blocks than add: another number has to come out as the same sum."""
        zero = [handed.added for handed in self.handed]
        self._base = 1.0
        self._call(call)
        self._base = 0.0
        for before, handed in zip(zero, self.handed, strict=True):
            if (before is None) != (handed.added is None) or (
                before is not None and handed.added is not None and not torch.equal(before + 1, handed.added)
            ):
                raise UserError(self._changed)
        self._call(call)

    def _recorder(self, index: int) -> Callable[..., Any]:
        # The model holds this function: if that held all of this, what it holds would stay when it is done with, until
        # Python's collector comes by.
        recorders = weakref.ref(self)

        def record(hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
            current = recorders()
            assert current is not None
            return current._take(index, hidden_states, Handed(arguments, options))

        return record

    def _take(self, index: int, states: Tensor, handed: Handed) -> Any:
        """Keep what a block was passed, and return what it would."""
        due = len(self.handed)
        if index != due:
            raise UserError(
                f"blocks of {self._name} cannot run one by one: block {index} runs where block {due} is due"
            )
        if index == 0:
            self.entering = states
            if self._first is not None:
                states, *self.others = self._first(states, handed)
        elif not _is_view_of(states, self._states):
            if not self._adds or states.shape != self._states.shape:
                raise _OtherResultsError
            handed = handed._replace(added=states)
        self.handed.append(handed)
        states = torch.full_like(states, self._base) if self._adds else states
        self._states = states if index < self._count - 1 else self.leave(states)
        others: Sequence[Any] = self.others
        others = others or [Carried(place) if self._carries else None for place in range(1, self.results or 1)]
        return (self._states, *others) if self.results else self._states

    def _check_end(self, call: Callable[[], Any]) -> Any:
        """Call a model of one block: what is behind it must be passed its hidden states, not the first sample's."""
        begun = False

        def check(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
            nonlocal begun
            given = arguments[0] if arguments else None
            # Tokens are no states: behind an encoder its decoder looks them up.
            if self.handed and not begun and isinstance(given, Tensor) and given.is_floating_point():
                begun = True
                if given.dim() != self._states.dim():
                    raise _OtherResultsError

        hooks = [module.register_forward_pre_hook(check) for module in self._outside]
        try:
            return self._call(call)
        finally:
            for hook in hooks:
                hook.remove()


Shared = Mapping[Any, tuple[Tensor, ...]]
"""A copy of the mapping that all blocks are passed: earlier blocks put keys and values there for later ones."""


class HandedAlone:
    """The arguments of all blocks' calls for samples that are entered, and run, one by one (`HandedArguments`).

    What blocks share is kept once for a sample, and once for all samples whose numbers are the same. The arguments are
    those of `HandedArguments`.

    Attributes:
        shapes: of hidden states that enter the first block, by the number of the sample, where these have as many
            tokens as it needs, in an axis or two: images of several sizes, or in tiles. They are run without padding.
    """

    def __init__(self, allocate: Allocate, name: str, *, shares: bool = False) -> None:
        self._allocate, self._name, self._shares = allocate, name, shares
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.axis = 0
        """That of samples in hidden states: several streams side by side may stand before it (Gemma 3n)."""
        self._of: dict[int, list[Handed]] = {}
        self._known: dict[tuple[Any, ...], Tensor] = {}
        self._shared: dict[int, dict[Any, tuple[Tensor, ...]]] = defaultdict(dict)  # of each sample

    def tokens(self, number: int) -> int:
        """Return how many tokens a sample of `shapes` has."""
        return prod(self.shapes[number][:-1])

    def counted(self, number: int) -> Tensor | None:
        """Return which tokens of a sample of `shapes` others may attend to, in that shape; None for all.

        No token attends to padding, which is there where a processor makes all images as long as the longest may be.
        """
        handed = self._of[number][0]
        given = (each for each in (handed.options.get("attention_mask"), *handed.arguments) if isinstance(each, Tensor))
        mask = next((each for each in given if each.dim() == 4), None)
        if mask is None:
            return None
        allowed = mask if mask.dtype == torch.bool else mask == 0
        counted = allowed.any(-2).any(1).expand(self.shapes[number][0], -1)
        return None if bool(counted.all()) or counted.shape != self.shapes[number][:-1] else counted

    def keep(self, rows: slice, handed: Sequence[Handed]) -> None:
        """Keep what blocks were passed with one sample."""
        kept: dict[int, Tensor] = {}

        def keep(value: Any) -> Any:
            if isinstance(value, Carried):
                raise UserError(
                    f"blocks of {self._name} cannot run one by one for samples of several lengths: they read more than "
                    "hidden states of those before them"
                )
            if not isinstance(value, Tensor):
                return value
            if id(value) not in kept:
                numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                known = tuple(value.shape), value.dtype, hashlib.sha256(numbers).digest()
                if known not in self._known:
                    self._known[known] = self._allocate(tuple(value.shape), value.dtype).copy_(value)
                kept[id(value)] = self._known[known]
            return kept[id(value)]

        self._of[rows.start] = [_replace(own, map(keep, _leaves(own))) for own in handed]

    def call(self, module: nn.Module, block: int, states: Tensor, rows: Rows, count: int) -> Tensor:
        """Run a block on the hidden states of samples, and return those that it makes."""
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else [int(row) for row in rows]
        assert len(numbers) == count
        outputs = []
        for number, one in zip(numbers, torch.split(states, 1, self.axis), strict=True):
            handed = self._of[number][block]
            leaves = (leaf.to(states.device) if isinstance(leaf, Tensor) else leaf for leaf in _leaves(handed))
            keep = partial(self._share, number) if self._shares else None
            known, shape = {**self._shared[number]}, self.shapes.get(number)
            entering = one if shape is None else one[0, : self.tokens(number)].view(shape)
            leaving = _run(module, block, _replace(handed, leaves), entering, self._name, known, keep)[0]
            outputs.append(leaving if shape is None else pad_tokens(leaving.flatten(0, -2)[None], one.shape[1]))
        return torch.cat(outputs, self.axis)

    def _share(self, number: int, made: Shared) -> None:
        self._shared[number] |= {key: tuple(each.detach() for each in values) for key, values in made.items()}


class HandedArguments:
    """The arguments of all blocks' calls for all samples, without the hidden states.

    Most of it depends on the number of samples in a batch alone, as samples are full. A tensor that differs from sample
    to sample, along its first axis, is kept for every one of them.

    Args:
        samples: how many there are.
        allocate: makes the tensors that are kept of every sample.
        name: of the model, for messages.
        shares: whether blocks read what others before them have put into a mapping that all are passed. The last that
            was put under a key is kept for every sample.
    """

    def __init__(self, samples: int, allocate: Allocate, name: str, *, shares: bool = False) -> None:
        self._samples, self._allocate, self._name, self._shares = samples, allocate, name, shares
        self._shared: dict[Any, tuple[Tensor, ...]] = {}
        self._batches: list[slice] = []
        self._of_size: dict[int, list[Handed]] = {}
        self._of_samples: dict[tuple[int, int], Tensor] = {}
        self._carried: dict[tuple[int, int], Any] = {}  # block and place among its results → those of its last run

    def keep(self, rows: slice, handed: Sequence[Handed]) -> None:
        """Keep what blocks were passed with the samples `rows`."""
        count = rows.stop - rows.start
        first = self._of_size.setdefault(count, list(handed))
        alike: dict[tuple[int, int], bool] = {}
        open_masks: dict[int, Tensor] = {}
        for block, (kept, own) in enumerate(zip(first, handed, strict=True)):
            for number, (before, value) in enumerate(zip(_leaves(kept), _leaves(own), strict=True)):
                known = self._of_samples.get((block, number))
                shaped = next((each for each in (value, before, known) if isinstance(each, Tensor)), None)
                if shaped is None:
                    continue
                if not (isinstance(value, Tensor) and isinstance(before, Tensor)):
                    if id(shaped) not in open_masks:  # blocks share it
                        open_masks[id(shaped)] = self._open_mask(shaped, count)
                    opened = open_masks[id(shaped)]
                    before, value = (each if isinstance(each, Tensor) else opened for each in (before, value))
                pair = id(before), id(value)  # blocks share most of what they are passed
                if known is None:
                    if pair not in alike:
                        alike[pair] = _is_of_size(before, value, count)
                    if alike[pair]:
                        continue
                    if value.dim() == 0 or len(value) != count:
                        raise UserError(
                            f"blocks of {self._name} cannot run one by one: what they are passed depends on all "
                            "samples of a batch together"
                        )
                    known = self._of_samples[block, number] = self._keep_earlier(block, number, value)
                known[rows] = value.cpu()
        self._batches.append(rows)

    def _keep_earlier(self, block: int, number: int, value: Tensor) -> Tensor:
        """Return room for a tensor of every sample, with those of earlier batches, which all had that of their size."""
        kept = self._allocate((self._samples, *value.shape[1:]), value.dtype)
        for rows in self._batches:
            count = rows.stop - rows.start
            earlier = list(_leaves(self._of_size[count][block]))[number]
            kept[rows] = (earlier if isinstance(earlier, Tensor) else self._open_mask(value, count)).cpu()
        return kept

    def _open_mask(self, mask: Tensor, count: int) -> Tensor:
        """Return the mask of samples without padding, (count, …): models pass None in its place, or none at all.

        UserError if it is no mask: then nothing is known that stands for None.
        """
        shape = (count, *mask.shape[1:])
        if mask.dtype == torch.bool:
            return torch.ones(shape, dtype=mask.dtype)
        if mask.dim() == 4 and mask.is_floating_point() and not bool((mask > 0).any()):  # added to scores
            return torch.zeros(shape, dtype=mask.dtype)
        raise UserError(
            f"blocks of {self._name} cannot run one by one: what they are passed with some samples, they are not with "
            "others"
        )

    def _of(self, block: int, count: int, rows: Rows, device: torch.device) -> Handed:
        handed = self._of_size[count][block]
        values = {number: own[rows] for (of, number), own in self._of_samples.items() if of == block}
        if not values:
            return handed
        leaves = iter([values[n].to(device) if n in values else leaf for n, leaf in enumerate(_leaves(handed))])
        placed: Handed = _replace(handed, leaves)
        return placed

    def call(
        self,
        module: nn.Module,
        block: int,
        states: Tensor,
        rows: Rows,
        count: int,
        narrow: Set[SpaceName] | None = None,
    ) -> Tensor:
        """Run a block on the hidden states of `count` samples `rows`, and return those that it makes.

        `count` is a number that was asked for beforehand. UserError as from `_run`.

        Args:
            narrow: spaces that the block lacks units of, if what it was passed is `by_width`.
        """
        handed = self._of(block, count, rows, states.device)
        handed = handed if narrow is None else _at_width(handed, narrow)
        if any(isinstance(leaf, Carried) for leaf in _leaves(handed)):
            leaves = (self._of_last(block, leaf, rows, states.device) for leaf in _leaves(handed))
            handed = _replace(handed, leaves)
        known = {key: tuple(each[rows].to(states.device) for each in kept) for key, kept in self._shared.items()}
        keep = partial(self._share, rows) if self._shares else None
        results = _run(module, block, handed, states, self._name, known, keep)
        following = self._of_size[count][block + 1 : block + 2]
        for place in {leaf.place for leaf in _leaves(following) if isinstance(leaf, Carried)}:
            values = results[place]
            if not isinstance(values, Tensor):
                self._carried[block, place] = values
                continue
            if (block, place) not in self._carried:
                self._carried[block, place] = self._allocate((self._samples, *values.shape[1:]), values.dtype)
            self._carried[block, place][rows] = values.detach().cpu()
        return results[0]

    def _share(self, rows: Rows, made: Shared) -> None:
        for key, values in made.items():
            kept = self._shared.get(key)
            if kept is None or [each.shape[1:] for each in kept] != [each.shape[1:] for each in values]:
                kept = tuple(self._allocate((self._samples, *each.shape[1:]), each.dtype) for each in values)
                self._shared[key] = kept
            for place, value in zip(kept, values, strict=True):
                place[rows] = value.detach().cpu()

    def is_carried_to(self, block: int) -> bool:
        """Return whether a block is passed results of the one before it."""
        return any(isinstance(leaf, Carried) for each in self._of_size.values() for leaf in _leaves(each[block]))

    def _of_last(self, block: int, leaf: Any, rows: Rows, device: torch.device) -> Any:
        if not isinstance(leaf, Carried):
            return leaf
        if (block - 1, leaf.place) not in self._carried:
            raise UserError(
                "blocks of this model are handed more than hidden states by the one before, which is not kept where "
                "gradients are passed back: take a recipe without them, such as ridge or magnitude"
            )
        kept = self._carried[block - 1, leaf.place]
        return kept[rows].to(device) if isinstance(kept, Tensor) else kept


def _run(
    module: nn.Module,
    block: int,
    handed: Handed,
    states: Tensor,
    name: str,
    known: Shared,
    keep: Callable[[Shared], None] | None,
) -> tuple[Tensor, ...]:
    """Return what a block makes, hidden states first.

    Args:
        known: what earlier blocks have put into the mapping that all are passed: others have changed that by then.
        keep: is given what the block puts there, also if its run ends before its last module.

    UserError if the block reads there what is not known.
    """
    states = states if handed.added is None else states + handed.added
    shared = [leaf for leaf in _leaves(handed) if isinstance(leaf, MutableMapping)]
    for mapping in shared:
        mapping.update(known)
    try:
        output = module(states, *handed.arguments, **handed.options)
    except KeyError as error:
        if not shared:
            raise
        raise UserError(
            f"blocks of {name} cannot run one by one: block {block} reads more than hidden states of those before it"
        ) from error
    finally:
        for mapping in shared:
            if keep is not None:
                keep({key: value for key, value in mapping.items() if value is not known.get(key)})
            mapping.clear()
    return results_of(output)


def results_of(output: Any) -> tuple[Any, ...]:
    """Return what a block returns as a tuple, hidden states first."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def by_width(
    handed: Sequence[Handed], results: Sequence[Any], narrow: Mapping[SpaceName, Sequence[Any]]
) -> list[Handed]:
    """Return the arguments of all blocks' calls with `ByWidth` where the first block's results depend on its units.

    Args:
        results: what the first block returns beside hidden states, as it is handed on.
        narrow: space → the same of a first block that lacks units of it.
    """
    found: dict[int, ByWidth] = {}
    for space, others in narrow.items():
        for dense, other in zip(results, others, strict=True):
            if isinstance(dense, Tensor) and dense.shape != other.shape:
                found[id(dense)] = ByWidth(space, dense, other)
    return [_replace(own, (found.get(id(leaf), leaf) for leaf in _leaves(own))) for own in handed]


def _at_width(value: Any, narrow: Set[SpaceName]) -> Any:
    """Return the same tuples, lists and dicts with one tensor for each `ByWidth`."""
    if isinstance(value, ByWidth):
        return value.narrow if value.space in narrow else value.dense
    if isinstance(value, dict) and value:
        return {key: _at_width(part, narrow) for key, part in value.items()}
    if isinstance(value, Handed):
        return Handed(*(_at_width(part, narrow) for part in value))
    if isinstance(value, tuple | list) and value:
        return type(value)([_at_width(part, narrow) for part in value])
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what tuples, lists and dicts hold, in their order."""
    if isinstance(value, dict | tuple | list) and value:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def _replace(value: Any, leaves: Iterator[Any]) -> Any:
    """Return the same tuples, lists and dicts around other leaves."""
    if isinstance(value, dict) and value:
        return {key: _replace(part, leaves) for key, part in value.items()}
    if isinstance(value, Handed | ByWidth):
        return type(value)(*(_replace(part, leaves) for part in value))
    if isinstance(value, tuple | list) and value:
        return type(value)([_replace(part, leaves) for part in value])
    return next(leaves)


def _is_of_size(first: Tensor, value: Tensor, count: int) -> bool:
    """Return whether a batch's tensor is that of the first batch of as many samples, and the same for each of them."""
    if value is not first:
        return first.shape == value.shape and torch.equal(first, value)
    return value.dim() == 0 or len(value) != count or torch.equal(value, value[:1].expand_as(value))


def pad_tokens(states: Tensor, tokens: int) -> Tensor:
    """Return states (B, T, hidden) with zeros behind them, so that a sample has so many tokens."""
    return functional.pad(states, (0, 0, 0, tokens - states.shape[1])) if states.shape[1] < tokens else states


def token_axis(shape: Sequence[int], tokens: int) -> int:
    """Return the axis of tokens of hidden states whose samples stand in front: several streams may stand before it.

    Args:
        tokens: of a sample.
    """
    return max((axis for axis, size in enumerate(shape[:-1]) if axis and size == tokens), default=1)


def _is_view_of(states: Any, other: Tensor) -> bool:
    """Return whether something is a tensor, or all of it: some models cut out the tokens that they need, here all."""
    if states is other:
        return True
    shown = isinstance(states, Tensor) and (states.data_ptr(), states.shape) == (other.data_ptr(), other.shape)
    return shown and states.stride() == other.stride()


def sample_axis(shape: Sequence[int], tokens: int) -> int | None:
    """Return the axis of samples of hidden states: in front of that of tokens; None if samples stand in one sequence.

    Args:
        shape: of hidden states, whose last axis is their dimensions.
        tokens: of a sample.
    """
    if len(shape) == 2:
        return None
    place = max((axis for axis, size in enumerate(shape[:-1]) if size == tokens), default=1)
    return place - 1 if place else 1
