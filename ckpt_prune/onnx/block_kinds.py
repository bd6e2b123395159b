"""Which blocks of a model compute the same thing with other weights, found by running the model once.

Every function that Python code calls while a block runs is written down: its name, its arguments and the shapes of its
results. Tensors are called by where they come from: the block's input, a weight of the block by its name in it, keys
and values of earlier tokens, an earlier result, or a tensor from outside such as a mask. Blocks with the same record
and the same settings are of one kind.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from ckpt_prune.onnx.tasks import PRESENT

_OWN_PLACE = {"layer_idx", "layer_id", "layer_index", "layer_number"}
"""Attributes that say where a block stands, and nothing of what it computes."""
_WIDTHS = {"in_features", "out_features", "intermediate_size"}
"""Attributes that the shapes of weights repeat."""
_WIDTHLESS = {
    "linear", "silu", "gelu", "relu", "sigmoid", "tanh", "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__",
    "pow", "__pow__",
}  # fmt: skip
"""Functions whose ONNX operators hold no size: they are the same for an MLP of another width."""
_PLAIN = (bool, int, float, str, slice, type(None), type(...), torch.dtype, torch.device, torch.Size)


class NotAlikeError(Exception):
    """The model's blocks are not a chain whose links could stand for each other; the message says why."""


@dataclass(frozen=True)
class BlockKinds:
    """A chain of blocks, each of which reads what the one before returns.

    Attributes:
        path: name of the list of blocks in the model.
        blocks: modules of the blocks, in order.
        kinds: the kind of each block, numbered by first appearance.
        outputs: the form of what each block returns, with the class `Tensor` in place of the tensor.
    """

    path: str
    blocks: Sequence[nn.Module]
    kinds: Sequence[int]
    outputs: Sequence[Any]

    @property
    def traced(self) -> list[int]:
        """The first two blocks of every kind: one to copy, and one to prove that copying makes it of the other."""
        seen: Counter[int] = Counter()
        indices = []
        for index, kind in enumerate(self.kinds):
            seen[kind] += 1
            if seen[kind] <= 2:
                indices.append(index)
        return indices


@dataclass
class _Run:
    """The run of one block, as far as it has come."""

    index: int
    weights: Mapping[int, str]
    entered: Tensor
    calls: list[Any] = field(default_factory=list)
    results: int = 0


