"""The size of values in float16: what a graph's own proof on a CPU cannot see."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.onnx.half_range import LARGEST, HalfRange, measure_half_range
from tests.cli.running import run
from tests.stored import Sources


class Block(nn.Module):
    """Computes a square in float32, as norms do, and fills a mask with the least number or infinity."""

    def __init__(self, scale: float, fill: float) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False, dtype=torch.float16)
        nn.init.eye_(self.up.weight)
        self.scale, self.fill = scale, fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() * 400
        normed = (wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).half()
        mask = torch.full((4, 4), self.fill, dtype=torch.float16).triu(1)
        return (self.up(normed * self.scale) - 1 + mask).softmax(-1)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float16).min, -torch.inf])
@pytest.mark.parametrize(("scale", "fits"), [(60_000.0, True), (70_000.0, False)])
def test_only_values_that_are_held_in_float16_count(fill: float, scale: float, fits: bool) -> None:
    """Squares in float32 are 160,000, and masks end the range; a row of ones is normed to ones."""
    block = nn.Sequential(Block(scale, fill))
    found = measure_half_range(block, lambda: block(torch.ones(4, 4, dtype=torch.float16)))
    assert (found.fits, found.place) == (fits, "0")
    if fits:
        assert found.largest == 60_000
        assert found.describe() == "values in float16 reach 60,000 of 65,504, in 0"


def test_a_product_is_found_by_its_sum_and_its_module() -> None:
    """8 products of 100 and 100 are 80,000, though no factor is large; what follows it is not named."""
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 2, bias=False, dtype=torch.float16), nn.ReLU())
    nn.init.constant_(model[1].weight, 100)
    assert measure_half_range(model, lambda: model(torch.full((3, 8), 100.0).half())) == HalfRange(80_000.0, "1")
    nn.init.constant_(model[1].weight, 80)
    assert measure_half_range(model, lambda: model(torch.full((3, 8), 100.0).half())) == HalfRange(64_000.0, "1")


def test_attention_scores_count() -> None:
    """Attention in one piece holds no score, and a graph does: 4 products of 256 and 256, times a half."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = Attention()
    found = measure_half_range(model, lambda: model(torch.full((1, 1, 2, 4), 256.0).half()))
    assert found == HalfRange(131_072.0, "Attention")


def test_a_weight_that_float16_does_not_hold_is_named() -> None:
    model = nn.Linear(2, 2, dtype=torch.float32)
    nn.init.constant_(model.weight, 1e5)
    found = measure_half_range(model.half(), lambda: pytest.fail("it is not run"))
    assert (found.place, found.fits) == ("weight", False)
    assert f"more than {LARGEST:,.0f}" in found.describe()


def scale_inner(folder: Path) -> None:
    """Make inner values of one MLP too large for float16, and its output as it was, but for rounding."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 2.0**14
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2.0**-14
    save_file(tensors, file, {"format": "pt"})


def test_an_export_in_float16_of_a_model_that_overflows_is_refused(sources: Sources, tmp_path: Path) -> None:
    """onnxruntime's CPU gives finite outputs all the same."""
    model = Path(shutil.copytree(sources.folder("llama"), tmp_path / "model"))
    words = ["export", str(model), "--task", "feature-extraction", "--samples", "2"]
    scale_inner(model)
    half = load_model(model, device="cpu", dtype=torch.float16)
    assert not half(torch.arange(8)[None]).logits.isfinite().all()
    refused = run(*words, "--dtype", "fp16", "-o", str(tmp_path / "out"))
    assert refused.exit_code == 1
    found = re.search(r"range FAILED: layers\.1\.mlp\.up_proj has values of ([\d,]+), and float16 ends", refused.output)
    assert found, refused.output
    assert float(found[1].replace(",", "")) > LARGEST
    assert "Take fp32, int8 or int4" in refused.output
    assert not (tmp_path / "out").exists()
