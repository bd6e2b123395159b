"""Hooks that accumulate the moments of a space or of a linear module while its block runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.moments.logits import LogitMoments, choose_form
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.experts import SplitExperts
from ckpt_prune.model.spaces import KindOfSpace, RotarySpace


class Observer:
    """Accumulates moments while a block runs, until `finish` is called.

    Args:
        folds: moments to begin with, one for each fold.

    Attributes:
        fold: the fold that the tokens or samples that come next belong to.
        counted: which of these tokens count, (B, T) bool; None for all.
        modules: those that it watches.
        on_seen: called once it has seen what a run shows it, if each of `modules` is called once.
    """

    def __init__(self, folds: Sequence[Any], modules: Sequence[nn.Module]) -> None:
        self.fold, self._folds, self.modules = 0, list(folds), modules
        self.counted: Tensor | None = None
        self.on_seen: Callable[[Observer], None] = lambda _: None
        self._handles: list[RemovableHandle] = []

    def finish(self) -> SpaceMoments:
        """Stop looking, and return the moments of every fold, on CPU."""
        for handle in self._handles:
            handle.remove()
        return tuple(moments.to("cpu") for moments in self._folds)


class InputObserver(Observer):
    """Accumulates the input of one linear module."""

    def __init__(self, linear: nn.Module, folds: list[Moments]) -> None:
        super().__init__(folds, [linear])
        self._handles.append(linear.register_forward_pre_hook(self._see))

    def _see(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        tokens = args[0] if self.counted is None else args[0][self.counted]
        self._folds[self.fold] = self._folds[self.fold].accumulate(tokens)
        self.on_seen(self)


class RotaryTurner:
    """Turns queries or keys of a block by position as the block itself does, with the tables it was passed last."""

    def __init__(self, factory: BlockFactory, block: nn.Module, index: int, space: RotarySpace) -> None:
        self._space, self._pairs = space, space.count(factory.model.dimension)
        self._tables: tuple[Tensor, Tensor] | None = None
        attention, _, _ = factory.module_path(index, space.measured).rpartition(".")
        self.handle = block.get_submodule(attention).register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._tables = kwargs["position_embeddings"]

    def __call__(self, states: Tensor) -> Tensor:
        """Turn queries or keys (B, T, heads 2 P): (B, heads, T, 2, P)."""
        from ckpt_prune.modeling_pruned import of_pairs, turn

        assert self._tables is not None
        near = self._space.pairs == "neighbours"
        tables = (of_pairs(table, neighbours=self._space.angles == "neighbours") for table in self._tables)
        cosines, sines = (table[:, None].float() for table in tables)
        heads = states.detach().float().view(*states.shape[:2], -1, 2 * self._pairs).transpose(1, 2)
        turned = turn(heads, cosines, sines, neighbours=near)
        shape = turned.shape[:-1]
        return turned.view(*shape, self._pairs, 2).mT if near else turned.view(*shape, 2, self._pairs)


class QueryKeyObserver(Observer):
    """Accumulates the outputs of the query and key projections, sample by sample.

    Args:
        query, key: the modules.
        folds: moments to begin with, one for each fold.
        turner: of the block, if moments are of rotary pairs.
    """

    def __init__(
        self, query: nn.Module, key: nn.Module, folds: Sequence[Any], turner: RotaryTurner | None = None
    ) -> None:
        super().__init__(folds, [query, key])
        self._turner = turner
        self._outputs: dict[str, Tensor] = {}
        self._handles.append(query.register_forward_hook(lambda _m, _a, output: self._see("query", output)))
        self._handles.append(key.register_forward_hook(lambda _m, _a, output: self._see("key", output)))
        if turner is not None:
            self._handles.append(turner.handle)

    @torch.no_grad()
    def _see(self, name: str, output: Tensor) -> None:
        self._outputs[name] = output if self._turner is None else self._turner(output)
        if len(self._outputs) == 2:
            query, key = self._outputs.pop("query"), self._outputs.pop("key")
            self._folds[self.fold] = self._folds[self.fold].accumulate(query, key)
            self.on_seen(self)


class RoutingObserver(Observer):
    """Accumulates what a block's router sends to its experts."""

    def __init__(self, experts: SplitExperts, folds: list[RoutingMoments]) -> None:
        super().__init__(folds, [experts])
        self._experts = experts
        self._handles += [expert.register_forward_hook(self._watch(number)) for number, expert in enumerate(experts)]

    def _watch(self, number: int) -> Any:
        def see(_module: nn.Module, args: tuple[Tensor, Tensor], output: Tensor) -> None:
            sums = self._experts.sums[number].detach()
            self._folds[self.fold].accumulate(number, args[1].detach(), output.detach(), sums)

        return see


def watch_inputs(
    factory: BlockFactory, block: nn.Module, index: int, module: str, gram: bool, samples: list[int]
) -> InputObserver:
    """Watch the input of a linear module that is named as it stands on disk."""
    linear: Any = block.get_submodule(factory.module_path(index, module))
    width = int(linear.weight.shape[1])
    return InputObserver(linear, [Moments.zeros(width, gram=gram, device=factory.device) for _ in samples])


def _watch_columns(
    factory: BlockFactory, block: nn.Module, index: int, space: Any, gram: bool, samples: list[int]
) -> InputObserver:
    return watch_inputs(factory, block, index, space.consumer, gram, samples)


def _find_readers(factory: BlockFactory, block: nn.Module, index: int, space: Any) -> tuple[Any, Any]:
    query, key = (block.get_submodule(factory.module_path(index, module)) for module in space.readers)
    return query, key


def _watch_logits(
    factory: BlockFactory, block: nn.Module, index: int, space: Any, centred: bool, samples: list[int]
) -> QueryKeyObserver:
    query, key = _find_readers(factory, block, index, space)
    output: Any = block.get_submodule(factory.module_path(index, factory.family.attention.output))
    heads = int(output.weight.shape[1]) // factory.model.dimension("head_dim")
    head_dim = int(query.weight.shape[0]) // heads
    forms = [choose_form(count, head_dim) for count in samples]
    folds = [LogitMoments.zeros(heads, head_dim, form=form, centred=centred, device=factory.device) for form in forms]
    return QueryKeyObserver(query, key, folds)


def _watch_pairs(
    factory: BlockFactory, block: nn.Module, index: int, space: Any, _gram: bool, samples: list[int]
) -> QueryKeyObserver:
    query, key = _find_readers(factory, block, index, space)
    pairs = space.count(factory.model.dimension)
    heads = int(query.weight.shape[0]) // (2 * pairs)
    folds = [RotaryMoments.zeros(heads, pairs, device=factory.device) for _ in samples]
    return QueryKeyObserver(query, key, folds, RotaryTurner(factory, block, index, space))


def _watch_router(
    factory: BlockFactory, block: nn.Module, _index: int, _space: Any, _gram: bool, samples: list[int]
) -> RoutingObserver:
    experts = factory.find_experts(block)
    assert experts is not None
    return RoutingObserver(experts, [RoutingMoments.zeros(len(experts), factory.device) for _ in samples])


OBSERVERS: dict[KindOfSpace, Callable[..., Observer]] = {
    "columns": _watch_columns,
    "logits": _watch_logits,
    "rotary": _watch_pairs,
    "experts": _watch_router,
    "values": _watch_columns,
    "pooling": _watch_columns,
}
"""End of a space → what watches it from now on. Called with the factory, the block, its index, the space, whether with
a Gram (of logits: with one of centred keys), and the samples of each fold."""
