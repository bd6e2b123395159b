"""The dense model in the basis of what is made from it: as it is stored, under rotations, or sliced."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.architectures.factors import multiplied
from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.leaping import LeapingStream, Leaps
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.containers.container import Container
from ckpt_prune.rotations.rotated import RotatedCheckpoint
from ckpt_prune.rotations.sliced import SlicedCheckpoint
from ckpt_prune.transform.engine import fill_biases


@dataclass(frozen=True)
class Dense:
    """Reads a dense model's tensors and runs its blocks.

    Args:
        model: the dense model.
        device: where blocks run.
        rotated: it under rotations, or in bases of fewer dimensions; or None.
        container: what the model is built as where that is not the stock class of its config: its own where it carries
            code, the output's where it is rotated, whose `biases` have a slot in every block, filled or not.
        leaps: where blocks of it are left out: what it is whole, which is what is run.
    """

    model: Model
    device: torch.device
    rotated: RotatedCheckpoint | SlicedCheckpoint | None = None
    container: Container | None = None
    leaps: Leaps | None = None

    def block(self, block: int) -> dict[str, Tensor]:
        """A block's tensors by on-disk name."""
        if self.rotated is None:
            return dict(multiplied(self.model.read_block(block)))
        assert self.container is not None
        tensors = self.rotated.block(block)
        # Rotated blocks are built as the output's are, which may have slots that nothing is absorbed into.
        fill_biases(self.model.family, block, self.container.biases, tensors)
        return tensors

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Tensors outside the blocks."""
        return (self.model.checkpoint if self.rotated is None else self.rotated).read(names)

    def stream(self, samples: Samples, dtype: torch.dtype, **options: Any) -> HiddenStream:
        """Hidden states of samples at the first block; `options` as `HiddenStream` takes them."""
        if self.leaps is not None:
            whole = self.leaps.whole
            own = BlockFactory(whole, device=self.device, dtype=dtype)
            names, read = list(whole.checkpoint.tensors), whole.checkpoint.read
            return LeapingStream(own, self.leaps, names, read, samples, **options)
        skeleton = None if self.container is None else self.container.skeleton()
        factory = BlockFactory(self.model, device=self.device, dtype=dtype, skeleton=skeleton)
        names = list(self.model.checkpoint.tensors) if self.rotated is None else self.rotated.names()
        return HiddenStream(factory, names, self.read, samples, **options)
