"""Checkpoint whose residual stream has lost dimensions, as if it lay on disk: it can be pruned further."""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.shard import TensorInfo
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint


@dataclass(frozen=True, eq=False)
class NarrowCheckpoint(Checkpoint):
    """A view of the dense checkpoint in one basis of fewer dimensions, absorbed whenever a tensor is read.

    The tensors of the block that was read last are held.
    """

    view: SlicedCheckpoint = field(kw_only=True)
    _last: dict[int, dict[str, Tensor]] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(cls, view: SlicedCheckpoint, config: dict[str, Any], biases: Set[str]) -> "NarrowCheckpoint":
        """Make the checkpoint that a view would be stored as.

        The view has one basis for all blocks; `biases` are the linear modules of a block that have a bias in it.
        """
        source, model = view.source, view.model
        source_fields = {attribute.name: getattr(source, attribute.name) for attribute in fields(Checkpoint)}
        added = dict(view.added)
        for block in range(model.blocks):
            for module in sorted(biases):
                weight, bias = model.tensor(block, module), model.tensor(block, module, "bias")
                if weight in source.tensors and bias not in source.tensors:
                    rows = (added[weight][1] if weight in added else source.tensors[weight].shape)[0]
                    added[bias] = (weight, (rows,))
        tensors = source.tensors | {
            name: _reshape(source.tensors[beside], name, shape) for name, (beside, shape) in added.items()
        }
        return cls(**source_fields | {"config": config, "tensors": tensors, "replaced": {}}, view=view)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read the named tensors with the basis absorbed."""
        names, model = list(names), self.view.model
        in_blocks: dict[str, Tensor] = {}
        for block in range(model.blocks):
            prefix = model.family.block.format(block=block)
            own_names = [name for name in names if name.startswith(prefix)]
            if own_names:
                block_tensors = self._block(block)
                in_blocks |= {name: block_tensors[name].clone() for name in own_names}
        return {name: in_blocks[name] if name in in_blocks else self.view.read([name])[name] for name in names}

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the dense checkpoint."""
        return self.view.source.fingerprint

    def _block(self, block: int) -> dict[str, Tensor]:
        if block not in self._last:
            block_tensors = self.view.block(block)
            prefix = self.view.family.block.format(block=block)
            empty = {n: info for n, info in self.tensors.items() if n.startswith(prefix) and n not in block_tensors}
            # Slots that the class opens beside those that something is absorbed into.
            block_tensors |= {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in empty.items()}
            self._last.clear()
            self._last[block] = block_tensors
        return self._last[block]


def _reshape(info: TensorInfo, name: str, shape: tuple[int, ...]) -> TensorInfo:
    turned = info.transposed and len(shape) > 1
    return replace(info, name=name, shape=shape, nbytes=prod(shape) * info.dtype.itemsize, transposed=turned)
