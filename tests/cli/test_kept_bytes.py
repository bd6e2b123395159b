"""Mixtures in MXFP4 or fp8: pruned as the bfloat16 model that they make, and experts that stay keep their bytes."""

import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.gguf.losses import predict_type_losses
from ckpt_prune.gguf.types import default_type
from ckpt_prune.measure.samples.samples import TokenWindows
from ckpt_prune.model.containers.opening import open_model
from tests import undescribed
from tests.cli.running import TEXT, ok, read_json, resume_job, run, same_files, set_config
from tests.cli.test_fp8 import BLOCK, FP8, quantise
from tests.gguf_files.tiny import DEMO
from tests.interrupting import interrupt_at
from tests.undescribed import make_model

KEPT = 4
EXPERTS = 6
FP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
REAP = ["prune", "source", "--recipe", "reap", "--ratio", "0.34", *TEXT]


def save(name: str, tensors: dict[str, torch.Tensor], like: str) -> None:
    Path(name).mkdir()
    for file in Path(like).iterdir():
        if file.suffix == ".json":
            (Path(name) / file.name).write_bytes(file.read_bytes())
    save_file(tensors, f"{name}/model.safetensors", metadata={"format": "pt"})


def make(model_type: str, **changes: object) -> dict[str, torch.Tensor]:
    """Save `base`, a model in bfloat16, with a tokenizer; return its tensors."""
    with quiet_transformers():
        make_model(model_type, **changes | {"vocab_size": 2048}).to(torch.bfloat16).save_pretrained("base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, "base")
    return load_file("base/model.safetensors")


@pytest.fixture
def in_fp4(place: Path) -> None:
    """`source`, a gpt-oss in MXFP4, and `plain`, what transformers reads of it."""
    generator, stored = torch.Generator().manual_seed(0), {}
    for name, weight in make("gpt_oss", num_local_experts=EXPERTS, intermediate_size=64).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        groups = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
    save("source", stored, "base")
    set_config("source", quantization_config=FP4)
    with quiet_transformers():
        loaded = transformers.AutoModelForCausalLM.from_pretrained("source", dtype=torch.bfloat16)
    save("plain", {name: weight.contiguous() for name, weight in loaded.state_dict().items()}, "base")


@pytest.fixture
def in_fp8(place: Path) -> None:
    """`source`, a mixture with every linear weight of its blocks in fp8."""
    stored = {}
    for name, weight in make("qwen3_moe", **undescribed.EXPERTS | {"num_experts": EXPERTS}).items():
        stored[name] = weight
        if "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"], _ = quantise(weight.float())
    save("source", stored, "base")
    set_config("source", quantization_config=FP8)
    assert FP8["weight_block_size"][0] == BLOCK


@pytest.mark.usefixtures("in_fp4")
def test_what_is_fitted_is_that_of_the_plain_model():
    for name in ("source", "plain"):
        output = ok("prune", name, "--recipe", "ridge", "--ratio", "0.5", *TEXT, "-o", f"out-{name}")
        says = re.search(r"the output has plain weights, ([\d.]+) KB where MODEL has ([\d.]+) KB in mxfp4: ", output)
        assert (says is not None) == (name == "source")
        assert says is None or float(says[1]) > float(says[2])
    assert Path("out-source/model.safetensors").read_bytes() == Path("out-plain/model.safetensors").read_bytes()
    assert "quantization_config" not in read_json("out-source/config.json")
    assert re.search(r"KB in 1 file\(s\); in files mxfp4, \S+ KB\n", ok("inspect", "source"))


def kept_experts(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return [[torch.equal(expert, each) for each in before].index(True) for expert in after]


@pytest.mark.usefixtures("in_fp4")
def test_experts_that_stay_keep_their_bytes():
    output = ok(*REAP, "-o", "whole")
    assert "experts that stay keep their bytes (mxfp4)" in output
    ok(*REAP[:1], "plain", *REAP[2:], "-o", "by-plain")
    before, after = load_file("source/model.safetensors"), load_file("whole/model.safetensors")
    plain = load_file("by-plain/model.safetensors")
    read = Checkpoint.open("whole")
    assert read.tensors.keys() == plain.keys()
    assert all(torch.equal(read.read([name])[name], tensor) for name, tensor in plain.items())
    for block in range(4):
        start = f"model.layers.{block}.mlp.experts"
        names = [
            f"{start}.{weight}_{part}" for weight in ("gate_up_proj", "down_proj") for part in ("blocks", "scales")
        ]
        chosen = [kept_experts(before[name], after[name]) for name in names]
        assert all(each == chosen[0] and len(each) == KEPT for each in chosen)
        assert {after[name].dtype for name in names} == {torch.uint8}
    assert (
        read_json("whole/config.json")["quantization_config"] == read_json("source/config.json")["quantization_config"]
    )
    stored = sum(tensor.nbytes for tensor in after.values())
    report = read_json("whole/ckpt_prune.json")
    assert report["after"]["bytes"] == stored
    assert report["before"]["bytes"] == sum(tensor.nbytes for tensor in before.values())
    ok("verify", "whole", "--against", "source")
    with quiet_transformers():
        stock, info = transformers.AutoModelForCausalLM.from_pretrained(
            "whole", dtype=torch.bfloat16, output_loading_info=True
        )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, plain[name]) for name, tensor in stock.state_dict().items())
    assert default_type(Checkpoint.open("whole")) == "mxfp4"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, CheckpointWriter, "commit", 2)
        assert run(*REAP, "-o", "out").exit_code == 130
    assert "block 0" in (done := Journal.read(Path("out.partial")).entries)
    assert "block 2" not in done
    resume_job(REAP)


