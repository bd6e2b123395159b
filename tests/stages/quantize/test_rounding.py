"""Rounding against a slow textbook version in float64."""

import numpy as np
import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.sparsity.inverse import factorise_largest_first
from ckpt_prune.stages.quantize.packing import pack_weight, unpack_codes
from ckpt_prune.stages.quantize.rounding import MORE_SHRINKS, SHRINKS, codes_of, gptq_codes, scales_of, weights_of
from ckpt_prune.stages.quantize.scheme import PackingScheme, choose_scheme


def slow(
    weight: np.ndarray, bits: int, group: int, shrinks: tuple[float, ...] = SHRINKS, energies: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, one group after the other: every shrink tried, the nearest whole number taken."""
    counts = np.ones(weight.shape[1]) if energies is None else energies
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes, scales = np.zeros_like(weight), np.zeros((len(weight), weight.shape[1] // group))
    for row in range(len(weight)):
        for g in range(scales.shape[1]):
            values = weight[row, g * group : (g + 1) * group]
            tried = []
            ranges = [np.abs(values).max() / ((2**bits - 1) / 2), values[np.abs(values).argmax()] / low]
            for exact in (part * shrink for part in ranges[: 1 if energies is None else 2] for shrink in shrinks):
                scale = float(np.float32(exact))
                nearest = np.clip(np.round(values / scale), low, high)
                lost = counts[g * group : (g + 1) * group] * (nearest * scale - values) ** 2
                tried.append((float(lost.sum()), scale, nearest))
            _, scales[row, g], codes[row, g * group : (g + 1) * group] = min(tried, key=lambda trial: trial[0])
    return codes, scales


@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("group", [32, None])
def test_rounding_is_the_textbook_one(format, bits, group):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scheme = PackingScheme(format, group)
    scales = scales_of(weight, scheme, torch.float32)
    codes = codes_of(weight, scales, scheme)
    theirs, theirs_scales = slow(weight.numpy(), bits, group or 64)
    np.testing.assert_allclose(scales.double().numpy(), theirs_scales, rtol=1e-6)
    assert (codes.double().numpy() == theirs).all()
    expected = theirs * np.repeat(theirs_scales, group or 64, axis=1)
    np.testing.assert_allclose(weights_of(codes, scales, scheme).numpy(), expected, rtol=1e-6)


def test_scales_are_chosen_by_what_inputs_weigh():
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(6, 96, generator=generator, dtype=torch.float64)
    inputs = torch.randn(400, 96, generator=generator, dtype=torch.float64) * torch.logspace(-2, 1, 96)
    factor = factorise_largest_first(inputs.T @ inputs, 0.01, 1.0)
    energies = inputs.square().sum(0) / inputs.square().sum(0).mean() + 0.01
    torch.testing.assert_close(factor.energies, energies)
    scheme = PackingScheme("int4", 32)
    scales = scales_of(weight, scheme, torch.float32, MORE_SHRINKS, factor.energies)
    _, theirs = slow(weight.numpy(), 4, 32, MORE_SHRINKS, energies.numpy())
    np.testing.assert_allclose(scales.double().numpy(), theirs, rtol=1e-6)
    assert (scales < 0).any()
    assert (scales > 0).any()


def test_a_range_that_is_cut_off_changes_a_weight_less():
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    scheme = PackingScheme("int4", 128)

    def change(shrinks):
        scales = scales_of(weight, scheme, torch.float32, shrinks)
        return float((weights_of(codes_of(weight, scales, scheme), scales, scheme) - weight).square().sum())

    assert change(SHRINKS) < change((1.0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zeros_and_extremes_stay_finite(dtype):
    weight = torch.zeros(3, 32, dtype=dtype)
    weight[1, ::2] = torch.finfo(dtype).max / 2
    weight[2, 5] = torch.finfo(dtype).smallest_normal
    scheme = PackingScheme("int4", 32)
    scales = scales_of(weight, scheme, dtype)
    restored = weights_of(codes_of(weight, scales, scheme), scales, scheme)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert ((restored == 0) | (weight != 0)).all()
    torch.testing.assert_close(restored[1, ::2], weight[1, ::2].double(), rtol=0.1, atol=0.0)


def bits_of(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Codes of rows of 32-bit words, bit by bit: the lowest first, zero at half of the range."""
    stream = (words.astype(np.int64)[:, :, None] >> np.arange(32)) & 1
    fields = stream.reshape(len(words), -1)[:, : columns * bits].reshape(len(words), columns, bits)
    return (fields << np.arange(bits)).sum(axis=-1) - 2 ** (bits - 1)


@pytest.mark.parametrize(("format", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("columns", [64, 22])
def test_words_hold_the_codes_bit_by_bit(monkeypatch, format, bits, columns):
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    scheme = PackingScheme(format, None)
    packed, change = pack_weight("m", weight, scheme)
    scales = packed["m.weight_scale"]
    codes = codes_of(weight, scales, scheme)
    assert (bits_of(packed["m.weight_packed"].numpy(), bits, columns) == codes.numpy()).all()
    assert torch.equal(unpack_codes(packed["m.weight_packed"], columns, scheme), codes)
    assert packed["m.weight_shape"].tolist() == [7, columns]
    assert change == pytest.approx(float((weights_of(codes, scales, scheme) - weight.double()).square().sum()))
    # A few rows at a time come to the same.
    monkeypatch.setattr("ckpt_prune.stages.quantize.packing._MOST_AT_ONCE", 2 * columns)
    again, _ = pack_weight("m", weight, scheme)
    assert all(torch.equal(again[name], packed[name]) for name in packed)
    assert torch.equal(unpack_codes(packed["m.weight_packed"], columns, scheme), codes)


def slow_gptq(weight: np.ndarray, gram: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """GPTQ as its paper states it, columns of large inputs first: each time with the inverse of what is left.

    `scales` is of every weight.
    """
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    damped = gram / np.diag(gram).mean() + 0.01 * np.eye(len(gram))
    moved, codes = weight.copy(), np.zeros_like(weight)
    remaining = sorted(range(weight.shape[1]), key=lambda j: -gram[j, j])
    while remaining:
        j = remaining[0]
        inverse = np.linalg.inv(damped[np.ix_(remaining, remaining)])
        codes[:, j] = np.clip(np.round(moved[:, j] / scales[:, j]), low, high)
        codes[weight[:, j] == 0, j] = 0
        moved[:, remaining] -= ((moved[:, j] - codes[:, j] * scales[:, j]) / inverse[0, 0])[:, None] * inverse[0]
        remaining = remaining[1:]
    return codes


@pytest.mark.parametrize("group", [32, None])
def test_gptq_is_the_textbook_one_and_keeps_outputs(group):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(600, 160, generator=generator, dtype=torch.float64) @ torch.randn(
        160, 160, generator=generator, dtype=torch.float64
    )
    weight = torch.randn(6, 160, generator=generator, dtype=torch.float64)
    weight[:, ::5] = 0
    gram, scheme = inputs.T @ inputs, PackingScheme("int4", group)
    scales = scales_of(weight, scheme, torch.float64)
    codes = gptq_codes(weight, factorise_largest_first(gram, 0.01, 1.0), scales, scheme)
    by_weight = scales.repeat_interleave(160 // scales.shape[1], dim=1)
    assert (codes.double().numpy() == slow_gptq(weight.numpy(), gram.numpy(), by_weight.numpy(), 4)).all()
    assert (codes[weight == 0] == 0).all()

    def lost(chosen):
        return float((inputs @ (weights_of(chosen, scales, scheme) - weight).T).square().sum())

    assert lost(codes) < 0.8 * lost(codes_of(weight, scales, scheme))


def test_the_weight_that_no_group_divides_is_named() -> None:
    with pytest.raises(UserError, match=r"^narrow has 48 columns, which no group of 128, 64, 32 divides: "):
        choose_scheme("int4", None, {"wide": 96, "narrow": 48})
