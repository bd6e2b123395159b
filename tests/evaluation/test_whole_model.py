import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.evaluation.whole_model import LoadReport, load_model, stock_load_report
from ckpt_prune.modeling_pruned import PrunedLlamaForCausalLM
from tests.evaluation.tiny import random_windows, tiny_llama
from tests.refusals import refusal

WINDOWS = random_windows(3, 8)


@pytest.fixture
def folder(tmp_path):
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


class TestLoadModel:
    def test_float32_on_cpu_by_default_and_in_evaluation_mode(self, folder):
        model = load_model(folder, device="cpu")
        assert model.dtype == torch.float32
        assert not model.training
        expected = tiny_llama(seed=1)
        expected.load_state_dict(load_file(folder / "model.safetensors"))
        assert torch.equal(model(input_ids=WINDOWS).logits, expected(input_ids=WINDOWS).logits)

    def test_random_numbers_are_never_measured(self, folder):
        edit_tensors(folder, lambda tensors: [tensors.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)])
        assert refusal(load_model, folder, device="cpu") == (
            f"{folder}: tensors are missing or of the wrong shape: model.layers.0.mlp.up_proj.weight and 1 more; "
            f"run `ckpt-prune verify {folder}` for all of them"
        )

    @pytest.mark.parametrize(
        "auto_map",
        [
            {"AutoModelForCausalLM": "modeling.Model"},
            {"AutoModelForCausalLM": "modeling_pruned.Tensor"},
            {"AutoModelForCausalLM": "modeling_pruned.PrunedMixin"},
            {"AutoModelForCausalLM": "modeling_pruned.PrunedLlamaForCausalLM", "AutoConfig": "evil.Config"},
        ],
    )
    def test_foreign_remote_code_is_refused_and_not_run(self, folder, auto_map):
        edit_config(folder, auto_map=auto_map)
        (folder / "modeling.py").write_text("raise SystemExit('remote code was run')")
        assert refusal(load_model, folder, device="cpu") == (
            f"{folder} asks for remote code that is not this tool's (auto_map in config.json): it is not run; "
            "where you have read and trust it, say --trust-remote-code"
        )

    def test_our_remote_code_goes_to_our_own_class(self, folder):
        edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_pruned.PrunedLlamaForCausalLM"})
        (folder / "modeling_pruned.py").write_text("raise SystemExit('remote code was run')")
        model = load_model(folder, device="cpu")
        assert type(model) is PrunedLlamaForCausalLM
        assert (model.training, model.dtype) == (False, torch.float32)

    def test_unreadable_folders(self, tmp_path, folder):
        config = tmp_path / "config.json"
        for spoil, message in [
            (lambda: None, f"{config}: cannot be read (No such file or directory); name a checkpoint folder"),
            (lambda: config.write_text("{"), f"{config}: not valid JSON: Expecting property name"),
            (
                lambda: config.write_text('{"model_type": "nonesuch"}'),
                f"{tmp_path} has neither model.safetensors nor model.safetensors.index.json",
            ),
        ]:
            spoil()
            assert refusal(load_model, tmp_path, device="cpu").startswith(message)


class TestStockLoadReport:
    @pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
    def test_clean_single_and_sharded(self, tmp_path, shard_size):
        tiny_llama().save_pretrained(tmp_path, max_shard_size=shard_size)
        assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "4KB")
        report = stock_load_report(tmp_path)
        assert report == LoadReport((), (), ())
        assert report.clean

    def test_each_fault_by_name(self, folder):
        def spoil(tensors):
            del tensors["model.layers.1.mlp.up_proj.weight"]
            tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(16)
            tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(20, 16)

        edit_tensors(folder, spoil)
        report = stock_load_report(folder)
        assert report == LoadReport(
            missing=("model.layers.1.mlp.up_proj.weight",),
            unexpected=("model.layers.0.mlp.down_proj.bias",),
            mismatched=("model.layers.0.mlp.gate_proj.weight: (20, 16), (24, 16)",),
        )
        assert not report.clean
