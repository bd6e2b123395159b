"""Fit the weights that a mask leaves to what the operations behind them make of the pruned stream (SNOWS).

Lucas and Mazumder 2024, arXiv 2411.18376. See stages/recovery/README.md, section 7.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import Meter
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model
from ckpt_prune.options.training import RecoverySettings, SnowsSettings
from ckpt_prune.stages.recovery.block_training import Tensors, surviving_weights
from ckpt_prune.stages.recovery.laco import Recoverer
from ckpt_prune.stages.recovery.newton import search_line, solve_by_products
from ckpt_prune.stages.recovery.training import SampleSplit, Trained, cut, part_size

RESIDUAL = 5e-4
"""Norm of the Newton system's residual at which conjugate gradients stop, over that of the gradient (the authors')."""


class WatchedOperations:
    """The outputs of a block's operations, from those of a group of linear modules on.

    An operation is the linear modules of one group, side by side, or what lies between two groups: attention, norm or
    activation. Both take turns, and the last output is the block's.

    Args:
        paths: of the linear modules, by groups that read the same input, in the order of computation.
        first: the group that the first operation is of.
        count: operations at most.
    """

    def __init__(self, block: nn.Module, paths: Sequence[Sequence[str]], first: int, count: int) -> None:
        self._paths, self._first, self._count = paths, first, count
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        for path in (path for group in paths[first:] for path in group):
            module = block.get_submodule(path)
            module.register_forward_pre_hook(lambda _, inputs, path=path: self._inputs.update({path: inputs[0]}))
            module.register_forward_hook(lambda _, __, output, path=path: self._outputs.update({path: output}))

    def take(self, output: Tensor) -> list[Tensor]:
        """Return what the operations have made in the last run of the block, which returned `output`."""
        outputs: list[Tensor] = []
        for at, group in enumerate(self._paths[self._first :]):
            if at:
                outputs.append(self._inputs[group[0]])
            outputs.append(torch.cat([self._outputs[path] for path in group], dim=-1))
        outputs.append(output)
        self._inputs, self._outputs = {}, {}
        return outputs[: self._count]


class OperationsError:
    """Σ_{k ≤ K} of the mean squared error of operation k, over the weights of one group that are not zero.

    Both blocks read the pruned stream. Before the group they have its recovered weights, behind it the dense ones.

    Args:
        stream: at the block's input.
        tensors: of the block by on-disk name: recovered before the group, dense behind it, masked in it.
        dense: the group's weights in the dense model.
        paths, first: as in `WatchedOperations`.
        count: K + 1.
        part: samples that go through a block at once. If a batch is more than one part, each product with the Hessian
            runs its parts again, so that the graph of one part is in memory.

    Attributes:
        free: for every parameter, which elements change.
    """

    def __init__(
        self,
        stream: HiddenStream,
        index: int,
        tensors: Mapping[str, Tensor],
        dense: Mapping[str, Tensor],
        paths: Sequence[Sequence[str]],
        first: int,
        count: int,
        part: int,
    ) -> None:
        factory = stream.factory
        self._stream, self._index, self._part, self._tensors = stream, index, part, tensors
        self._dtype = torch.promote_types(factory.dtype, torch.float32)
        self._dense = factory.build_block(index, {**tensors, **dense}, dtype=self._dtype)
        # Copies: a parameter of the tensor's own dtype would share its memory, and steps are taken in place.
        masters = {name: tensors[name].to(self._dtype, copy=True) for name in dense}
        self._masked = factory.build_block(index, {**tensors, **masters}, dtype=self._dtype)
        self._parts = {n: [self._masked.get_parameter(p) for p in factory.find_paths(index, n)] for n in dense}
        self.parameters = [parameter for parts in self._parts.values() for parameter in parts]
        self.free = [
            free.to(factory.device)
            for name in self._parts
            for free in factory.split(name, surviving_weights(tensors, name))
        ]
        for parameter in self.parameters:
            parameter.requires_grad_()
        self._targets = WatchedOperations(self._dense, paths, first, count)
        self._operations = WatchedOperations(self._masked, paths, first, count)

    @torch.no_grad()
    def loss(self, rows: Tensor) -> float:
        """Return the error on some samples, (n) int64."""
        return sum(float(self._error(part, len(rows))) for part in cut(rows, self._part))

    @contextmanager
    def quadratic(self, rows: Tensor) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Yield the gradient on some samples over all free elements, (n), and the product of the Hessian with (n)."""
        parts = cut(rows, self._part)
        kept = [self._gradient(part, len(rows)) for part in parts] if len(parts) == 1 else None
        gradient = sum((self._gradient(part, len(rows)).detach() for part in parts), torch.zeros(()))

        def product(vector: Tensor) -> Tensor:
            graphs = (self._gradient(part, len(rows)) for part in parts) if kept is None else kept
            products = [self._flat(self._derive(graph @ vector, retain=kept is not None)) for graph in graphs]
            return torch.stack(products).sum(0)

        yield gradient if kept is None else kept[0].detach(), product

    @torch.no_grad()
    def move(self, step: Tensor) -> None:
        """Add a step (n) to the free elements."""
        sizes = [int(free.sum()) for free in self.free]
        for parameter, free, part in zip(self.parameters, self.free, torch.split(step, sizes), strict=True):
            parameter[free] += part

    def values(self) -> Tensor:
        """Return the free elements, (n)."""
        return torch.cat([p.detach()[free] for p, free in zip(self.parameters, self.free, strict=True)])

    def keep(self) -> Tensors:
        """Return the group's weights in their stored dtypes."""
        return {
            name: torch.cat([p.detach() for p in parts]).to("cpu", self._tensors[name].dtype, copy=True)
            for name, parts in self._parts.items()
        }

    def _error(self, rows: Tensor, count: int) -> Tensor:
        states = self._stream.states[rows].to(self._dtype)
        # Kernels of fused attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            with torch.no_grad():
                targets = self._targets.take(self._stream.run(self._dense, self._index, states, rows))
            outputs = self._operations.take(self._stream.run(self._masked, self._index, states, rows))
        share = len(rows) / count
        errors = [(ours - theirs).square().mean() for ours, theirs in zip(outputs, targets, strict=True)]
        return torch.stack(errors).sum() * share

    def _gradient(self, rows: Tensor, count: int) -> Tensor:
        error = self._error(rows, count)
        return self._flat(torch.autograd.grad(error, self.parameters, create_graph=True))

    def _derive(self, value: Tensor, *, retain: bool) -> Sequence[Tensor]:
        gradients = torch.autograd.grad(value, self.parameters, retain_graph=retain, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self.parameters, strict=True)]

    def _flat(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.cat([gradient[free] for gradient, free in zip(gradients, self.free, strict=True)])


def fit_group(
    error: OperationsError, split: SampleSplit, settings: RecoverySettings, snows: SnowsSettings
) -> tuple[float, float]:
    """Take one Newton step for each batch of training samples, as far as the error on the measured ones falls.

    The authors search the line on their last batch of images; here it is searched on the samples that are held out.

    Returns:
        The error on the measured samples before and after, which is never larger.
    """
    start = best = error.loss(split.measured)
    for rows in cut(split.train, settings.batch) * settings.epochs:
        with error.quadratic(rows) as (gradient, product):
            step = -solve_by_products(lambda v: product(v) + snows.ridge * v, gradient, RESIDUAL, snows.iterations)
        before = error.values()

        def loss_at(share: float, before: Tensor = before, step: Tensor = step) -> float:
            error.move(before + share * step - error.values())
            return error.loss(split.measured)

        share = search_line(loss_at, best, float(gradient @ step))
        error.move(before + share * step - error.values())
        best = error.loss(split.measured) if share else best
    return start, best


def module_groups(factory: BlockFactory, index: int) -> list[dict[str, list[str]]]:
    """Return the linear modules of a block by groups that read the same input: on-disk weight → paths in the block."""
    family = factory.family
    groups = []
    for modules in factory.model.inputs(index).values():
        names = [family.tensor(index, module) for module in modules]
        groups.append({n: [p.removesuffix(".weight") for p in factory.find_paths(index, n)] for n in names})
    return groups


def have_same_shapes(pruned: Model, dense: Model) -> bool:
    """Tell whether the linear modules of two models have the same shapes, block by block."""
    ours, theirs = pruned.checkpoint.tensors, dense.checkpoint.tensors
    names = [name for block in range(pruned.blocks) for name in pruned.weights(block)]
    return all(name in theirs and ours[name].shape == theirs[name].shape for name in names)


@dataclass(frozen=True)
class SnowsRecoverer(Recoverer):
    """Recovers one block after the other by Newton steps, one group of linear modules after the other."""

    snows: SnowsSettings = field(kw_only=True)

    @property
    def summary(self) -> str:
        samples, held_out = self.split.samples, len(self.split.measured) if self.settings.held_out else 0
        return (
            f"recovering {len(self.recovered_blocks)} of {self.blocks} blocks on {samples} samples, {held_out} of them "
            f"held out, by Newton steps on {self.settings.batch} each and {plural(self.snows.operations, 'operation')} "
            "behind every module"
        )

    def _train(self, index: int, pruned: Mapping[str, Tensor], targets: Tensor, meter: Meter) -> Trained[Tensors]:
        dense, factory = self.read_dense(index), self.pruned.factory
        linears = {factory.family.tensor(index, each) for each in factory.family.linears_of(self.settings.only)}
        groups = module_groups(factory, index)
        new, count, curve = dict(pruned), 0, [0.0, 0.0]
        for at, group in enumerate(groups):
            behind = [name for later in groups[at + 1 :] for name in later]
            masked = {n: dense[n] for n in group if n in linears and not torch.equal(dense[n], pruned[n])}
            if not masked:
                continue
            meter.say(f"block {index} {', '.join(name.split('.')[-2] for name in masked)}")
            with torch.enable_grad():
                error = OperationsError(
                    self.pruned,
                    index,
                    {**new, **{name: dense[name] for name in behind}},
                    masked,
                    [[path for paths in modules.values() for path in paths] for modules in groups],
                    at,
                    self.snows.operations + 1,
                    part_size(self.settings),
                )
                start, end = fit_group(error, self.split, self.settings, self.snows)
            curve = [curve[0] + start, curve[1] + end]
            if end < start:
                new, count = {**new, **error.keep()}, count + sum(p.numel() for p in error.parameters)
        if not count:
            return Trained(curve=tuple(curve), epochs=self.settings.epochs)
        return Trained(new, self.settings.epochs, tuple(curve), epochs=self.settings.epochs, parameters=count)
