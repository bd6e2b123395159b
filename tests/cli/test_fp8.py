"""A plain fp8 checkpoint is pruned and evaluated as the bfloat16 model that its numbers and scales make."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.running import ok, read_json, set_config

BLOCK = 16
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales of 16 x 16 blocks, and the plain weight that they make."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    plain = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scale[i, j] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            plain[part] = (stored[part].float() * scale[i, j]).to(torch.bfloat16)
    return stored, scale, plain


@pytest.fixture
def both(place: Path) -> None:
    """`fp8` and `plain`: the same model."""
    for name in ("fp8", "plain"):
        shutil.copytree("dense", name)
        set_config(name, dtype="bfloat16")
    stored, plain = {}, {}
    for name, weight in load_file("dense/model.safetensors").items():
        if "_proj" not in name:
            stored[name] = plain[name] = weight.bfloat16()
            continue
        stored[name], stored[f"{name}_scale_inv"], plain[name] = quantise(weight)
    save_file(stored, "fp8/model.safetensors", metadata={"format": "pt"})
    save_file(plain, "plain/model.safetensors", metadata={"format": "pt"})
    set_config("fp8", quantization_config=FP8)


def test_the_output_is_that_of_the_plain_model(both):
    for name in ("fp8", "plain"):
        ok("prune", name, "--recipe", "magnitude", "--ratio", "0.5", "-o", f"out-{name}")
    assert Path("out-fp8/config.json").read_bytes() == Path("out-plain/config.json").read_bytes()
    assert Path("out-fp8/model.safetensors").read_bytes() == Path("out-plain/model.safetensors").read_bytes()
    output = ok("verify", "out-fp8", "--against", "fp8")
    assert "kept units: producers of 4 pruned spaces hold the dense rows, bit for bit\n" in output


def test_it_is_evaluated_and_described_as_the_plain_model(both):
    reports = [
        json.loads(ok("evaluate", name, "--text", "calib.txt", "--window", "16", "--json")) for name in ("fp8", "plain")
    ]
    for report in reports:
        report.pop("seconds", None)
    assert reports[0] == {**reports[1], "model": "fp8"}
    assert "weights     bfloat16, " in ok("inspect", "fp8")
    assert read_json("fp8/config.json")["quantization_config"] == FP8


@pytest.mark.parametrize("stored", ["float8_e8m0fnu", "uint8"])
def test_scales_that_are_powers_of_two_in_one_byte_are_read(both, stored):
    """As DeepSeek V3.1 and MXFP8 store them: the exponent alone."""
    packed = load_file("fp8/model.safetensors")
    plain = load_file("plain/model.safetensors")
    for name in [name for name in packed if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        exponents = torch.randint(-9, 2, packed[name].shape, generator=torch.Generator().manual_seed(0))
        packed[name] = torch.exp2(exponents.float()).to(torch.float8_e8m0fnu)
        scales = torch.exp2(exponents.double()).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        rows, columns = packed[weight].shape
        plain[weight] = (packed[weight].double() * scales[:rows, :columns]).bfloat16()
        if stored == "uint8":
            packed[name] = packed[name].view(torch.uint8)
    save_file(packed, "fp8/model.safetensors", metadata={"format": "pt"})
    save_file(plain, "plain/model.safetensors", metadata={"format": "pt"})
    set_config("fp8", quantization_config={**FP8, "scale_fmt": "ue8m0"})
    for name in ("fp8", "plain"):
        ok("prune", name, "--recipe", "magnitude", "--ratio", "0.5", "-o", f"out-{name}")
    assert Path("out-fp8/model.safetensors").read_bytes() == Path("out-plain/model.safetensors").read_bytes()
    measured = [ok("evaluate", name, "--text", "calib.txt", "--window", "16").split()[-3:] for name in ("fp8", "plain")]
    assert measured[0] == measured[1]
