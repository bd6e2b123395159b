"""Every mapped family computes in llama.cpp what it computes in PyTorch."""

import pytest

from ckpt_prune.gguf.architectures import ARCHITECTURES
from ckpt_prune.gguf.export import export_gguf
from tests.gguf_files.tiny import LONGROPE, WINDOWED, proving, save
from tests.pairs import every

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", WINDOWED),
    "gemma3_text": ("gemma3_text", WINDOWED),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-longrope": ("phi3", LONGROPE),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "cohere": ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "nemotron": ("nemotron", {"head_dim": 8, "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("name", every(3, FAMILIES))
def test_a_file_computes_what_pytorch_does(name, tmp_path):
    model_type, changes = FAMILIES[name]
    folder = save(tmp_path / "model", model_type, **changes)
    exported = export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.passed, exported.proof
    assert exported.proof.kl < 1e-5
    assert exported.proof.top1 == 1
    assert (tmp_path / "m.gguf").stat().st_size == exported.bytes


def test_all_architectures_are_run():
    assert {architecture.model_type for architecture in ARCHITECTURES} == {
        model_type for model_type, _ in FAMILIES.values()
    }
