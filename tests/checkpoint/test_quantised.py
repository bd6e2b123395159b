"""Quantised checkpoints: plain fp8 is what its numbers times its scales are; the rest is refused before it is read."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.checkpoint import shard
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.model_folder import resolve_model
from ckpt_prune.common.errors import UserError
from tests.refusals import refusal

from .folders import CONFIG, example_tensors, save_single, write_index

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [2, 3]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
NAME = "model.layers.0.up.weight"


def make_float8(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


def fp8(
    folder: Path, shape: tuple[int, ...], scale: Tensor, quantization: dict[str, Any] = FP8, suffix: str = "_scale_inv"
) -> Path:
    tensors = {NAME: make_float8(*shape), NAME + suffix: scale, "model.norm.weight": torch.ones(3)}
    return save_single(folder, tensors, CONFIG | {"quantization_config": quantization})


def by_elements(weight: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Every element times the scale of its block, one by one, in float64."""
    product = torch.empty(weight.shape, dtype=torch.float64)
    for index in range(weight.numel()):
        place = torch.unravel_index(torch.tensor(index), weight.shape)
        *before, row, column = (int(coordinate) for coordinate in place)
        by = scale if scale.numel() == 1 else scale[(*before, row // rows, column // columns)]
        product[(*before, row, column)] = weight[(*before, row, column)].double() * by.double().reshape(())
    return product.to(torch.bfloat16)


@pytest.mark.parametrize("chunk", [shard._CHUNK_BYTES, 1], ids=["at once", "by runs of rows"])
@pytest.mark.parametrize(
    ("shape", "scale", "block", "quantization", "suffix"),
    [
        ((5, 7), (3, 3), (2, 3), FP8, "_scale_inv"),  # the last blocks are smaller
        ((4, 6), (2, 2), (2, 3), FP8, "_scale_inv"),
        ((2, 5, 7), (2, 3, 3), (2, 3), FP8, "_scale_inv"),  # experts in one tensor
        ((5, 7), (5, 1), (1, 7), COMPRESSED, "_scale"),
        ((5, 7), (1,), (5, 7), COMPRESSED, "_scale"),
        ((5, 7), (), (5, 7), FP8 | {"weight_block_size": None}, "_scale_inv"),
    ],
)
def test_what_is_read_is_the_stored_numbers_times_their_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape, scale, block, quantization, suffix, chunk
) -> None:
    monkeypatch.setattr(shard, "_CHUNK_BYTES", chunk)
    scales = torch.rand(scale, generator=torch.Generator().manual_seed(1)) + 0.1
    checkpoint = Checkpoint.open(fp8(tmp_path / "m", shape, scales, quantization, suffix))
    assert set(checkpoint.tensors) == {NAME, "model.norm.weight"}
    assert checkpoint.config == CONFIG
    assert (checkpoint.tensors[NAME].dtype, checkpoint.tensors[NAME].shape) == (torch.bfloat16, shape)
    read = checkpoint.read([NAME])[NAME]
    assert torch.equal(read, by_elements(make_float8(*shape), scales, *block))


def test_scales_may_be_in_another_file_and_take_it_with_them(tmp_path: Path) -> None:
    folder, scale = tmp_path / "m", torch.rand(3, 3)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": FP8}))
    files = {"a.safetensors": {NAME: make_float8(5, 7)}, "b.safetensors": {NAME + "_scale_inv": scale}}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    write_index(folder, {name: file for file, tensors in files.items() for name in tensors})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == ("a.safetensors",)
    assert torch.equal(checkpoint.read([NAME])[NAME], by_elements(make_float8(5, 7), scale, 2, 3))
    transposed = checkpoint.transpose([NAME])
    assert torch.equal(transposed.read([NAME])[NAME], by_elements(make_float8(5, 7), scale, 2, 3).T)


def test_another_scale_is_another_model_and_its_nan_is_found(tmp_path: Path) -> None:
    scale = torch.ones(3, 3)
    first = Checkpoint.open(fp8(tmp_path / "a", (5, 7), scale))
    first.check_finite()
    scale[2, 2] = 2
    assert Checkpoint.open(fp8(tmp_path / "b", (5, 7), scale)).fingerprint != first.fingerprint
    scale[1, 1] = float("nan")
    with pytest.raises(UserError, match=r"tensor 'model.layers.0.up.weight_scale_inv' has 1 NaN or Inf among 9"):
        Checkpoint.open(fp8(tmp_path / "c", (5, 7), scale)).check_finite()


@pytest.mark.parametrize(
    ("scale", "quantization", "message"),
    [
        (torch.ones(3, 4), FP8, "{}_scale_inv, torch.float32 [3, 4], are not scales of {}, [5, 7], by the blocks "),
        (torch.ones(3, 3), FP8 | {"weight_block_size": None}, "{}_scale_inv, torch.float32 [3, 3], are not scales of "),
        (torch.ones(3, 3, dtype=torch.uint8), FP8, "{}_scale_inv, torch.uint8 [3, 3], are not scales of {}, [5, 7], "),
    ],
)
def test_scales_that_fit_nothing(tmp_path: Path, scale: Tensor, quantization: dict[str, Any], message: str) -> None:
    folder = fp8(tmp_path / "m", (5, 7), scale, quantization)
    assert refusal(Checkpoint.open, folder).startswith(f"{folder}: " + message.replace("{}", NAME))


def test_no_scales(tmp_path: Path) -> None:
    folder = save_single(tmp_path / "m", {NAME: make_float8(5, 7)}, CONFIG | {"quantization_config": FP8})
    assert refusal(Checkpoint.open, folder) == (
        f"{folder}: {NAME} is torch.float8_e4m3fn and has no scales ({NAME}_scale_inv); download it again"
    )


FP4 = {"quant_method": "mxfp4"}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4(folder: Path, blocks: Tensor, scales: Tensor | None) -> Path:
    tensors = {"experts.up_blocks": blocks, "model.norm.weight": torch.ones(3)}
    tensors |= {} if scales is None else {"experts.up_scales": scales}
    return save_single(folder, tensors, CONFIG | {"quantization_config": FP4})


@pytest.mark.parametrize("chunk", [shard._CHUNK_BYTES, 1], ids=["at once", "by runs of rows"])
def test_fp4_is_a_table_of_eight_numbers_their_signs_and_powers_of_two(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(shard, "_CHUNK_BYTES", chunk)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 5, 2), generator=generator, dtype=torch.uint8)
    checkpoint = Checkpoint.open(fp4(tmp_path / "m", blocks, scales))
    expected = torch.empty(3, 64, 5, dtype=torch.float64)
    for expert, column, place in product(range(3), range(5), range(64)):
        byte = int(blocks[expert, column, place // 32, place % 32 // 2])
        code = byte >> 4 if place % 2 else byte & 15
        value = E2M1[code % 8] * (-1 if code >= 8 else 1)
        expected[expert, place, column] = value * 2.0 ** (int(scales[expert, column, place // 32]) - 127)
    assert torch.equal(checkpoint.read(["experts.up"])["experts.up"].double(), expected)  # bfloat16 holds them
    split = checkpoint.split({"experts.up": shard.Stack(("a", "b", "c"))})
    assert all(torch.equal(split.read([name])[name].double(), expected[i]) for i, name in enumerate("abc"))
    assert torch.equal(split.transpose(["c"]).read(["c"])["c"].double(), expected[2].T)
    assert split.fingerprint == checkpoint.fingerprint
    scales[2, 0, 0] += 1
    other = Checkpoint.open(fp4(tmp_path / "n", blocks, scales))
    assert other.split({"experts.up": shard.Stack(("a", "b", "c"))}).fingerprint != split.fingerprint
    scales[1, 0, 0] = 255
    with pytest.raises(UserError, match=r"tensor 'experts.up_scales' has 1 NaN or Inf among 30"):
        Checkpoint.open(fp4(tmp_path / "o", blocks, scales)).check_finite()


@pytest.mark.parametrize("scales", [None, torch.ones(3, 5, 3, dtype=torch.uint8), torch.ones(3, 5, 2)])
def test_fp4_without_scales_that_fit(tmp_path, scales):
    folder = fp4(tmp_path / "m", torch.zeros(3, 5, 2, 16, dtype=torch.uint8), scales)
    with pytest.raises(
        UserError, match=r": experts.up_blocks has no scales \(experts.up_scales\) that fit it; download"
    ):
        Checkpoint.open(folder)


BY_TRANSFORMERS = "python -c \"from transformers import {} as M; M.{}.save_pretrained('NEW')\""


def by_config(config: str) -> str:
    return BY_TRANSFORMERS.format(
        f"{config}, LlamaForCausalLM", f"from_pretrained('{{folder}}', quantization_config={config}(dequantize=True))"
    )


DEQUANTIZE = BY_TRANSFORMERS.format("LlamaForCausalLM", "from_pretrained('{folder}').dequantize()")
GPTQ = "python -c \"from gptqmodel.utils.model_dequant import dequantize_model; dequantize_model('{folder}', 'NEW')\""
STRANGE = COMPRESSED | {"config_groups": {"group_0": {"weights": {"type": {"float": 8}}}}}


@pytest.mark.parametrize(
    ("quantization", "name", "convert"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ", None),
        ({"quant_method": "gptq", "bits": 4}, "GPTQ", GPTQ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", DEQUANTIZE),
        ({"load_in_8bit": True}, "bitsandbytes", DEQUANTIZE),
        (COMPRESSED | {"format": "pack-quantized"}, "compressed-tensors", by_config("CompressedTensorsConfig")),
        (STRANGE, "compressed-tensors", by_config("CompressedTensorsConfig")),
        ({"quant_method": "hqq"}, "hqq", None),
        ("something", "something", None),
        ({}, "unknown method", None),
    ],
)
def test_refused_by_name_before_weights_are_looked_at(
    tmp_path: Path, quantization: object, name: str, convert: str | None
):
    folder = tmp_path / "m"
    folder.mkdir()
    config = CONFIG | {"quantization_config": quantization, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        Checkpoint.open(folder)
    remedy = "give the checkpoint it was made from"
    if convert is not None:
        remedy += f", or make a plain copy: {convert.replace('{folder}', str(folder))}"
    assert str(error.value) == f"{folder} is quantised by {name} (quantization_config in config.json); {remedy}"


@pytest.mark.parametrize(
    "card", ["base_model: org/plain", 'base_model: "org/plain"', "license: mit\nbase_model:\n- org/plain\ntags: [a]"]
)
def test_the_checkpoint_that_a_card_names_is_the_remedy(tmp_path: Path, card: str) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "gptq"}}
    folder = save_single(tmp_path / "m", example_tensors(), config)
    (folder / "README.md").write_text(f"---\n{card}\n---\nbase_model: not/this\n")
    assert refusal(Checkpoint.open, folder) == (
        f"{folder} is quantised by GPTQ (quantization_config in config.json); its README.md names the checkpoint it "
        "was made from: `hf download org/plain`"
    )


def test_a_part_of_a_model_that_is_quantised(tmp_path: Path) -> None:
    """A quantization_config inside a nested config is found too, and is refused even where it says fp8."""
    folder = save_single(tmp_path / "m", example_tensors(), CONFIG | {"text_config": {"quantization_config": FP8}})
    with pytest.raises(UserError, match=f"^{folder} is quantised by fp8 "):
        Checkpoint.open(folder)


@pytest.mark.parametrize("groups", [1.5, True, ["group_0"], {"group_0": []}, {"group_0": {"weights": [4]}}])
def test_groups_that_are_none(tmp_path: Path, groups: object) -> None:
    """They were tracebacks."""
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    folder = save_single(tmp_path / "m", example_tensors(), CONFIG | {"quantization_config": quantization})
    with pytest.raises(UserError, match=f"^{folder} is quantised by "):
        Checkpoint.open(folder)


@pytest.mark.parametrize("given", ["m", "m/llama-Q4_K_M.gguf"])
def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "llama-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert refusal(Checkpoint.open, given) == (
        "m/llama-Q4_K_M.gguf is a GGUF file: `ckpt-prune convert m/llama-Q4_K_M.gguf -o llama-Q4_K_M-checkpoint` "
        "makes a checkpoint of it, which this command takes; `ckpt-prune validate m/llama-Q4_K_M.gguf --against MODEL` "
        "compares it with MODEL in llama.cpp"
    )


def test_gguf_beside_plain_weights_is_left_alone(tmp_path: Path) -> None:
    folder = save_single(tmp_path / "m", example_tensors())
    (folder / "model.gguf").touch()
    assert Checkpoint.open(folder).config == CONFIG


def test_weights_of_a_quantised_model_are_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patterns: list[object] = []

    def snapshot_download(model: str, **options: object) -> str:
        patterns.append(options["allow_patterns"])
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match="is quantised by AWQ"):
        resolve_model("org/name")
    assert patterns == [["config.json", "README.md", "additional_chat_templates/*.jinja"]]