@pytest.mark.usefixtures("in_fp4")
def test_sizes_are_those_of_files():
    tensors = load_file("source/model.safetensors")
    whole = sum(tensor.nbytes for tensor in tensors.values())
    per_expert = sum(each.nbytes // EXPERTS for name, each in tensors.items() if "experts" in name or "router" in name)
    for kept in (2, 4, 5):
        size = whole - (EXPERTS - kept) * per_expert
        output = ok("prune", "source", "--recipe", "reap", "--target-bytes", str(size), "--dry-run")
        assert f"kept per block: experts {kept}/6" in output
        assert "fewer bits lose less" not in output
    share = f"{100 * (whole - 2.5 * per_expert) / whole:.1f}%"
    assert "experts 3/6" in ok("prune", "source", "--recipe", "reap", "--target-bytes", share, "--dry-run")
    ok("prune", "source", "--vocabulary", "first:1000", *TEXT, "-o", "fewer")
    before, after = load_file("source/model.safetensors"), load_file("fewer/model.safetensors")
    assert after["model.embed_tokens.weight"].shape[0] < before["model.embed_tokens.weight"].shape[0]
    stored = [name for name in before if name.endswith(("_blocks", "_scales"))]
    assert all(torch.equal(after[name], before[name]) for name in stored)
    assert read_json("fewer/config.json")["quantization_config"] == FP4


@pytest.mark.usefixtures("in_fp4")
def test_budgets_of_files_keep_what_is_in_mxfp4():
    pytest.importorskip("libgguf")
    windows = TokenWindows(torch.randint(2, 20, (2, 16), generator=torch.Generator().manual_seed(0)))
    how = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    losses = predict_type_losses(open_model("source"), windows, {}, "q8_0", **how).weighed
    for name, by_kind in losses.items():
        assert (Kind.MXFP4 in by_kind) == ("_exps." in name)
        if "_exps." in name:
            assert by_kind[Kind.MXFP4] <= min(loss for kind, loss in by_kind.items() if kind != Kind.Q8_0)


@pytest.mark.usefixtures("in_fp8")
def test_with_an_adapter_the_output_has_plain_weights():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(Path("source").absolute()))
    config.save_pretrained("adapter")
    query = "model.layers.0.self_attn.q_proj"
    outputs, inputs = Checkpoint.open("source").tensors[f"{query}.weight"].shape
    low_rank = {"A": torch.ones(2, inputs), "B": torch.ones(outputs, 2)}
    tensors = {f"base_model.model.{query}.lora_{side}.weight": each for side, each in low_rank.items()}
    save_file(tensors, "adapter/adapter_model.safetensors")
    assert "the output has plain weights" in ok(REAP[0], "adapter", *REAP[2:], "-o", "merged")
    assert "quantization_config" not in read_json("merged/config.json")
    merged, pruned = Checkpoint.open("adapter"), load_file("merged/model.safetensors")
    assert torch.equal(pruned[f"{query}.weight"], merged.read([f"{query}.weight"])[f"{query}.weight"])
    assert read_json("merged/ckpt_prune.json")["after"]["bytes"] == sum(tensor.nbytes for tensor in pruned.values())


@pytest.mark.usefixtures("in_fp8")
def test_a_mixture_in_fp8_stays_in_fp8():
    ok(*REAP, "-o", "whole")
    before, after = load_file("source/model.safetensors"), load_file("whole/model.safetensors")
    assert {tensor.dtype for name, tensor in after.items() if name.endswith("_proj.weight")} == {torch.float8_e4m3fn}
    assert read_json("whole/config.json")["quantization_config"] == FP8
    for name, tensor in after.items():
        if ".experts." not in name:
            same = before[name][: len(tensor)] if tensor.shape != before[name].shape else before[name]
            assert torch.equal(tensor.view(torch.uint8), same.view(torch.uint8)) or "mlp.gate" in name
            continue
        start, _, rest = name.partition(".experts.")
        others = [before[f"{start}.experts.{number}.{rest.partition('.')[2]}"] for number in range(EXPERTS)]
        assert any(torch.equal(tensor.view(torch.uint8), each.view(torch.uint8)) for each in others)
    ok("verify", "whole", "--against", "source")
    set_config("source", quantization_config={**FP8, "activation_scheme": "static"})
    ok(*REAP, "-o", "plain-output")
    assert "quantization_config" not in read_json("plain-output/config.json")
    assert not same_files("whole", "plain-output")
