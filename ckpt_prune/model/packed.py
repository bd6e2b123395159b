"""Names of the tensors that stand in for a weight of few bits, and the weight that they stand for."""

from collections.abc import Mapping

import torch
from torch import Tensor

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"


def unpack_weights(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with plain weights in place of packed ones, in the type of their scales, as transformers has them.

    A 32-bit word holds 8 or 4 codes, the first in its lowest bits; a code is stored as its distance from the least one.
    """
    modules = [name.removesuffix(PACKED) for name in tensors if name.endswith(f".{PACKED}")]
    if not modules:
        return tensors
    ends = (f".{PACKED}", f".{SCALE}", f".{SHAPE}")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for module in modules:
        words, scales = tensors[module + PACKED], tensors[module + SCALE]
        rows, columns = tensors[module + SHAPE].tolist()
        bits = 8 if words.shape[1] == -(-columns // 4) else 4
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        codes = ((words[..., None] >> shifts) & (2**bits - 1)).reshape(rows, -1)[:, :columns] - 2 ** (bits - 1)
        grouped = codes.to(scales.dtype).reshape(rows, scales.shape[1], -1)
        plain[f"{module}weight"] = (grouped * scales[..., None]).reshape(rows, columns)
    return plain
