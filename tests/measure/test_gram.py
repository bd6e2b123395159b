"""Grams by one triangle, and tokens in bfloat16 multiplied as such."""

import pytest
import torch

from ckpt_prune.measure.moments.gram import add_gram

SHAPES = [(1, 1), (7, 5), (40, 256), (300, 257), (64, 700)]


def make_tokens(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers with a few that are far larger, as hidden states have them."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width))
    x[:, :: max(1, width // 3)] *= 50
    return x.to(dtype)


@pytest.fixture
def unchanged():
    """The precision of products that the program has asked for."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield before
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_a_gram_is_the_sum_of_exact_products(rows, width, dtype):
    x = make_tokens(rows, width, dtype)
    gram = torch.eye(width)
    add_gram(gram, x, 0.5)
    expected = torch.eye(width, dtype=torch.float64) + 0.5 * x.double().T @ x.double()
    # What float32 sums lose of the energies involved: 2e-8 to 5e-7. Factors rounded to bfloat16 would lose 2e-3.
    scale = expected.diagonal().sqrt()
    assert ((gram - expected).abs() / torch.outer(scale, scale)).max() < 2e-6
    assert torch.equal(gram, gram.T)


@pytest.mark.parametrize("fast", [True, False])
def test_only_tokens_in_bfloat16_are_multiplied_as_such_if_that_is_faster(unchanged, monkeypatch, fast):
    monkeypatch.setattr("ckpt_prune.parallel.devices.time_products", lambda: (4.0, 1.0) if fast else (1.0, 4.0))
    seen = []
    plain = torch.Tensor.addmm_

    def watch_product(self, *given, **named):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return plain(self, *given, **named)

    monkeypatch.setattr(torch.Tensor, "addmm_", watch_product)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        add_gram(torch.zeros(3, 3), make_tokens(4, 3, dtype))
    assert seen == [unchanged, unchanged, "bf16" if fast else unchanged]


@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
def test_the_precision_that_was_asked_for_comes_back(unchanged, precision):
    torch.backends.mkldnn.matmul.fp32_precision = precision
    add_gram(torch.zeros(3, 3), make_tokens(4, 3, torch.bfloat16))
    assert torch.backends.mkldnn.matmul.fp32_precision == precision
    with pytest.raises(RuntimeError):
        add_gram(torch.zeros(2, 3), make_tokens(4, 3, torch.bfloat16))
    assert torch.backends.mkldnn.matmul.fp32_precision == precision
