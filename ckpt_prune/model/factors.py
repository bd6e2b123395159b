"""Names of the two thin linears that stand in for a linear module of low rank, and their product."""

from collections.abc import Mapping

from torch import Tensor

_WEIGHT, _DOWN, _UP = ".weight", ".down.weight", ".up.weight"


def factor_names(weight: str) -> tuple[str, str]:
    """Return the on-disk names of the factors of a weight: (rank, inputs), then (outputs, rank)."""
    module = weight.removesuffix(_WEIGHT)
    return f"{module}{_DOWN}", f"{module}{_UP}"


def multiply_factors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with the float32 product in place of every pair of factors, for blocks of the dense shape."""
    ups = {name.removesuffix(_UP): name for name in tensors if name.endswith(_UP)}
    pairs = {module: up for module, up in ups.items() if f"{module}{_DOWN}" in tensors}
    if not pairs:
        return tensors
    factors = {*pairs.values(), *(f"{module}{_DOWN}" for module in pairs)}
    multiplied = {name: tensor for name, tensor in tensors.items() if name not in factors}
    for module, up in pairs.items():
        multiplied[f"{module}{_WEIGHT}"] = tensors[up].float() @ tensors[f"{module}{_DOWN}"].float()
    return multiplied
