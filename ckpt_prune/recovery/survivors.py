"""Which weights of a pruned block may change: those that are not zero."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from ckpt_prune.architectures.family import KINDS, Family
from ckpt_prune.planning.recovery_recipe import Part


def trained_tensors(family: Family, block: int, tensors: Iterable[str], only: Part | None = None) -> list[str]:
    """On-disk names of a block's weights and biases that are trained: those of its linear modules.

    Norms, and modules that turn the residual stream, are no target of pruning and stay.

    Args:
        family: the model's description.
        block: its index.
        tensors: names of its tensors.
        only: its mlp or its attention alone.
    """
    attention = set(family.attention.modules)
    modules = [m for m in family.linears if only is None or (m in attention) == (only == "attention")]
    present = set(tensors)
    names = [family.tensor(block, module, kind) for module in modules for kind in KINDS]
    return [name for name in names if name in present]


def survivors(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Which elements of a tensor are free to change, bool of its shape (LaCo eq. 9, the support of the mask).

    In a weight these are the elements that are not zero. In a bias they are all but the zeros of rows whose
    whole weight is zero: there a padded container holds a dropped unit.

    Args:
        tensors: of the block, by on-disk name.
        name: of one of them.
    """
    tensor = tensors[name]
    if not name.endswith(".bias"):
        return tensor != 0
    rows = (tensors[f"{name.removesuffix('.bias')}.weight"] != 0).any(1)
    return rows | (tensor != 0)
