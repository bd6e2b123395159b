"""Whole models spread over memory and disk (`--device-map auto`)."""

import gc
import json
import tempfile
from pathlib import Path

import pytest
import torch

from ckpt_prune.benchmarking.participants import Participant
from ckpt_prune.benchmarking.runners import TorchRunner
from ckpt_prune.evaluation import device_map
from ckpt_prune.options.machine import SpreadOptions
from tests.cli.running import near, ok, read_refusal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are filled first")
SPREAD = ("--device-map", "auto", "--max-memory", "cpu=20KiB")
TEXT = ("--text", "calib.txt", "--window", "16", "--samples", "4")
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def test_a_model_of_which_most_is_left_on_disk_computes_the_same(place, monkeypatch, tmp_path):
    loaded = []
    original = device_map.DeviceMap.load

    def load_watched(self, *args, **options):
        loaded.append(original(self, *args, **options))
        return loaded[-1]

    monkeypatch.setattr(device_map.DeviceMap, "load", load_watched)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spread = json.loads(ok("evaluate", "pruned", "--against", "dense", *TEXT, *SPREAD, "--json"))
    assert len(loaded) == 2
    assert {"cpu", "disk"} <= set(loaded[1][0].hf_device_map.values())
    in_memory = json.loads(ok("evaluate", "pruned", "--against", "dense", *TEXT, "--json"))
    assert spread == near(in_memory)
    assert len(loaded) == 2
    loaded.clear()
    gc.collect()
    assert not list(tmp_path.glob("ckpt-prune-offload-*"))


def test_verify_and_benchmark_spread_too(place):
    assert ok("verify", "pruned", "--against", "dense", *SPREAD) == ok("verify", "pruned", "--against", "dense")
    participant = Participant(
        "A",
        "dense",
        "PyTorch",
        "dense",
        "cpu",
        1,
        "fp32",
        spread=SpreadOptions(device_map="auto", max_memory=("cpu=20KiB",)),
    )
    assert "disk" in TorchRunner(participant)._model.hf_device_map.values()


def test_a_dry_run_tells_where_a_70b_model_would_go_without_its_weights(place):
    Path("large").mkdir()
    Path("large/config.json").write_text(json.dumps(LLAMA_70B))
    room = ("--device-map", "auto", "--max-memory", "cpu=16GiB")
    assert ok("evaluate", "large", "--dry-run", *room) == (
        "large, float32:\n\n"
        "device  parts    bytes     room\n"
        "cpu         3  11.0 GB  17.2 GB\n"
        "disk       81   271 GB        -\n\n"
        "what is left on disk is read again for every batch\n"
    )


def test_a_dry_run_of_two_models_counts_both(place):
    room = ("--device-map", "auto", "--max-memory", "cpu=100KiB")
    memory = json.loads(ok("evaluate", "pruned", "--against", "dense", "--dry-run", *room, "--json"))["memory"]
    assert [entry["model"] for entry in memory] == ["pruned", "dense"]
    first, second = (entry["devices"][0] for entry in memory)
    assert (first["device"], first["room"]) == ("cpu", 100 * 1024)
    assert second["room"] == first["room"] - first["bytes"]
    assert memory[0]["dtype"] == "float32"


def test_what_this_machine_has_not_is_refused(place, monkeypatch):
    evaluate = ("evaluate", "dense", *TEXT)
    assert read_refusal(*evaluate, "--device-map", "auto", "--max-memory", "3=1GiB") == (
        "--max-memory 3: this machine has cpu"
    )
    little = ("--device-map", "auto", "--max-memory", "cpu=1KiB")
    no_room = (
        "--device-map auto: no device has room for the embeddings of dense, where its input goes: give more with "
        "--max-memory"
    )
    assert read_refusal(*evaluate, *little) == no_room
    assert read_refusal("evaluate", "dense", "--dry-run", *little) == no_room
    monkeypatch.setattr(device_map, "find_spec", lambda _name: None)
    assert read_refusal(*evaluate, "--device-map", "auto") == (
        '--device-map needs accelerate: pip install ".[devices]" in the checkout of ckpt-prune'
    )
