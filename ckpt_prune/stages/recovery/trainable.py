"""Weights of a pruned block that may change: those of its linear modules that are not zero."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt_prune.model.family import KINDS, Family
from ckpt_prune.model.skeleton import is_stored_buffer
from ckpt_prune.options.training import Part
from ckpt_prune.stages.rotation.rotated_checkpoint import ENTRY, EXIT


def trainable_tensors(
    family: Family, block: int, tensors: Mapping[str, Tensor], only: Part | None = None, *, norms: bool = False
) -> list[str]:
    """List the on-disk names of a block's weights and biases that are trained: those of its linear modules.

    Modules that turn the residual stream are no target of pruning and stay, as do norms unless they are asked for.

    Args:
        only: its mlp or its attention alone.
        norms: train what a block has beside its linear modules, too: norms, layer scales.
    """
    names = [family.tensor(block, module, kind) for module in family.linears_of(only) for kind in KINDS]
    trained = [name for name in names if name in tensors]
    if norms:
        prefix = family.block.format(block=block)
        linear = {family.tensor(block, module, kind) for module in family.linears for kind in KINDS}
        fixed = (f"{prefix}{ENTRY}", f"{prefix}{EXIT}")
        others = [name for name in tensors if name.startswith(prefix) and name not in linear]
        # What is no floating point number tells of the block's shape.
        others = [name for name in others if tensors[name].is_floating_point() and not name.startswith(fixed)]
        trained += sorted(name for name in others if not is_stored_buffer(name))
    return trained


def surviving_weights(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return which elements of a tensor are free to change, bool of its shape (LaCo eq. 9, the support of the mask).

    In a weight these are the elements that are not zero. In a bias they are all but the zeros of rows whose whole
    weight is zero: there a padded container holds a dropped unit. A norm is free: its zeros are values like any.
    """
    tensor = tensors[name]
    weight = tensors.get(f"{name.rpartition('.')[0]}.weight", tensor)
    if weight.dim() == 1:
        return torch.ones_like(tensor, dtype=torch.bool)
    if not name.endswith(".bias"):
        return tensor != 0
    rows = (weight != 0).any(1)
    return rows | (tensor != 0)
