"""The tensors of a weight of few bits, as compressed-tensors has them: by its own library."""

from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.common.errors import UserError
from ckpt_prune.stages.quantize.gptq import gptq_codes
from ckpt_prune.stages.quantize.rounding import codes_of, scales_of, weights_of
from ckpt_prune.stages.quantize.scheme import LIBRARY, PackingScheme

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
_MOST_AT_ONCE = 2**22
"""Weights that are rounded at once: packing takes some forty bytes for each."""

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def require_library() -> Any:
    """compressed-tensors.

    Raises:
        UserError: it is not installed.
    """
    try:
        import compressed_tensors
    except ImportError as error:
        raise UserError(LIBRARY) from error
    return compressed_tensors


def quantisation_config(scheme: PackingScheme, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json.

    Args:
        scheme: of all weights.
        ignored: linear modules that stay as they are.
    """
    values: dict[str, Any] = _config(scheme, ignored).model_dump(mode="json", exclude_none=True)
    return values


def packed_skeleton(model: nn.Module, scheme: PackingScheme, ignored: list[str]) -> None:
    """Give a model on the meta device packed weights, in place, as transformers does before it loads any."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config

    config = _config(scheme, ignored)
    apply_quantization_config(model, config, run_compressed=False)
    ModelCompressor(quantization_config=config).compress_model(model=model)


def _config(scheme: PackingScheme, ignored: list[str]) -> Any:
    require_library()
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig(
        config_groups={"group_0": {"targets": ["Linear"], "weights": scheme.arguments()}},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=ignored,
    )


def packed_shapes(module: str, shape: tuple[int, int], scheme: PackingScheme, dtype: torch.dtype) -> Shapes:
    """Names, types and shapes of what stands for `module.weight`.

    Args:
        module: its name.
        shape: rows and columns of the weight.
        scheme: how it is stored.
        dtype: of the scales: the model's.
    """
    rows, columns = shape
    return {
        f"{module}.{PACKED}": (torch.int32, (rows, scheme.packed(columns))),
        f"{module}.{SCALE}": (dtype, (rows, scheme.scales(columns))),
        f"{module}.{SHAPE}": (torch.int64, (2,)),
    }


def pack_weight(
    module: str, weight: Tensor, scheme: PackingScheme, factor: Tensor | None = None
) -> tuple[dict[str, Tensor], float]:
    """What stands for a weight, and the sum of squared differences that rounding makes.

    Args:
        module: its name.
        weight: (rows, columns), in the model's type.
        scheme: how it is stored.
        factor: of the Gram of its inputs (`inverse.factorise`), for GPTQ; None rounds to nearest.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    words, scales, change, rows = [], [], 0.0, max(1, _MOST_AT_ONCE // weight.shape[1])
    for part in weight.tensor_split(list(range(rows, len(weight), rows))):
        scale = scales_of(part, scheme, weight.dtype)
        codes = codes_of(part, scale, scheme) if factor is None else gptq_codes(part, factor, scale, scheme)
        change += float((weights_of(codes, scale, scheme) - part).square().sum())
        words.append(pack_to_int32(codes, scheme.bits))
        scales.append(scale)
    return {
        f"{module}.{PACKED}": torch.cat(words),
        f"{module}.{SCALE}": torch.cat(scales),
        f"{module}.{SHAPE}": torch.tensor(weight.shape, dtype=torch.int64),
    }, change


def unpack_codes(packed_words: Tensor, columns: int, scheme: PackingScheme) -> Tensor:
    """The codes that words hold, (rows, columns) int8."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    rows = max(1, _MOST_AT_ONCE // columns)
    parts = packed_words.tensor_split(list(range(rows, len(packed_words), rows)))
    return torch.cat([unpack_from_int32(part, scheme.bits, torch.Size((len(part), columns))) for part in parts])
