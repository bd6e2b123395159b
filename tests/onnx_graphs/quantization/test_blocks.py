"""Blocks hold what onnxruntime's operators read from them."""

import logging
import subprocess
import sys
from typing import get_args

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from ckpt_prune.onnx.quantization.blocks import (
    BlockRounding,
    round_to_nearest,
)
from ckpt_prune.options.graphs import GraphSettings

RNG = np.random.default_rng(0)


def products(blocks, columns: int) -> np.ndarray:
    """Multiply the unit vectors with MatMulNBits, which gives the matrix that it reads."""
    names = ["x", "packed", "scales", *([] if blocks.zeros is None else ["zeros"])]
    arrays = {"packed": blocks.packed, "scales": blocks.scales, "zeros": blocks.zeros}
    node = helper.make_node(
        "MatMulNBits",
        names,
        ["y"],
        domain="com.microsoft",
        K=blocks.rows,
        N=columns,
        bits=blocks.grid.bits,
        block_size=blocks.grid.block,
    )
    one, other = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", width])
        for name, width in (("x", blocks.rows), ("y", columns))
    )
    weights = [onnx.numpy_helper.from_array(arrays[name], name) for name in names[1:]]
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "graph", [one], [other], weights), opset_imports=domains, ir_version=10
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.eye(blocks.rows, dtype=np.float32)})[0]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "block"), [(64, 32), (50, 16), (20, 128)])
def test_the_matrix_in_them_is_what_onnxruntime_multiplies_with(rows, block, bits, symmetric):
    matrix = RNG.standard_normal((rows, 21), dtype=np.float32)
    blocks = round_to_nearest(matrix, BlockRounding(bits, block, symmetric))
    assert np.allclose(blocks.to_matrix(), products(blocks, 21), atol=1e-6)
    step = blocks.scales.max()
    assert np.abs(blocks.to_matrix() - matrix).max() <= step * (1.01 if symmetric else 0.51)


def test_sizes_are_those_that_onnxruntime_has():
    for size in get_args(get_args(GraphSettings.model_fields["block_size"].annotation)[0]):
        matrix = RNG.standard_normal((size, 3), dtype=np.float32)
        blocks = round_to_nearest(matrix, BlockRounding(4, size, False))
        assert np.allclose(blocks.to_matrix(), products(blocks, 3), atol=1e-6)


def test_logging_is_left_alone():
    """Importing onnxruntime's quantizer gives the root logger a handler that prints on stderr."""
    code = (
        "import logging, numpy as np; from ckpt_prune.onnx.quantization.blocks import BlockRounding, round_to_nearest; "
        "round_to_nearest(np.ones((16, 4), np.float32), BlockRounding(4, 16, False)); "
        "assert not logging.getLogger().handlers; assert logging.getLogger().level == logging.WARNING"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert logging.getLogger().level == logging.WARNING


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_matrix_that_was_rounded_to_4_bits_keeps_its_weights(symmetric):
    """Also where no code of a block is the least: onnxruntime would choose other steps."""
    generator = np.random.default_rng(2)
    codes, steps = generator.integers(-5, 7, (6, 3, 32)), generator.uniform(0.01, 0.2, (6, 3, 1))
    matrix = np.ascontiguousarray((codes * steps).reshape(6, 96).T, np.float32)
    blocks = round_to_nearest(matrix, BlockRounding(4, 32, symmetric))
    np.testing.assert_allclose(blocks.to_matrix(), matrix, rtol=1e-6)
    assert (blocks.zeros is None) == symmetric
