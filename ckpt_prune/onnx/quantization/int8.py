"""Weights and inputs in int8, by onnxruntime's own quantizers: `quantize_dynamic` and `quantize_static`."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir

from ckpt_prune.onnx.quantization.blocks import Array
from ckpt_prune.onnx.quantization.measuring import PREFIX, Feed

LARGEST = 64
"""The largest weight in int8. A processor without VNNI or AMX adds two products of an input and a weight in 16 bits,
which 255 and 127 overflow: the sum is cut off silently, and a graph that is right where it was made is wrong
elsewhere."""
_WEIGHTS_ONLY = {"MatMulConstBOnly": True}
"""Products of two inputs, as attention has them, stay as they are."""


def round_to_int8(matrix: Array) -> Array:
    """Return what the quantizers make of a matrix (K, N), with a scale for each output: float32."""
    scale = np.abs(matrix).max(0, keepdims=True).astype(np.float32) / LARGEST
    codes = np.round(matrix / np.where(scale == 0, 1, scale)).clip(-LARGEST, LARGEST)
    return np.asarray(codes * scale, np.float32)


def quantize_to_int8(
    model: onnx_ir.Model, nodes: Sequence[str], feeds: Iterable[Feed] | None, scratch: Path
) -> onnx_ir.Model:
    """Return the graph with some of its MatMuls and Convs in int8.

    Args:
        model: in float32.
        feeds: what ranges of inputs are measured on; None: they are taken at each call.
        scratch: folder for copies of the graph meanwhile, the quantizers' own too.
    """
    if not nodes:
        return model
    with _quiet(), TemporaryDirectory(prefix=PREFIX, dir=scratch) as place, _temporary_files_in(place):
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

        plain, quantized = Path(place) / "plain.onnx", Path(place) / "quantized.onnx"
        onnx_ir.save(model, plain, external_data="plain.onnx_data")
        options = {
            "nodes_to_quantize": list(nodes),
            "per_channel": True,
            "weight_type": QuantType.QInt8,
            "reduce_range": True,  # `LARGEST`
            "use_external_data_format": True,
        }
        if feeds is None:
            quantize_dynamic(plain, quantized, op_types_to_quantize=["MatMul"], extra_options=_WEIGHTS_ONLY, **options)
        else:
            quantize_static(
                plain,
                quantized,
                _Reader(feeds),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=["MatMul", "Conv"],
                activation_type=QuantType.QUInt8,
                extra_options=_WEIGHTS_ONLY | {"OpTypesToExcludeOutputQuantization": ["MatMul"]},
                **options,
            )
        graph = onnx_ir.load(quantized)
        onnx_ir.external_data.load_to_model(graph)
    return graph


class _Reader:
    """Feeds, as onnxruntime's calibration asks for them."""

    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        feed = next(self._feeds, None)
        return None if feed is None else dict(feed)


@contextlib.contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """The quantizers put whole graphs into the system's temporary folder: use this one instead."""
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the quantizers print and log: advice on how they might have been called."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
