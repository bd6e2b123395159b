"""Grams of the residual stream at the sub-layers that read it, in the dense model or with a projected stream.

States are kept in the dense model's coordinates: if the stream is h in the dense model it is h P Pᵀ here, which is
what the sliced model holds in the coordinates of P. So the stock blocks run, with the dense weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.inputs import sum_tokens
from ckpt_prune.measure.moments.precision import Extent, needs_double
from ckpt_prune.measure.streams.hidden_stream import ROWS, HiddenStream
from ckpt_prune.model.sublayers import Sublayer

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
        self.stream.run(block, index, self.stream.states[rows])
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
            output = stream.run(block, index, stream.states[rows])
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
