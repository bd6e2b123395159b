"""Slicing of the residual stream, written out on a whole dense model in float64: no basis is absorbed anywhere.

Where the sliced model has the coordinates of the stream in a basis P, this one has its projection P Pᵀ h: whatever
adds to the stream is projected by hooks of the stock model, and where a sub-layer has a basis of its own the whole
stream is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.sublayers import Sublayer

Array = NDArray[np.float64]


def leading(signals: Array, kept: int, *, ones_last: bool) -> Array:
    """P (d, k): the leading eigenvectors of Σ x xᵀ, rows of `signals` (N, d) being the x."""
    d = signals.shape[1]
    gram = signals.T @ signals
    if ones_last:  # the direction that no signal has comes behind those that some have
        gram = gram + np.trace(gram) * 1e-9 * (np.eye(d) - np.ones((d, d)) / d)
    _, vectors = np.linalg.eigh(gram)
    basis: Array = vectors[:, ::-1][:, :kept]
    return basis


class Projected:
    """A dense stock model whose stream is projected.

    Args:
        model: float64, with plain linears.
        case: of the contract suite: family, samples.
        sublayers: of every block.
        kept: dimensions.

    Attributes:
        energy: share of the signals' energy in the kept directions, basis by basis.
    """

    def __init__(self, model: Any, case: Any, sublayers: Sequence[Sublayer], kept: int) -> None:
        self.model, self.case, self.sublayers, self.kept = model, case, sublayers, kept
        self.layer = case.family.residual.norm == "layer"
        self.energy: list[float] = []
        self._layers: Any = model.get_submodule(case.family.layers)

    def by_block(self, data: Samples) -> None:
        """A basis for every sub-layer, each measured in the model that is projected before it."""
        for layer in self._layers:
            for place, sublayer in enumerate(self.sublayers):
                norm = layer.get_submodule(sublayer.norms[0])
                basis = self._basis([self._signals(norm, data)], spent=0)
                project = torch.from_numpy(basis @ basis.T)
                if place == 0:
                    layer.register_forward_pre_hook(_first(project))
                else:
                    _InTheMiddle(layer, norm, project)

    def shared(self, data: Samples) -> None:
        """One basis for all that reads the stream; a LayerNorm spends a dimension on the mean."""
        norms = [
            layer.get_submodule(norm)
            for layer in self._layers
            for sublayer in self.sublayers
            for norm in sublayer.norms[:1]
        ]
        final = self.model.get_submodule(self.case.family.residual.final)
        basis = self._basis([self._signals(norm, data) for norm in [*norms, final]], spent=int(self.layer))
        project = torch.from_numpy(basis @ basis.T)
        self._layers[0].register_forward_pre_hook(_first(project))
        for layer in self._layers:
            family_paths = module_paths(self.case.family)
            paths = [
                path
                for sublayer in self.sublayers
                for module in sublayer.writes
                for path in family_paths.get(module) or (module,)
            ]
            for path in paths:
                layer.get_submodule(path).register_forward_hook(lambda _, args, out: out @ project)
        if self.layer:
            _drop_shift(final, project)
        tied = bool(getattr(self.model.config, "tie_word_embeddings", False))
        if tied and not self.layer:
            # One table reads what gains have mixed inside the basis alone.
            final.register_forward_hook(lambda _, args, out: out @ project)

    def _basis(self, signals: Sequence[Array], spent: int) -> Array:
        X = np.concatenate(signals)
        basis = leading(X, self.kept - spent, ones_last=self.layer)
        self.energy.append(float(np.sum((X @ basis) ** 2) / np.sum(X**2)))
        return basis

    @torch.no_grad()
    def _signals(self, norm: Any, data: Samples) -> Array:
        """Return what a norm makes of its inputs, before gains and biases: (tokens, d)."""
        seen: list[Tensor] = []
        handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()), prepend=False)
        batch = data.batch(slice(len(data)))
        self.model(**{n: v.double() if v.is_floating_point() else v for n, v in batch.items()})
        handle.remove()
        h = seen[0].reshape(-1, seen[0].shape[-1]).numpy()
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        if self.layer:
            h = h - h.mean(1, keepdims=True)
        normalised: Array = h / np.sqrt((h**2).mean(1, keepdims=True) + eps)
        return normalised


def _first(project: Tensor) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] @ project, *args[1:]

    return hook


class _InTheMiddle:
    """Projects what a block's second norm reads, and takes what is dropped off what the block gives, too."""

    def __init__(self, layer: Any, norm: Any, project: Tensor) -> None:
        self.gone: Tensor | None = None
        self.project = project
        norm.register_forward_pre_hook(self.before)
        layer.register_forward_hook(self.behind)

    def before(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        projected = args[0] @ self.project
        self.gone = args[0] - projected
        return projected, *args[1:]

    def behind(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        assert self.gone is not None
        states = output[0] if isinstance(output, tuple) else output
        remaining = states - self.gone.reshape(states.shape)
        return (remaining, *output[1:]) if isinstance(output, tuple) else remaining


def _drop_shift(final: Any, project: Tensor) -> None:
    """Drop the part of the final norm's bias b outside the basis: b/g (g: gains) is projected, and its mean stays."""
    if getattr(final, "bias", None) is None:
        return
    with torch.no_grad():
        d = len(final.bias)
        gain = final.weight + (1.0 if "1P" in type(final).__name__ else 0.0)
        projector = project + torch.ones(d, d, dtype=torch.float64) / d
        final.bias.copy_(gain * ((final.bias / gain) @ projector))
