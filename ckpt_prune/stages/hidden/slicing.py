"""Grams of the residual stream where sub-layers read it, in the dense model or in one whose stream is projected.

States are kept in the dense model's coordinates: where the stream is h in the dense model it is h P Pᵀ here, which is
what the sliced model holds in the coordinates of P. So the stock blocks run, with the dense weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.architectures.sublayers import Sublayer
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.inputs import sums_of
from ckpt_prune.measure.moments.precision import Extent, needs_double
from ckpt_prune.measure.streams.hidden_stream import ROWS, HiddenStream

ChooseBasis = Callable[[int, Tensor], Tensor | None]
"""Of a sub-layer of a block and the Gram of what it reads, (d, d) float64: the basis (d, k) that the stream is
projected on there, or None to leave it as it is."""


class SlicedStream:
    """Takes the states of a stream through blocks, projected wherever a sub-layer reads it.

    Args:
        stream: of the dense model, at its first block.
        sublayers: of every block.
        normed: whether Grams are of what the norms make of the stream, before their gains, or of the stream itself.
        centred: whether norms subtract the mean over coordinates.
    """

    def __init__(self, stream: HiddenStream, sublayers: Sequence[Sublayer], *, normed: bool, centred: bool) -> None:
        self.stream, self.sublayers, self.normed, self.centred = stream, sublayers, normed, centred

    @torch.no_grad()
    def block(self, index: int, tensors: Mapping[str, Tensor], choose: ChooseBasis) -> None:
        """Take the states through a block.

        Time: two runs of the block where it has two sub-layers, and as many Grams. Memory: the block, one Gram, and
        what is chosen.

        Args:
            index: of the block.
            tensors: its own, by on-disk name.
            choose: asked once for every sub-layer, in order.
        """
        stream = self.stream
        block = stream.factory.build_block(index, tensors)
        norms = [self._norm(block, index, own) for own in self.sublayers]
        basis = choose(0, self._gram(norms[0], lambda rows: stream.states[rows]))
        if basis is not None:
            for _, rows in stream.batches:
                stream.states[rows] = _projected(stream.states[rows], basis)
        middle = None
        if len(self.sublayers) > 1:
            middle = choose(1, self._gram(norms[1], lambda rows: self._read(block, index, norms[1], rows)))
        self._pass(block, index, norms[-1], middle)

    @torch.no_grad()
    def skip(self, index: int, tensors: Mapping[str, Tensor], bases: Sequence[Tensor]) -> None:
        """Take the states through a block whose bases are known.

        Args:
            index: of the block.
            tensors: its own, by on-disk name.
            bases: of its sub-layers.
        """
        stream = self.stream
        block = stream.factory.build_block(index, tensors)
        for _, rows in stream.batches:
            stream.states[rows] = _projected(stream.states[rows], bases[0])
        middle = bases[1] if len(bases) > 1 else None
        self._pass(block, index, self._norm(block, index, self.sublayers[-1]), middle)

    def end(self, norm: nn.Module) -> Tensor:
        """The Gram of what the final norm reads, (d, d) float64, behind the last block.

        Args:
            norm: any with its epsilon.
        """
        return self._gram(norm, lambda rows: self.stream.states[rows])

    def _norm(self, block: nn.Module, index: int, own: Sublayer) -> nn.Module:
        path = self.stream.factory.module_path(index, own.norms[0])
        return block.get_submodule(path)

    def _gram(self, norm: Any, read: Callable[[slice], Tensor]) -> Tensor:
        device, found = self.stream.factory.device, None
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        for _, rows in self.stream.batches:
            states = read(rows).flatten(0, -2)
            for start in range(0, len(states), ROWS):
                signal = states[start : start + ROWS].to(device).float()
                if self.centred:
                    signal = signal - signal.mean(-1, keepdim=True)
                if self.normed:
                    signal = signal * torch.rsqrt(signal.square().mean(-1, keepdim=True) + eps)
                extent = Extent.of(signal, len(signal), *sums_of(signal)[:2])
                signal = signal.double() if needs_double(extent, extent) else signal
                own = (signal.T @ signal).double()
                found = own if found is None else found + own
        assert found is not None
        if not all_finite(found):
            raise UserError(f"hidden states are not finite: the model overflows in {self.stream.factory.dtype}")
        return found

    def _read(self, block: nn.Module, index: int, norm: nn.Module, rows: slice) -> Tensor:
        """What a norm of the block reads."""
        seen: list[Tensor] = []
        handle = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        self.stream.run(block, index, self.stream.states[rows])
        handle.remove()
        return seen[0].reshape(-1, seen[0].shape[-1])

    def _pass(self, block: nn.Module, index: int, norm: nn.Module, basis: Tensor | None) -> None:
        """Let the block's output become the next block's input, projected on a basis where a norm reads the stream."""
        stream, gone = self.stream, list[Tensor]()

        def project(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            assert basis is not None
            held = _projected(args[0], basis)
            gone.append(args[0] - held)
            return held, *args[1:]

        handle = None if basis is None else norm.register_forward_pre_hook(project)
        for _, rows in stream.batches:
            output = stream.run(block, index, stream.states[rows])
            if gone:
                # The block has added to what its norm was passed before the projection.
                output = output - gone.pop().reshape(output.shape)
            stream.states[rows] = output.cpu()
        if handle is not None:
            handle.remove()


def _projected(states: Tensor, basis: Tensor) -> Tensor:
    """H P Pᵀ in float32, in the dtype of the states and where they are."""
    own = basis.to(states.device, torch.float32)
    return (states.float() @ own @ own.T).to(states.dtype)