class _Recorder(TorchFunctionMode):
    """Writes down what each block calls."""

    def __init__(self, blocks: Sequence[nn.Module], past: Sequence[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._weights = [{id(tensor): name for name, tensor in name_tensors(block)} for block in blocks]
        self._past = {id(tensor): (layer, part) for layer, pair in enumerate(past) for part, tensor in enumerate(pair)}
        self._made: dict[int, tuple[int | None, int]] = {}
        """Id of a tensor → the block that made it (None: no block) and its number there."""
        self._kept: list[Any] = [past]
        """All tensors there were, so that no id is given twice."""
        self._run: _Run | None = None
        self.records: list[list[Any]] = []
        self.outputs: list[Any] = []
        self._last: Tensor | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> None:
        entered = args[0] if args else kwargs.get("hidden_states")
        if self._run is not None or index != len(self.records) or not isinstance(entered, Tensor):
            raise NotAlikeError("blocks do not run once each, one after the other")
        if index and entered is not self._last:
            raise NotAlikeError(f"block {index} does not read what block {index - 1} returns")
        self._run = _Run(index, self._weights[index], entered)
        self._kept.append(entered)

    def leave(self, output: Any) -> None:
        run = self._run
        assert run is not None
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if len(tensors) != 1:
            raise NotAlikeError(f"block {run.index} returns {len(tensors)} tensors")
        if tensors[0].shape != run.entered.shape:
            raise NotAlikeError(f"block {run.index} changes the shape of its input")
        run.calls.append(("returns", self._label(tensors[0])))
        self.records.append(run.calls)
        self.outputs.append(tree_map(lambda leaf: Tensor if isinstance(leaf, Tensor) else leaf, output))
        self._last, self._run = tensors[0], None

    def check_returned(self, output: Any) -> None:
        """Refuse a model that returns what a block computes, other than its cache and the end of the chain."""
        values = [output]
        if isinstance(output, Mapping):  # a decoder behind an encoder returns its cache by names
            values = [value for name, value in output.items() if not name.startswith(PRESENT)]
        for leaf in tree_leaves([value for value in values if not isinstance(value, Cache)]):
            if isinstance(leaf, Tensor):
                self._label(leaf)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # Asking for a shape computes nothing, and what is done with it is in the arguments of what follows.
        if not tensors:
            return result
        name = getattr(func, "__name__", str(func))
        call: list[Any] = [resolve_name(func) or name]
        call += [self._label(leaf) for leaf in tree_leaves((args, kwargs))]
        call.append(tuple(sorted(kwargs)))
        for tensor in tensors:
            if self._run is None:
                self._made.setdefault(id(tensor), (None, 0))
            elif id(tensor) not in self._made and id(tensor) not in self._run.weights:
                self._made[id(tensor)] = (self._run.index, self._run.results)
                self._run.results += 1
            call.append((str(tensor.dtype), tensor.dim() if name in _WIDTHLESS else tuple(tensor.shape)))
        self._kept.append((tensors, args, kwargs))
        if self._run is not None:
            self._run.calls.append(tuple(call))
        return result

    def _label(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return (type(leaf).__name__, repr(leaf)) if isinstance(leaf, _PLAIN) else type(leaf).__name__
        run, key = self._run, id(leaf)
        block, number = self._made.get(key, (None, 0))
        if run is None:
            if block is not None and leaf is not self._last:
                raise NotAlikeError(f"what block {block} computes is used outside the blocks too")
            return "outside"
        if leaf is run.entered:
            return "input"
        if key in run.weights:
            return ("weight", run.weights[key])
        if key in self._past:
            layer, part = self._past[key]
            return ("past", layer - run.index, part)
        if block is None:
            return ("outside", key)
        if block != run.index:
            raise NotAlikeError(f"block {run.index} reads what block {block} computed")
        return ("result", number)


def find_block_kinds(model: nn.Module, inputs: dict[str, Any], past: Sequence[tuple[Tensor, ...]]) -> BlockKinds:
    """Find the kinds of a model's blocks by running it once.

    Args:
        inputs: of its forward; a cache in them is changed.
        past: keys and values in that cache, layer by layer.

    Raises:
        NotAlikeError: its blocks are no chain, or something outside uses what a block computes.
    """
    path, blocks = _find_blocks(model)
    recorder = _Recorder(blocks, past)
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            enters = block.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: recorder.enter(args, kwargs, index), with_kwargs=True
            )
            leaves = block.register_forward_hook(lambda _, __, output: recorder.leave(output))
            stack.callback(enters.remove)
            stack.callback(leaves.remove)
        with torch.no_grad(), recorder:
            output = model(**inputs)
    if len(recorder.records) != len(blocks):
        raise NotAlikeError("not every block runs")
    recorder.check_returned(output)
    numbers: dict[str, int] = {}
    kinds = []
    for block, record in zip(blocks, recorder.records, strict=True):
        key = repr((record, _list_settings(block)))
        kinds.append(numbers.setdefault(key, len(numbers)))
    return BlockKinds(path, blocks, kinds, recorder.outputs)


def _find_blocks(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """Return the longest list of modules that lies in no other list."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    if not lists:
        raise NotAlikeError("there is no list of blocks")
    path, blocks = max(lists, key=lambda item: len(item[1]))
    if len({id(block) for block in blocks}) != len(blocks):
        raise NotAlikeError("one block stands in several places")
    return path, list(blocks)


def name_tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(), *block.named_buffers()]


def _list_settings(block: nn.Module) -> list[Any]:
    """Return every module in a block with its class and plain attributes, which may matter only to longer inputs."""
    settings = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_") and key not in _OWN_PLACE | _WIDTHS and _is_plain(value)
        }
        settings.append((name, type(module).__qualname__, sorted(plain.items())))
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
