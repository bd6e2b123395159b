"""A model as blocks are read from it and run: as it is stored, or in another basis of its residual stream."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.kept_blocks import KeptBlocks, KeptBlockStream
from ckpt_prune.model.containers.container import Container
from ckpt_prune.model.cuts import KeptUnits
from ckpt_prune.model.factors import multiply_factors
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model


class Basis(Protocol):
    """A model whose tensors are read in another basis of its residual stream: rotated, or sliced."""

    def block(self, block: int) -> dict[str, Tensor]:
        """Return a block's tensors by on-disk name."""

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return tensors outside the blocks."""

    def names(self) -> list[str]:
        """Return the names of all its tensors."""


@dataclass(frozen=True)
class ModelView:
    """Reads a model's tensors and runs its blocks.

    Args:
        model: what is read.
        device: where blocks run.
        basis: the model in another basis, or None.
        container: what the model is built as if that is not the stock class of its config: its own if it carries code,
            the output's if it is in another basis, whose `biases` have a slot in every block, filled or not.
        skips: the model with all its blocks, if some are left out of `model`; that is what is run then.
        kept: of `HiddenStream`.
    """

    model: Model
    device: torch.device
    basis: Basis | None = None
    container: Container | None = None
    skips: KeptBlocks | None = None
    kept: KeptUnits = field(default_factory=dict)

    def block(self, block: int, stored: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return a block's tensors by on-disk name. `stored` are those on disk, if they are read already."""
        if self.basis is None:
            return dict(multiply_factors(self.model.read_block(block) if stored is None else stored))
        assert self.container is not None
        tensors = self.basis.block(block)
        # Blocks in another basis are built as the output's are, which may have biases that nothing is absorbed into.
        fill_biases(self.model.family, block, self.container.biases, tensors)
        return tensors

    def stretch(self, block: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield what the stream runs as one block: numbers and tensors, with those that are left out behind it."""
        if self.skips is None:
            yield block, self.block(block)
            return
        for number in self.skips.dense_range(block):
            yield number, self.skips.whole.read_block(number)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        return (self.model.checkpoint if self.basis is None else self.basis).read(names)

    def stream(self, samples: Samples, dtype: torch.dtype, **options: Any) -> HiddenStream:
        """Return hidden states of samples at the first block; `options` as `HiddenStream` takes them."""
        if self.skips is not None:
            dense_model = self.skips.whole
            factory = BlockFactory(dense_model, device=self.device, dtype=dtype)
            names, read = list(dense_model.checkpoint.tensors), dense_model.checkpoint.read
            return KeptBlockStream(factory, self.skips, names, read, samples, **options)
        skeleton = None if self.container is None else self.container.skeleton()
        factory = BlockFactory(self.model, device=self.device, dtype=dtype, skeleton=skeleton)
        names = list(self.model.checkpoint.tensors) if self.basis is None else self.basis.names()
        return HiddenStream(factory, names, self.read, samples, kept=self.kept, **options)


def fill_biases(family: Family, block: int, biases: Set[str], tensors: dict[str, Tensor]) -> None:
    """Put zeros into the slots that the container opens and nothing fills."""
    for module in sorted(biases):
        name = family.tensor(block, module, "bias")
        weight = tensors.get(family.tensor(block, module))
        if name not in tensors and weight is not None:
            tensors[name] = torch.zeros(weight.shape[0], dtype=weight.dtype)
