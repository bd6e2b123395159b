"""Bases of the residual stream, and absorbing a part of one: pure functions (stages/hidden/README.md).

A basis is a matrix P (d, k) with orthonormal columns. The stream h becomes z = c h P, with c = √(k / d): its mean
square over k coordinates is then that of the projection of h over d, so that a stock RMSNorm of width k divides by what
the dense norm would, its epsilon included. A module that reads the normed stream gets W P / c, one that adds to it
c Pᵀ W.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.inputs import sum_tokens
from ckpt_prune.measure.moments.precision import Extent, needs_double
from ckpt_prune.measure.streams.hidden_stream import ROWS, HiddenStream
from ckpt_prune.model.sublayers import Sublayer
from ckpt_prune.stages.rotation.orthogonal import complement_of_ones

ChooseBasis = Callable[[int, Tensor], Tensor | None]
"""Sub-layer of a block, and the Gram of what it reads, (d, d) float64 → the basis (d, k) that the stream is projected
on there, or None to leave it as it is."""


class SlicedStream:
    """Takes the states of a stream through blocks, projected before every sub-layer.

    Args:
        stream: of the dense model, at its first block.
        normed: take Grams of the norms' outputs before their gains, and not of the stream itself.
        centred: whether norms subtract the mean over coordinates.
    """

    def __init__(self, stream: HiddenStream, sublayers: Sequence[Sublayer], *, normed: bool, centred: bool) -> None:
        self.stream, self.sublayers, self.normed, self.centred = stream, sublayers, normed, centred

    @torch.no_grad()
    def block(self, index: int, tensors: Mapping[str, Tensor], choose: ChooseBasis) -> None:
        """Take the states through a block; `choose` is asked once for every sub-layer, in order.

        Time: two runs of the block if it has two sub-layers, and as many Grams. Memory: the block, one Gram, and the
        basis.
        """
        stream = self.stream
        block = stream.factory.build_block(index, tensors)
        norms = [self._find_norm(block, index, sublayer) for sublayer in self.sublayers]
        basis = choose(0, self._measure_gram(norms[0], lambda rows: stream.states[rows]))
        if basis is not None:
            for _, rows in stream.batches:
                stream.states[rows] = _project(stream.states[rows], basis)
        middle = None
        if len(self.sublayers) > 1:
            gram = self._measure_gram(norms[1], lambda rows: self._read_input(block, index, norms[1], rows))
            middle = choose(1, gram)
        self._pass(block, index, norms[-1], middle)

    @torch.no_grad()
    def skip(self, index: int, tensors: Mapping[str, Tensor], bases: Sequence[Tensor]) -> None:
        """Take the states through a block whose sub-layers' bases are known."""
        stream = self.stream
        block = stream.factory.build_block(index, tensors)
        for _, rows in stream.batches:
            stream.states[rows] = _project(stream.states[rows], bases[0])
        middle = bases[1] if len(bases) > 1 else None
        self._pass(block, index, self._find_norm(block, index, self.sublayers[-1]), middle)

    def end(self, norm: nn.Module) -> Tensor:
        """Return the Gram of the final norm's input, (d, d) float64, behind the last block; `norm` has its epsilon."""
        return self._measure_gram(norm, lambda rows: self.stream.states[rows])

    def _find_norm(self, block: nn.Module, index: int, sublayer: Sublayer) -> nn.Module:
        return block.get_submodule(self.stream.factory.module_path(index, sublayer.norms[0]))

    def _measure_gram(self, norm: Any, read: Callable[[slice], Tensor]) -> Tensor:
        device, total = self.stream.factory.device, None
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        for _, rows in self.stream.batches:
            states = read(rows).flatten(0, -2)
            for start in range(0, len(states), ROWS):
                signal = states[start : start + ROWS].to(device).float()
                if self.centred:
                    signal = signal - signal.mean(-1, keepdim=True)
                if self.normed:
                    signal = signal * torch.rsqrt(signal.square().mean(-1, keepdim=True) + eps)
                extent = Extent.measure(signal, len(signal), *sum_tokens(signal)[:2])
                signal = signal.double() if needs_double(extent, extent) else signal
                gram = (signal.T @ signal).double()
                total = gram if total is None else total + gram
        assert total is not None
        if not all_finite(total):
            raise UserError(f"hidden states are not finite: the model overflows in {self.stream.factory.dtype}")
        return total

    def _read_input(self, block: nn.Module, index: int, norm: nn.Module, rows: slice) -> Tensor:
        inputs: list[Tensor] = []
        handle = norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        self.stream.run(block, index, self.stream.states[rows], rows)
        handle.remove()
        return inputs[0].reshape(-1, inputs[0].shape[-1])

    def _pass(self, block: nn.Module, index: int, norm: nn.Module, basis: Tensor | None) -> None:
        """Let the block's output become the next block's input; what the norm reads is projected on a basis."""
        stream, removed = self.stream, list[Tensor]()

        def project(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            assert basis is not None
            projected = _project(args[0], basis)
            removed.append(args[0] - projected)
            return projected, *args[1:]

        handle = None if basis is None else norm.register_forward_pre_hook(project)
        for _, rows in stream.batches:
            output = stream.run(block, index, stream.states[rows], rows)
            if removed:
                # The block has added to what its norm was passed before the projection.
                output = output - removed.pop().reshape(output.shape)
            stream.states[rows] = output.cpu()
        if handle is not None:
            handle.remove()


def _project(states: Tensor, basis: Tensor) -> Tensor:
    """Return H P Pᵀ, computed in float32, in the dtype of the states and on their device."""
    p = basis.to(states.device, torch.float32)
    return (states.float() @ p @ p.T).to(states.dtype)


def stream_scale(kept: int, width: int) -> float:
    """Return c, by which the stream is multiplied if `kept` of its `width` dimensions stay."""
    return sqrt(kept / width)


def principal_directions(gram: Tensor, kept: int, *, centred: bool) -> tuple[Tensor, float]:
    """Return the `kept` directions of most energy, P (d, k) float64, and their share of the energy.

    The columns of P are orthonormal. `gram` is Σ x xᵀ over tokens, (d, d) float64. `centred` says that signals have no
    mean over their coordinates: the direction of ones then comes last.
    """
    inner = complement_of_ones(len(gram)).to(gram) if centred else None
    values, vectors = torch.linalg.eigh(gram if inner is None else inner.T @ gram @ inner)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    if inner is not None:
        ones = torch.full((len(gram), 1), len(gram) ** -0.5, dtype=gram.dtype, device=gram.device)
        vectors = torch.cat([inner @ vectors, ones], 1)
    energy = float(values.sum())
    return vectors[:, :kept].contiguous(), float(values[:kept].sum()) / energy if energy > 0 else 1.0


def directions_keeping_ones(gram: Tensor, kept: int) -> tuple[Tensor, float]:
    """Return `principal_directions` for a stream that a stock LayerNorm reads: P 1 = √(d / k) 1.

    So what has no mean keeps none, and one of the k >= 2 dimensions is spent on the direction of ones. `gram` is of
    signals without a mean.
    """
    first, share = principal_directions(gram, kept - 1, centred=True)
    outer = complement_of_ones(kept).to(gram)
    ones = torch.full((len(gram), kept), (len(gram) * kept) ** -0.5, dtype=gram.dtype, device=gram.device)
    return first @ outer.T + ones, share


def diagonalise_gains(basis: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis of the same subspace in which a final norm's gains are gains again, and these: P Q and γ.

    Pᵀ diag(g) P = Q diag(γ) Qᵀ: in the basis P Q the head reads diag(γ) of what it read diag(g) of, and a table that is
    embedding and head at once stays one table. It loses what g mixes from dropped directions into kept ones. P is (d,
    k) float64, and g (d,).
    """
    kept_gains, turn = torch.linalg.eigh(basis.T @ (gains[:, None] * basis))
    return basis @ turn, kept_gains


def slice_reader(weight: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return W P / c for a module that reads the normed stream."""
    return weight.double() @ basis / scale


def slice_writer(tensor: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return c Pᵀ W for a weight, or c Pᵀ b for a bias, that adds to the stream."""
    return scale * (basis.T @ tensor.double())
