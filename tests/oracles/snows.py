"""SNOWS on whole models in float64: operations by hooks, and masked least squares row by row."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.measure.samples.samples import Samples

from .laco import everything
from .masked_model import Model


@torch.no_grad()
def operations(model: Model, block: int, data: Samples) -> list[list[Tensor]]:
    """Run the model. Return what every group of linears of a block read (first of each pair) and made, in order."""
    layer: Any = model.model.get_submodule(f"{model.layers}.{block}")
    groups = [[path for linear in group for path in linear.modules] for group in model.inputs]
    made: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(path: str) -> Any:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            made[path] = inputs[0], output

        return keep

    ends: list[Tensor] = []
    handles = [layer.get_submodule(path).register_forward_hook(hook(path)) for own in groups for path in own]
    handles.append(layer.register_forward_hook(lambda _m, _i, o: ends.append(o[0] if isinstance(o, tuple) else o)))
    model.model(**everything(data))
    for handle in handles:
        handle.remove()
    pairs = [[made[own[0]][0], torch.cat([made[path][1] for path in own], -1)] for own in groups]
    return [*pairs, [ends[0]]]


def error(dense: Model, masked: Model, block: int, group: int, behind: int, data: Samples) -> float:
    """Σ_k of the mean squared error of the outputs of a group and of so many operations behind it."""

    def chain(model: Model) -> list[Tensor]:
        (_, outputs), *later = operations(model, block, data)[group:]
        return [outputs, *(each for pair in later for each in pair)][: behind + 1]

    return sum(float((a - b).square().mean()) for a, b in zip(chain(dense), chain(masked), strict=True))


def least_squares(W: Tensor, masked: Tensor, X: Tensor, outputs: int, ridge: float) -> Tensor:
    """The nonzero weights of every row that make W X from X, (N, d_in), with a ridge towards those of the mask.

    The error is a mean over N tokens and all `outputs` of the group; `ridge` is added to its Hessian.
    """
    new = masked.clone()
    for row in range(len(W)):
        free = masked[row] != 0
        X_S = X[:, free]
        H = 2 * X_S.T @ X_S / (len(X) * outputs)
        right = 2 * X_S.T @ (X @ (W[row] - masked[row])) / (len(X) * outputs)
        new[row, free] += torch.linalg.solve(H + ridge * torch.eye(len(H), dtype=H.dtype), right)
    return new


def put(model: Model, block: int, names: Sequence[str], weights: dict[str, Tensor]) -> None:
    """Give some linears of a block these weights, by their names on disk."""
    for linear in (linear for group in model.inputs for linear in group):
        name = f"{model.prefix.format(block)}{linear.disk}.weight"
        if name in names:
            modules: list[Any] = [model.model.get_submodule(f"{model.layers}.{block}.{p}") for p in linear.modules]
            with torch.no_grad():
                for module, part in zip(modules, weights[name].split([len(m.weight) for m in modules]), strict=True):
                    module.weight.copy_(part)
