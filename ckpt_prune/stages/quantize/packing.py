"""Tensors of a weight of few bits, made by compressed-tensors' own library."""

from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.checkpoint.packed import PACKED, SCALE, SHAPE
from ckpt_prune.common.errors import UserError
from ckpt_prune.sparsity.inverse import OrderedFactor
from ckpt_prune.stages.quantize.rounding import MORE_SHRINKS, codes_of, gptq_codes, scales_of, weights_of
from ckpt_prune.stages.quantize.scheme import LIBRARY, PackingScheme, Schemes

_MOST_AT_ONCE = 2**22
"""Weights that are rounded at once: packing takes some forty bytes for each."""


def require_library() -> Any:
    """Import compressed-tensors, or say how to install it."""
    try:
        import compressed_tensors
    except ImportError as error:
        raise UserError(LIBRARY) from error
    return compressed_tensors


def packed_skeleton(model: nn.Module, schemes: Schemes, ignored: list[str]) -> None:
    """Give a model on the meta device packed weights, in place, as transformers does before it loads any."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config

    config = packing_config(schemes, ignored)
    apply_quantization_config(model, config, run_compressed=False)
    ModelCompressor(quantization_config=config).compress_model(model=model)


def packing_config(schemes: Schemes, ignored: list[str]) -> Any:
    """Return the library's `QuantizationConfig`: one group for each scheme, which names its modules if there are more.

    Args:
        ignored: linear modules that stay as they are.
    """
    require_library()
    from compressed_tensors.quantization import QuantizationConfig

    modules: dict[PackingScheme, list[str]] = {}
    for name, scheme in schemes.items():
        modules.setdefault(scheme, []).append(name.removesuffix(".weight"))
    groups = [
        {"targets": targets if len(modules) > 1 else ["Linear"], "weights": scheme.arguments()}
        for scheme, targets in modules.items()
    ]
    return QuantizationConfig(
        config_groups={f"group_{place}": group for place, group in enumerate(groups)},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=ignored,
    )


def packed_shapes(
    module: str, shape: tuple[int, int], scheme: PackingScheme, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return names, types and shapes of the tensors that replace `module.weight` (rows, columns).

    `dtype` is that of the scales: the model's.
    """
    rows, columns = shape
    return {
        f"{module}.{PACKED}": (torch.int32, (rows, scheme.words_per_row(columns))),
        f"{module}.{SCALE}": (dtype, (rows, scheme.scales(columns))),
        f"{module}.{SHAPE}": (torch.int64, (2,)),
    }


def pack_weight(
    module: str, weight: Tensor, scheme: PackingScheme, gram: OrderedFactor | None = None
) -> tuple[dict[str, Tensor], float]:
    """Return the tensors that replace a weight (rows, columns), and the sum of squared differences from rounding.

    `gram` is of its inputs, for GPTQ; None rounds to nearest.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    words, scales, change, rows = [], [], 0.0, max(1, _MOST_AT_ONCE // weight.shape[1])
    for part in weight.tensor_split(list(range(rows, len(weight), rows))):
        if gram is None:
            scale = scales_of(part, scheme, weight.dtype)
            codes = codes_of(part, scale, scheme)
        else:
            scale = scales_of(part, scheme, weight.dtype, MORE_SHRINKS, gram.energies)
            codes = gptq_codes(part, gram, scale, scheme)
        change += float((weights_of(codes, scale, scheme) - part).square().sum())
        words.append(pack_to_int32(codes, scheme.bits))
        scales.append(scale)
    return {
        f"{module}.{PACKED}": torch.cat(words),
        f"{module}.{SCALE}": torch.cat(scales),
        f"{module}.{SHAPE}": torch.tensor(weight.shape, dtype=torch.int64),
    }, change


def unpack_codes(packed_words: Tensor, columns: int, scheme: PackingScheme) -> Tensor:
    """Return the codes that words hold, (rows, columns) int8."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    rows = max(1, _MOST_AT_ONCE // columns)
    parts = packed_words.tensor_split(list(range(rows, len(packed_words), rows)))
    return torch.cat([unpack_from_int32(part, scheme.bits, torch.Size((len(part), columns))) for part in parts])
