import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.parity import logits_difference, stock_load_report
from ckpt_prune.evaluation.whole_model import LoadReport, load_model
from ckpt_prune.modeling_pruned import PrunedLlamaForCausalLM
from tests.evaluation.tiny import random_windows, tiny_llama

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
        assert logits_difference(model, expected, WINDOWS) == 0

    def test_asked_for_dtype(self, folder):
        assert load_model(folder, device="cpu", dtype=torch.bfloat16).dtype == torch.bfloat16

    def test_quiet_and_settings_restored(self, folder, capfd):
        before = logging.get_verbosity(), logging.is_progress_bar_enabled()
        edit_tensors(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(24)}))
        load_model(folder, device="cpu")
        assert capfd.readouterr() == ("", "")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before

    def test_random_numbers_are_never_measured(self, folder):
        edit_tensors(folder, lambda tensors: [tensors.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)])
        with pytest.raises(UserError) as caught:
            load_model(folder, device="cpu")
        assert str(caught.value) == (
            f"{folder}: tensors are missing or of the wrong shape: model.layers.0.mlp.up_proj.weight and 1 more; "
            f"run `ckpt-prune verify {folder}` for all of them"
        )

    def test_foreign_remote_code_is_refused_and_not_run(self, folder):
        edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
        (folder / "modeling.py").write_text("raise SystemExit('remote code was run')")
        with pytest.raises(UserError) as caught:
            load_model(folder, device="cpu")
        assert str(caught.value) == (
            f"{folder} asks for remote code that is not this tool's (auto_map in config.json): it is not run; "
            "where you have read and trust it, say --trust-remote-code"
        )

    def test_our_remote_code_goes_to_our_own_class(self, folder):
        edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_pruned.PrunedLlamaForCausalLM"})
        (folder / "modeling_pruned.py").write_text("raise SystemExit('remote code was run')")
        model = load_model(folder, device="cpu")
        assert type(model) is PrunedLlamaForCausalLM
        assert (model.training, model.dtype) == (False, torch.float32)

    def test_our_remote_code_must_be_whole_too(self, folder):
        edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling_pruned.PrunedLlamaForCausalLM"})
        edit_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.raises(UserError, match=r"tensors are missing or of the wrong shape: model\.norm\.weight; run"):
            load_model(folder, device="cpu")
        edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
        with pytest.raises(UserError, match=r"tensors are missing or of the wrong shape: model\.norm\.weight: \(3,\)"):
            load_model(folder, device="cpu")

    @pytest.mark.parametrize("name", ["Tensor", "BertModel", "PrunedMixin", "NarrowMixin", "Any"])
    def test_not_every_name_in_our_file_is_a_model_of_ours(self, folder, name):
        edit_config(folder, auto_map={"AutoModelForCausalLM": f"modeling_pruned.{name}"})
        with pytest.raises(UserError, match="remote code that is not this tool's"):
            load_model(folder, device="cpu")

    def test_code_beside_ours_is_not_ours(self, folder):
        ours = "modeling_pruned.PrunedLlamaForCausalLM"
        edit_config(folder, auto_map={"AutoModelForCausalLM": ours, "AutoConfig": "evil.Config"})
        with pytest.raises(UserError, match="remote code that is not this tool's"):
            load_model(folder, device="cpu")

    def test_a_config_that_names_no_class(self, folder):
        edit_config(folder, architectures=None)
        assert type(load_model(folder, device="cpu")).__name__ == "LlamaForCausalLM"

    def test_unreadable_folders(self, tmp_path, folder):
        config = tmp_path / "config.json"
        for spoil, said in [
            (lambda: None, f"{config}: cannot be read (No such file or directory); name a checkpoint folder"),
            (lambda: config.write_text("{"), f"{config}: not valid JSON: Expecting property name"),
            (
                lambda: config.write_text('{"model_type": "nonesuch"}'),
                f"{tmp_path} has neither model.safetensors nor model.safetensors.index.json",
            ),
        ]:
            spoil()
            with pytest.raises(UserError) as caught:
                load_model(tmp_path, device="cpu")
            assert str(caught.value).startswith(said)
            assert "\n" not in str(caught.value)

    def test_pickles_are_not_read(self, folder):
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        with pytest.raises(
            UserError, match=r"has only pickled weights \(pytorch_model\.bin\), which are never unpickled"
        ):
            load_model(folder, device="cpu")


class TestStockLoadReport:
    @pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
    def test_clean_single_and_sharded(self, tmp_path, shard_size):
        tiny_llama().save_pretrained(tmp_path, max_shard_size=shard_size)
        assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "4KB")
        report = stock_load_report(tmp_path)
        assert report == LoadReport((), (), ())
        assert report.clean

    def test_tied_heads_are_no_fault(self, tmp_path):
        tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
        assert stock_load_report(tmp_path).clean

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


class TestLogitsDifference:
    def test_is_the_largest_absolute_difference(self):
        a, b = tiny_llama(), tiny_llama(1)
        with torch.no_grad():
            expected = (a(input_ids=WINDOWS).logits - b(input_ids=WINDOWS).logits).abs().max().item()
        assert logits_difference(a, b, WINDOWS, batch_size=2) == pytest.approx(expected, rel=1e-6)
        assert logits_difference(a, a, WINDOWS) == 0

    def test_not_a_number_is_not_hidden(self):
        broken = tiny_llama()
        broken.lm_head.weight.data[3] = torch.nan
        assert math.isnan(logits_difference(tiny_llama(), broken, WINDOWS))

    def test_vocabularies_must_be_of_one_size(self):
        with pytest.raises(UserError, match=r"^the vocabularies differ, 40 and 50 tokens"):
            logits_difference(tiny_llama(), tiny_llama(vocab=50), WINDOWS)
