"""What a block's linear modules read and make, seen in its derivatives: where spaces begin, end, and how they lie.

Every linear module is cut from what made its input (its output becomes a leaf), so that derivatives tell what depends
on what directly. A linear module whose input does not depend on the residual stream, and whose output is added to it,
is a consumer: its input columns are the end of a space. Columns that depend on one row of the modules before them
belong together: units are the connected parts of this relation, in whatever order a class stores them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.discovery.twin import RATIO, Twin

MOST_COLUMNS = 1024
"""Each takes a derivative of its own."""
_BATCH = 128
"""Derivatives that are taken at once."""


@dataclass(frozen=True)
class Trace:
    """One end of spaces: a consumer of a block, and what makes its input.

    Attributes:
        consumer: path of the linear module in the block.
        columns: that it reads.
        producers: linear modules whose outputs it reads, in the order in which they ran.
        mixes: whether a token's input depends on other tokens.
        across: producer → whether other tokens read a row's output, bool (rows,).
        elsewhere: producers that read nothing of the block: of cross-attention those that read the encoder's states.
        twice: producers that read the encoder's states beside those of the block.
        used: other parameters of the block that the consumer's input depends on.
        depend: computes `depends`, one derivative for each column.
        effect: how the output reaches the stream: `added`, `multiplied` (by `factor`), `gated`, `scaled`, `changed`, or
            through other linear modules alone: `none`.
        factor: the number, of `multiplied`.
    """

    consumer: str
    columns: int
    producers: tuple[str, ...]
    mixes: bool
    across: Mapping[str, Tensor]
    elsewhere: tuple[str, ...]
    twice: tuple[str, ...]
    used: tuple[str, ...]
    depend: Callable[[], Mapping[str, Tensor]]
    effect: str
    factor: float

    @cached_property
    def _depends(self) -> Mapping[str, Tensor]:
        return self.depend()

    @property
    def rows(self) -> dict[str, Tensor]:
        """Producer → what each column depends on, bool (columns, rows)."""
        return {name: self._depends[name] for name in self.producers}

    @property
    def tables(self) -> dict[str, Tensor]:
        """Other parameter of the block → what each column depends on, bool (columns, *shape)."""
        return {name: self._depends[name] for name in self.used}


@dataclass(frozen=True)
class BlockRun:
    """A block with what the model passes it.

    Attributes:
        path: of the block in the model.
        states: the residual stream, or several of them in one tensor (…, hidden).
        places: samples and tokens of each.
        passed_on: whether it is passed what the block before it returned beside the stream, and returns the same again.
        shared: options that are a mapping which all blocks are passed, and none has put anything into at first.
    """

    path: str
    block: nn.Module
    states: Tensor
    places: tuple[int, int]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    passed_on: bool = False
    shared: tuple[str, ...] = ()


def find_blocks(twin: Twin, stack: str | None = None) -> tuple[str, list[BlockRun]]:
    """Return the path of a twin's blocks, and these with what each is passed, in their order.

    Blocks are the list of modules with most weights of those that lie in no other and run once each, one after the
    other: a tower that is passed nothing does not run. UserError if no list is one.

    Args:
        stack: of an encoder-decoder, the module on the way to them.
    """
    lists: dict[str, int] = {}
    for path, module in twin.model.named_modules():
        is_inside = any(path.startswith(f"{other}.") for other in lists) or stack not in (None, *path.split("."))
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not is_inside:
            lists[path] = sum(each.numel() for each in module.parameters())
    if not lists:
        raise UserError(f"{twin.architecture} has no list of blocks")
    for layers in sorted(lists, key=lambda path: -lists[path]):
        runs = _record_blocks(twin, layers)
        blocks: Any = twin.model.get_submodule(layers)
        if [run.path for run in runs] == [f"{layers}.{index}" for index in range(len(blocks))]:
            return layers, runs
    raise UserError(f"{twin.architecture} does not run its blocks once each, one after the other")


def find_stage(twin: Twin, number: int, count: int) -> tuple[str, list[BlockRun]]:
    """Return as `find_blocks` the blocks of one of so many stages: of lists under like paths, those with most weights.

    UserError if there are not as many lists, or blocks of one do not run once each, one after the other.
    """
    alike: dict[str, dict[str, int]] = {}
    for path, module in twin.model.named_modules():
        listed = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        if listed and len({type(each) for each in module.children()}) == 1:
            weights = sum(each.numel() for each in module.parameters())
            alike.setdefault(re.sub(r"\d+", "", path), {})[path] = weights
    fitting = [lists for lists in alike.values() if len(lists) == count]
    if not fitting:
        raise UserError(f"{twin.architecture} has no list of blocks for each of its {count} stages")
    heaviest = max(range(len(fitting)), key=lambda index: sum(fitting[index].values()))
    layers = list(fitting[heaviest])[number]
    runs = _record_blocks(twin, layers)
    if [run.path for run in runs] != [f"{layers}.{index}" for index in range(len(runs))] or len(runs) < 2:
        raise UserError(f"{twin.architecture} does not run the blocks of a stage once each, one after the other")
    if any(run.states.dim() != 3 for run in runs):
        raise UserError(_say_maps(twin, runs[-1]))
    return layers, runs


def _say_maps(twin: Twin, run: BlockRun) -> str:
    """Say why blocks that read maps of channels stay whole: often no key of the config states a width inside them."""
    widths = {each.in_features for each in run.block.modules() if isinstance(each, nn.Linear)}
    widths |= {each.in_channels for each in run.block.modules() if isinstance(each, nn.Conv2d) and each.groups == 1}
    inside = widths - {run.states.shape[1]}
    stated = {size for size in twin.config.values() if isinstance(size, int)}
    ratio = any(re.fullmatch(RATIO, key) for key in twin.config)
    if inside and not ratio and not inside & stated:
        why = "no config key states the widths inside them, so that its class has no narrower ones"
    else:
        why = "this version measures blocks alone that read a row of numbers for each patch"
    return f"blocks of {twin.architecture} read maps of channels, and {why}; `export --dtype fp16` halves its bytes"


def _record_blocks(twin: Twin, layers: str) -> list[BlockRun]:
    """Run a twin once, and return modules of a list with what each is passed, in the order in which they ran."""
    blocks: Any = twin.model.get_submodule(layers)
    runs: list[BlockRun] = []
    numbers = {block: index for index, block in enumerate(blocks)}

    def see(block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = dict(options)
        states = arguments[0] if arguments else given.pop(next(iter(signature(block.forward).parameters)))
        places = (states.shape[0], states.shape[1]) if states.dim() == 3 else twin.places(states)
        path = f"{layers}.{numbers[block]}"
        empty = (name for name, value in given.items() if isinstance(value, MutableMapping) and not value)
        shared = runs[0].shared if runs else tuple(empty)
        runs.append(BlockRun(path, block, states.clone(), places, arguments[1:], given, shared=shared))

    def note(_block: nn.Module, _arguments: Any, output: Any) -> None:
        results = [each for each in output[1:] if isinstance(each, Tensor)] if isinstance(output, tuple) else []
        passed = [value for value in (*runs[-1].arguments, *runs[-1].options.values()) if is_in(value, results)]
        runs[-1] = replace(runs[-1], passed_on=any(is_in(value, others) for value in passed))
        others[:] = results

    def is_in(value: Any, tensors: list[Tensor]) -> bool:
        return any(value is each for each in tensors)

    others: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(see, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(note) for block in blocks]
    try:
        twin.outputs()
    finally:
        for hook in hooks:
            hook.remove()
    return runs


def mixes_tokens(run: BlockRun) -> bool:
    """Return whether the last token behind a block depends on others before it."""
    entering = run.states.detach().clone().requires_grad_()
    with torch.enable_grad():
        leaving: Tensor = _states_of(run.block(entering, *run.arguments, **run.options))
        noise = torch.randn(leaving[:, -1].shape, generator=torch.Generator().manual_seed(5))
        (gradient,) = torch.autograd.grad(leaving[:, -1], entering, noise)
    return bool(gradient[:, :-1].any())


@torch.no_grad()
def reads_of_others(run: BlockRun) -> bool:
    """Return whether a block reads what others have put into a mapping that all are passed: it cannot run without."""
    if not run.shared:
        return False
    emptied = {name: type(value)() if name in run.shared else value for name, value in run.options.items()}
    try:
        run.block(run.states, *run.arguments, **emptied)
    except KeyError:
        return True
    return False


def is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def trace_block(run: BlockRun, opaque: Sequence[str] = (), *, inner: bool = False) -> list[Trace]:
    """Return every consumer of a block.

    Args:
        opaque: modules inside which nothing is looked for, such as experts; their output is a leaf.
        inner: return the linear modules that read no stream and make none instead: others read their outputs.
    """
    block = run.block.requires_grad_()
    noise = torch.randn(run.states.shape, generator=torch.Generator().manual_seed(4))
    entering = (run.states + noise * run.states.std()).requires_grad_()
    linears = {
        path: module
        for path, module in block.named_modules()
        if (is_linear(module) and not path.startswith(tuple(f"{each}." for each in opaque))) or path in opaque
    }
    with torch.enable_grad(), _leaves(linears) as (inputs, leaves):
        leaving = _states_of(block(entering, *run.arguments, **run.options))
        once = [path for path in leaves if len(inputs[path]) == 1 and path not in opaque]
        alike = once + [path for path in leaves if path not in opaque and _reads_twice(inputs[path])]
        ran = tuple(f"{path}." for path in linears if path in inputs)  # a class may multiply by the weight of another
        taken = [name for name, _ in block.named_parameters() if not name.startswith(ran)]
        parameters = {name: block.get_parameter(name) for name in taken}
        traces = []
        for path in once:
            (target,) = inputs[path]
            if not (target.requires_grad and target.numel()) or target.numel() % (target.shape[-1] * prod(run.places)):
                continue
            target = target.reshape(*run.places, -1)  # some classes put all tokens in one axis
            others = {p: leaves[p] for p in alike if p != path}
            trace = _trace(path, target, entering, leaving, others, leaves[path], parameters, inner)
            if trace is not None:
                twice = tuple(producer for producer in trace.producers if _reads_twice(inputs[producer]))
                elsewhere = tuple(p for p in trace.producers if p not in twice and not inputs[p][0].requires_grad)
                traces.append(replace(trace, elsewhere=elsewhere, twice=twice))
    return traces


def _reads_twice(inputs: Sequence[Tensor]) -> bool:
    """Return whether a module reads what its block computes, and as much of what it does not."""
    return len({each.shape for each in inputs}) == 1 and len({each.requires_grad for each in inputs}) == 2


def _states_of(output: Any) -> Tensor:
    """Return the hidden states of what a block returns."""
    states: Tensor = output[0] if isinstance(output, tuple | list) else output
    return states


@contextmanager
def _leaves(linears: Mapping[str, nn.Module]) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, Tensor]]]:
    """Cut every linear module's output from its input, and note all its inputs, and its output.

    What goes on is noise of their size, so that no unit is dead at every token. Outputs of one shape are one leaf.
    """
    inputs: dict[str, list[Tensor]] = {}
    leaves: dict[str, Tensor] = {}

    def hook(path: str) -> Any:
        def cut(_module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            first, read = output[0] if isinstance(output, tuple) else output, inputs.setdefault(path, [])
            noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(1 + len(read)))
            # Noise may be out of the range of what came before, and of no numbers there is no size.
            size = torch.nan_to_num(first.detach().std(), 1.0) if first.numel() > 1 else 1.0
            leaf = (noise * size).requires_grad_()
            copy = leaf.clone()  # some classes change it in place
            if arguments and isinstance(arguments[0], Tensor):
                read.append(arguments[0])
                if path in leaves and leaves[path].shape == leaf.shape:
                    copy = leaf.detach() + leaves[path] - leaves[path].detach()
                leaves.setdefault(path, leaf)
            return (copy, *output[1:]) if isinstance(output, tuple) else copy

        return cut

    hooks = [module.register_forward_hook(hook(path)) for path, module in linears.items()]
    try:
        yield inputs, leaves
    finally:
        for each in hooks:
            each.remove()


def _gradients(
    target: Tensor, wanted: Sequence[Tensor], weights: Tensor, *, batched: bool = False
) -> list[Tensor | None]:
    """Return derivatives of a weighted sum, or of one for each of a batch of weights."""
    if not wanted:
        return []
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
    return list(torch.autograd.grad(target, list(wanted), weights, **options))


def _trace(
    path: str,
    target: Tensor,
    entering: Tensor,
    leaving: Tensor,
    others: Mapping[str, Tensor],
    leaf: Tensor,
    parameters: Mapping[str, nn.Parameter],
    inner: bool,
) -> Trace | None:
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(target.shape, generator=generator)
    stream, *found = _gradients(target, [entering, *others.values()], noise)
    if stream is not None and bool(stream.any()):
        return None
    producers = {p: others[p] for p, each in zip(others, found, strict=True) if each is not None and bool(each.any())}
    if not producers:
        return None
    effect, factor = _effect(leaf, leaving, generator)
    if (effect == "none") != inner:
        return None
    if target.shape[-1] > MOST_COLUMNS:
        raise UserError(f"{path} still has {target.shape[-1]} columns in a model that was made small")
    last = torch.zeros_like(noise)
    last[:, -1] = noise[:, -1]
    across = {
        p: (
            torch.zeros(producers[p].shape[-1], dtype=torch.bool)
            if each is None or each.numel() % (target.shape[0] * target.shape[1] * each.shape[-1])
            else each.reshape(*target.shape[:2], -1)[:, :-1].ne(0).flatten(0, -2).any(0)
        )
        for p, each in zip(producers, _gradients(target, list(producers.values()), last), strict=True)
    }
    used = [
        name
        for name, each in zip(parameters, _gradients(target, list(parameters.values()), noise), strict=True)
        if each is not None and bool(each.any())
    ]
    mixes = any(bool(each.any()) for each in across.values())

    def depend() -> Mapping[str, Tensor]:
        leaves = {name: (each.shape[-1],) for name, each in producers.items()}
        shapes: dict[str, tuple[int, ...]] = {**leaves, **{name: parameters[name].shape for name in used}}
        depends = {name: torch.zeros(target.shape[-1], *shape, dtype=torch.bool) for name, shape in shapes.items()}
        sources = [*producers.values(), *(parameters[name] for name in used)]
        for column in range(0, target.shape[-1], _BATCH):
            columns = torch.arange(column, min(column + _BATCH, target.shape[-1]))
            weights = noise * nn.functional.one_hot(columns, target.shape[-1]).view(-1, 1, 1, target.shape[-1])
            for name, gradient in zip(depends, _gradients(target, sources, weights, batched=True), strict=True):
                if gradient is not None:
                    moved = gradient.ne(0)
                    depends[name][columns] = moved.flatten(1, -2).any(1) if name in leaves else moved
        return depends

    return Trace(path, target.shape[-1], tuple(producers), mixes, across, (), (), tuple(used), depend, effect, factor)


def _effect(leaf: Tensor, leaving: Tensor, generator: torch.Generator) -> tuple[str, float]:
    """Say how a linear module's output reaches the block's output."""
    if not leaving.requires_grad:
        return "none", 0.0
    noise = torch.randn(leaving.shape, generator=generator)
    (gradient,) = _gradients(leaving, [leaf], noise)
    if gradient is None or not bool(gradient.any()):
        return "none", 0.0
    if leaf.numel() != leaving.numel():  # the block mixes several streams
        return "changed", 0.0
    ratio = gradient.reshape(noise.shape) / noise
    near = 1e-4 * float(ratio.abs().median())
    factor = float(ratio.median())
    if bool((ratio - factor).abs().max() <= near):
        return ("added" if abs(factor - 1) <= 1e-4 else "multiplied"), factor
    if bool((ratio - ratio[..., :1]).abs().max() <= near * 10):
        return "gated", 0.0
    if bool((ratio - ratio[:1, :1]).abs().max() <= near * 10):
        return "scaled", 0.0
    return "changed", 0.0


def join_units(trace: Trace, only: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the unit of each column, int64, numbered in order: columns that share a row are of one unit.

    Rows that every column depends on are of no unit.

    Args:
        only: producer → rows that count; by default all.
    """
    joined = torch.eye(trace.columns)
    for producer, depends in trace.rows.items():
        counted = ~depends.all(0) & depends.any(0)
        if only is not None:
            counted &= only.get(producer, torch.zeros(depends.shape[1], dtype=torch.bool))
        touched = depends[:, counted].float()
        joined += touched @ touched.T
    unit, before = torch.arange(trace.columns), None
    while before is None or not torch.equal(unit, before):  # each takes the least number of those that it is joined to
        before, unit = unit, torch.where(joined > 0, unit, trace.columns).amin(1)
        unit = unit[unit]
    numbered: Tensor = torch.unique(unit, return_inverse=True)[1]
    return numbered


def is_shared(depends: Tensor) -> bool:
    """Return whether every column depends on all rows that any depends on."""
    used = depends.any(0)
    return bool(used.any()) and bool(depends[:, used].all())


def lines_of_units(depends: Tensor, unit: Tensor) -> Tensor | None:
    """Return the unit of each row that columns depend on, −1 for rows that are shared; None if a row is of several."""
    column = unit[:, None]
    first, last = torch.where(depends, column, len(unit)).amin(0), torch.where(depends, column, -1).amax(0)
    if bool(((first < last) & ~depends.all(0)).any()):
        return None
    return torch.where(first == last, first, -1)
