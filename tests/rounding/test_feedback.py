"""Error feedback into GGUF's types: ggml's own bytes, the textbook's weights, and less error than plain rounding."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.rounding.codes import CODES, put_codes
from ckpt_prune.rounding.feedback import importance_of, output_error, round_with_feedback
from tests.oracles.ggml_feedback import round_row

libgguf = pytest.importorskip("libgguf", reason="ggml's functions are not installed: pip install libgguf")
KINDS = pytest.mark.parametrize("kind", list(CODES), ids=lambda kind: kind.name)


def problem(kind, rows=3):
    """A weight of two blocks, and the Gram of inputs of uneven energy that depend on one another."""
    width = 2 * gguf.GGML_QUANT_SIZES[kind][0]
    generator = torch.Generator().manual_seed(int(kind))
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64) / 8
    inputs = torch.randn(2 * width, width, generator=generator, dtype=torch.float64) @ (torch.eye(width) + mix)
    inputs *= torch.linspace(0.2, 2, width, dtype=torch.float64)
    return torch.randn(rows, width, generator=generator), inputs.T @ inputs


@KINDS
def test_codes_are_put_where_ggml_reads_them(kind):
    """Codes that ggml chose, taken from its weights, give its bytes; and other codes give other weights."""
    weight, _ = problem(kind)
    blocks = libgguf.quantize_rows(weight.numpy(), kind).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    values = gguf.dequantize(blocks, kind)
    codes, size = CODES[kind], gguf.GGML_QUANT_SIZES[kind][0]
    every = np.arange(codes.least, codes.most + 1)
    table = np.stack([gguf.dequantize(put_codes(kind, blocks, np.full((len(blocks), size), c)), kind) for c in every])
    found = every[np.abs(table - values).argmin(0)]
    again = put_codes(kind, blocks, found)
    np.testing.assert_array_equal(gguf.dequantize(again, kind), values)
    np.testing.assert_array_equal(libgguf.dequantize_rows(again, kind), values)


@KINDS
def test_the_rounded_weights_are_those_of_the_textbook(kind):
    """Also if the weight is rounded to all types with blocks of one size."""
    weight, gram = problem(kind)
    alike = [each for each in CODES if gguf.GGML_QUANT_SIZES[each][0] == gguf.GGML_QUANT_SIZES[kind][0]]
    encoded = round_with_feedback(weight, gram, alike, damp=0.01)[kind]
    size, importance = gguf.GGML_QUANT_SIZES[kind][0], importance_of(gram.diagonal())
    every = range(CODES[kind].least, CODES[kind].most + 1)

    def levels(block, row):
        part = importance[block * size :][:size]
        scales = libgguf.quantize_rows(row[None].astype(np.float32), kind, part)
        return np.stack([gguf.dequantize(put_codes(kind, scales, np.full((1, size), c)), kind)[0] for c in every], 1)

    expected = [round_row(row, gram.numpy(), size, 0.01, levels) for row in weight.double().numpy()]
    np.testing.assert_allclose(gguf.dequantize(encoded, kind), np.stack(expected), rtol=1e-5, atol=1e-6)


@KINDS
def test_outputs_change_less_than_by_plain_rounding_with_importance(kind):
    weight, gram = problem(kind, rows=32)
    encoded = round_with_feedback(weight, gram, [kind], damp=0.01)[kind]
    plain = libgguf.quantize_rows(weight.numpy(), kind, importance_of(gram.diagonal()))
    lost, without = (output_error(weight, rows, kind, gram) for rows in (encoded, plain))
    change = weight.double() - torch.from_numpy(gguf.dequantize(encoded, kind)).double()
    assert lost == pytest.approx(float((change @ gram * change).sum()), rel=1e-3)
    assert lost < without


def test_an_input_that_was_always_zero_leaves_the_others_alone():
    weight, gram = problem(Kind.Q4_0)
    gram[5] = gram[:, 5] = 0
    encoded = round_with_feedback(weight, gram, [Kind.Q4_0], damp=0.01)[Kind.Q4_0]
    assert np.isfinite(gguf.dequantize(encoded, Kind.Q4_0)).all()
    moved = weight.clone()
    moved[:, 5] = 0
    assert output_error(weight, encoded, Kind.Q4_0, gram) == output_error(moved, encoded, Kind.Q4_0, gram)
