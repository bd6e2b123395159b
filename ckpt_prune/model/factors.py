"""A linear module's weight as the product of two thinner ones, under names of their own beside its bias."""

from collections.abc import Mapping

from torch import Tensor

_WEIGHT, _DOWN, _UP = ".weight", ".down.weight", ".up.weight"


def factor_names(weight: str) -> tuple[str, str]:
    """On-disk names of the factors of a weight (outputs, inputs).

    Returns:
        That of the one that reads the input, (rank, inputs), and that of the other, (outputs, rank).
    """
    module = weight.removesuffix(_WEIGHT)
    return f"{module}{_DOWN}", f"{module}{_UP}"


def multiply_factors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors with the product in place of every pair of factors, in float32: what blocks of the dense shape run with.

    Args:
        tensors: by on-disk name; returned as they are where there are no factors.
    """
    ups = {name.removesuffix(_UP): name for name in tensors if name.endswith(_UP)}
    pairs = {module: up for module, up in ups.items() if f"{module}{_DOWN}" in tensors}
    if not pairs:
        return tensors
    gone = {*pairs.values(), *(f"{module}{_DOWN}" for module in pairs)}
    found = {name: tensor for name, tensor in tensors.items() if name not in gone}
    for module, up in pairs.items():
        found[f"{module}{_WEIGHT}"] = tensors[up].float() @ tensors[f"{module}{_DOWN}"].float()
    return found
