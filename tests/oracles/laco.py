"""LaCo, Algorithm 1, on whole models in float64: every step runs the whole pruned model, Adam is written out."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.measure.samples.samples import Samples

from .masked_model import Model

BETAS, EPSILON = (0.9, 0.999), 1e-8
Weights = dict[str, Tensor]
"""On-disk name of a block's tensor → values."""


@dataclass(frozen=True)
class Rule:
    """How a block is trained, whether the last epoch stays, and whether the dense block is given the pruned stream."""

    epochs: int
    rate: float
    batch: int
    cosine: bool = True
    seed: int = 0
    last: bool = False
    of_pruned: bool = False


@dataclass(frozen=True)
class Path:
    """Records training: weights before any epoch and after each."""

    weights: list[Weights]


def everything(data: Samples) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in data.batch(slice(len(data))).items()}


def states(model: Model, block: int, data: Samples, rows: Sequence[int] | None = None) -> Tensor:
    """Return what leaves a block when the whole model runs; for block -1, what enters the first one."""
    hidden: list[Tensor] = []
    layers: Any = model.model.get_submodule(model.layers)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    def enter(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        hidden.append(args[0])

    handle = layers[0].register_forward_pre_hook(enter) if block < 0 else layers[block].register_forward_hook(leave)
    inputs = everything(data)
    model.model(**{k: v if rows is None else v[torch.as_tensor(rows)] for k, v in inputs.items()})
    handle.remove()
    return hidden[0]


def parameters(model: Model, block: int) -> dict[str, list[nn.Parameter]]:
    """Parameters of a block's linears by on-disk name, in the order they stand below each other there."""
    by_name = {}
    for linear in (linear for group in model.inputs for linear in group):
        modules = [model.model.get_submodule(f"{model.layers}.{block}.{path}") for path in linear.modules]
        for kind in ("weight", "bias"):
            tensors: list[Any] = [getattr(module, kind) for module in modules]
            if tensors[0] is not None:
                by_name[f"{model.prefix.format(block)}{linear.disk}.{kind}"] = tensors
    return by_name


def norms(model: Model, block: int) -> dict[str, list[nn.Parameter]]:
    """A block's other parameters, of families that name modules on disk as in the model."""
    of_linears = {id(parameter) for tensors in parameters(model, block).values() for parameter in tensors}
    named = model.model.get_submodule(f"{model.layers}.{block}").named_parameters()
    return {model.prefix.format(block) + path: [tensor] for path, tensor in named if id(tensor) not in of_linears}


@torch.no_grad()
def put(model: Model, block: int, weights: Weights) -> None:
    """Give a block's linears and norms these values."""
    by_name = parameters(model, block) | norms(model, block)
    for name in weights.keys() & by_name.keys():
        parts = weights[name].split([len(p) for p in by_name[name]])
        for parameter, part in zip(by_name[name], parts, strict=True):
            parameter.copy_(part)


def copy_weights(model: Model, block: int) -> Weights:
    """A copy of what a block's linears have."""
    return {n: torch.cat([p.detach().clone() for p in tensors]) for n, tensors in parameters(model, block).items()}


def everything_of(model: Model, block: int) -> Weights:
    """A copy of what a block's linears and norms have."""
    return copy_weights(model, block) | {n: p.detach().clone() for n, (p,) in norms(model, block).items()}


def free(weights: Weights, name: str) -> Tensor:
    """Mask M of a tensor, of what is not zero; of a bias also of empty slots, but for units that are not there."""
    tensor = weights[name]
    mask = torch.ones_like(tensor)
    if weights[name.rpartition(".")[0] + ".weight"].dim() == 1:
        return mask
    if name.endswith(".weight"):
        mask[tensor == 0] = 0
        return mask
    weight = weights[name.replace(".bias", ".weight")]
    for row in range(len(tensor)):
        if float(weight[row].abs().sum()) == 0 and float(tensor[row]) == 0:
            mask[row] = 0
    return mask


@torch.no_grad()
def error(dense: Model, pruned: Model, block: int, data: Samples, rows: Sequence[int]) -> float:
    """‖Y − φ(H')‖² / ‖Y‖² after a block."""
    Y, phi = (states(model, block, data, rows) for model in (dense, pruned))
    return float(((Y - phi) ** 2).sum() / (Y**2).sum())


def teacher(dense: Model, pruned: Model, block: int, rule: Rule) -> Model:
    """Return the model that makes a block's target: the dense one, or the pruned one with the dense one's block."""
    if not rule.of_pruned:
        return dense
    target = copy.deepcopy(pruned)
    put(target, block, everything_of(dense, block))
    return target


def train(
    dense: Model, pruned: Model, block: int, names: Sequence[str], data: Samples, rows: Sequence[int], rule: Rule
) -> Path:
    """Phases 1 and 2 for one block of `pruned`, whose earlier blocks are as they are to be; edits it in place.

    The loss of line 8 is divided by the energy of a mean batch, which Adam does not see but for its ε.

    Args:
        dense: makes the targets.
        pruned: float64, trained in place.
        block: which.
        names: on-disk names of what is trained.
        data: samples.
        rows: those of them to train on.
        rule: of the optimiser.
    """
    with torch.no_grad():
        Y = states(teacher(dense, pruned, block, rule), block, data)
    energy = float((Y[torch.as_tensor(rows)] ** 2).sum()) / len(rows)
    by_name, start = parameters(pruned, block) | norms(pruned, block), everything_of(pruned, block)
    trained = [p for name in names for p in by_name[name]]
    masks = [part for name in names for part in free(start, name).split([len(p) for p in by_name[name]])]
    first, second = ([torch.zeros_like(p) for p in trained] for _ in range(2))
    order = torch.Generator().manual_seed(rule.seed * 1_000_003 + block)
    steps = rule.epochs * -(-len(rows) // rule.batch)
    path, t = Path([start]), 0
    for parameter in pruned.model.parameters():
        parameter.requires_grad_(False)
    for _ in range(rule.epochs):
        shuffled = [rows[i] for i in torch.randperm(len(rows), generator=order).tolist()]
        for begin in range(0, len(rows), rule.batch):
            batch = shuffled[begin : begin + rule.batch]
            for parameter in trained:
                parameter.requires_grad_(True)
            loss = ((Y[torch.as_tensor(batch)] - states(pruned, block, data, batch)) ** 2).sum() / energy / len(batch)
            gradients = torch.autograd.grad(loss, trained)
            rate = rule.rate * math.cos(math.pi * t / steps / 2) ** 2 if rule.cosine else rule.rate
            t += 1
            with torch.no_grad():
                for p, g, m, v, mask in zip(trained, gradients, first, second, masks, strict=True):
                    m.copy_(BETAS[0] * m + (1 - BETAS[0]) * g)
                    v.copy_(BETAS[1] * v + (1 - BETAS[1]) * g**2)
                    corrected = m / (1 - BETAS[0] ** t), v / (1 - BETAS[1] ** t)
                    p.copy_((p - rate * corrected[0] / (corrected[1].sqrt() + EPSILON)) * mask)
                    p.requires_grad_(False)
        path.weights.append(everything_of(pruned, block))
    return path


def laco(
    dense: Model,
    pruned: Model,
    names: Callable[[int], Sequence[str]],
    data: Samples,
    split: tuple[Sequence[int], Sequence[int]],
    rule: Rule,
) -> list[Weights]:
    """Algorithm 1 for all blocks; of each, the weights of the epoch with the least error on samples held out.

    Args:
        dense: makes the targets.
        pruned: float64, edited in place.
        names: what is trained of a block, by its index.
        data: samples.
        split: rows to train on, rows held out.
        rule: of the optimiser.
    """
    chosen = []
    for block in pruned.blocks:
        taught = teacher(dense, pruned, block, rule)
        path = train(dense, pruned, block, names(block), data, split[0], rule)
        errors = []
        for weights in path.weights:
            put(pruned, block, weights)
            errors.append(error(taught, pruned, block, data, split[1]))
        chosen.append(path.weights[-1 if rule.last else errors.index(min(errors))])
        put(pruned, block, chosen[-1])
    return chosen
