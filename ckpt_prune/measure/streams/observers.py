"""Hooks that accumulate the moments of a space or of a linear module while its block runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.spaces import Ends, RotarySpace
from ckpt_prune.measure.moments.inputs import ACTIVE_THRESHOLD, Moments
from ckpt_prune.measure.moments.logits import LogitMoments, choose_form
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.routing import Routing, RoutingMoments
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.modeling_pruned import of_pairs, turn


class Inputs:
    """Accumulates the input of one linear module.

    Args:
        linear: the module.
        folds: moments to begin with, one for each fold.

    Attributes:
        fold: which one the tokens that come next belong to.
        active_above: absolute value above which an input counts as active.
    """

    def __init__(self, linear: nn.Module, folds: list[Moments]) -> None:
        self.fold, self._folds, self.active_above = 0, folds, ACTIVE_THRESHOLD
        self._handle = linear.register_forward_pre_hook(self._see)

    @classmethod
    def of_module(cls, factory: BlockFactory, block: nn.Module, index: int, module: str, grams: list[bool]) -> "Inputs":
        """Watches a linear module that is named as it stands on disk; `grams` has an entry for each fold."""
        linear: Any = block.get_submodule(factory.module_path(index, module))
        width = int(linear.weight.shape[1])
        return cls(linear, [Moments.zeros(width, gram=gram, device=factory.device) for gram in grams])

    def _see(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._folds[self.fold] = self._folds[self.fold].accumulate(args[0], self.active_above)

    def moments(self) -> tuple[Moments, ...]:
        """What was seen, on CPU; stops looking."""
        self._handle.remove()
        return tuple(m.to("cpu") for m in self._folds)


class Logits:
    """Accumulates the outputs of the query and key projections, sample by sample.

    Args:
        query, key: the modules.
        folds: moments to begin with, one for each fold.

    Attributes:
        fold: which one the samples that come next belong to.
    """

    def __init__(self, query: nn.Module, key: nn.Module, folds: list[LogitMoments]) -> None:
        self.fold, self._folds = 0, folds
        self._query: Tensor | None = None
        self._key: Tensor | None = None
        self._handles = [query.register_forward_hook(self._see_query), key.register_forward_hook(self._see_key)]

    def _see_query(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._query = output
        self._pair()

    def _see_key(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self._key = output
        self._pair()

    def _pair(self) -> None:
        if self._query is None or self._key is None:
            return
        self._folds[self.fold] = self._folds[self.fold].accumulate(self._query, self._key)
        self._query = self._key = None

    def moments(self) -> tuple[LogitMoments, ...]:
        """What was seen, on CPU; stops looking."""
        for handle in self._handles:
            handle.remove()
        return tuple(m.to("cpu") for m in self._folds)


class Turning:
    """Turns queries or keys of a block by position as the block itself does, with the tables that it was passed last.

    Args:
        block: the module, of stock attention.
        attention: its path in the block.
        space: of rotary pairs.
        pairs: of a head.
    """

    def __init__(self, block: nn.Module, attention: str, space: RotarySpace, pairs: int) -> None:
        self._space, self._pairs = space, pairs
        self._tables: tuple[Tensor, Tensor] | None = None
        module = block.get_submodule(attention)
        self.handle = module.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._tables = kwargs["position_embeddings"]

    def __call__(self, states: Tensor) -> Tensor:
        """Queries or keys (B, T, heads 2 P), turned: (B, heads, T, 2, P)."""
        assert self._tables is not None
        near = self._space.pairs == "neighbours"
        tables = (of_pairs(table, neighbours=self._space.angles == "neighbours") for table in self._tables)
        cosines, sines = (table[:, None].float() for table in tables)
        heads = states.detach().float().view(*states.shape[:2], -1, 2 * self._pairs).transpose(1, 2)
        turned = turn(heads, cosines, sines, neighbours=near)
        shape = turned.shape[:-1]
        return turned.view(*shape, self._pairs, 2).mT if near else turned.view(*shape, 2, self._pairs)

    @classmethod
    def of(cls, factory: BlockFactory, block: nn.Module, index: int, space: RotarySpace) -> "Turning":
        """Of a block of a model."""
        attention, _, _ = factory.module_path(index, space.measured).rpartition(".")
        return cls(block, attention, space, space.count(factory.model.dimension))


class Pairs:
    """Accumulates the rotary pairs of queries and keys, sample by sample.

    Args:
        query, key: the modules.
        turning: of the block.
        folds: moments to begin with, one for each fold.

    Attributes:
        fold: which one the samples that come next belong to.
    """

    def __init__(self, query: nn.Module, key: nn.Module, turning: Turning, folds: list[RotaryMoments]) -> None:
        self.fold, self._folds, self._turning = 0, folds, turning
        self._seen: dict[str, Tensor] = {}
        self._handles = [turning.handle]
        for name, module in (("query", query), ("key", key)):
            self._handles.append(module.register_forward_hook(lambda _m, _a, out, name=name: self._see(name, out)))

    @torch.no_grad()
    def _see(self, name: str, output: Tensor) -> None:
        self._seen[name] = self._turning(output)
        if len(self._seen) == 2:
            self._folds[self.fold] = self._folds[self.fold].accumulate(self._seen["query"], self._seen["key"])
            self._seen.clear()

    def moments(self) -> tuple[RotaryMoments, ...]:
        """What was seen, on CPU; stops looking."""
        for handle in self._handles:
            handle.remove()
        return tuple(m.to("cpu") for m in self._folds)


def _of_columns(
    factory: BlockFactory, block: nn.Module, index: int, space: Any, gram: bool, samples: list[int]
) -> Inputs:
    return Inputs.of_module(factory, block, index, space.consumer, [gram] * len(samples))


def _of_logits(
    factory: BlockFactory, block: nn.Module, index: int, space: Any, centred: bool, samples: list[int]
) -> Logits:
    query, key = (block.get_submodule(factory.module_path(index, module)) for module in space.readers)
    output: Any = block.get_submodule(factory.module_path(index, factory.family.attention.output))
    heads = int(output.weight.shape[1]) // factory.model.dimension("head_dim")
    head_dim = int(query.weight.shape[0]) // heads  # type: ignore[index]
    forms = [choose_form(count, head_dim) for count in samples]
    begin = [LogitMoments.zeros(heads, head_dim, form=form, centred=centred, device=factory.device) for form in forms]
    return Logits(query, key, begin)


def _of_pairs(factory: BlockFactory, block: nn.Module, index: int, space: Any, more: bool, samples: list[int]) -> Pairs:
    query, key = (block.get_submodule(factory.module_path(index, module)) for module in space.readers)
    pairs = space.count(factory.model.dimension)
    heads = int(query.weight.shape[0]) // (2 * pairs)  # type: ignore[index]
    folds = [RotaryMoments.zeros(heads, pairs, device=factory.device) for _ in samples]
    return Pairs(query, key, Turning.of(factory, block, index, space), folds)


def _of_experts(
    factory: BlockFactory, block: nn.Module, index: int, space: Any, gram: bool, samples: list[int]
) -> Routing:
    experts = factory.experts(block)
    assert experts is not None
    return Routing(experts, [RoutingMoments.zeros(len(experts), factory.device) for _ in samples])


Observer = Inputs | Logits | Pairs | Routing
"""Watches a space or a linear module."""
OBSERVERS: dict[Ends, Callable[..., Observer]] = {
    "columns": _of_columns,
    "logits": _of_logits,
    "rotary": _of_pairs,
    "experts": _of_experts,
    "values": _of_columns,
}
"""What watches a space: called with factory, block, its index, the space, whether with a Gram
(of logits: with one of centred keys), samples of each fold."""
