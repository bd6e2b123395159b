"""The file that builds outputs in MLX-LM; run by mlx-lm itself if it is installed (extra `mlx`)."""

import json
from pathlib import Path

import pytest
import torch

import ckpt_prune
from tests.contract.models import Case

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "opt": "OPTForCausalLM",
}


def prune_tiny(folder: Path, model_type: str) -> Path:
    """A tiny model of a family whose blocks keep other numbers of heads and columns."""
    dense, out = Case(model_type, ARCHITECTURES[model_type]).write(folder / "dense"), folder / "out"
    uneven = {"widths": "per_layer", "allocation": "across-layers", "container": "remote", "ratio": 0.3}
    ckpt_prune.prune(dense, recipe="magnitude", overrides=uneven, output=out, progress=False)
    return out


@pytest.mark.parametrize(("model_type", "named"), [("qwen2", True), ("opt", False)])
def test_the_file_travels_with_families_that_mlx_lm_computes(tmp_path, model_type, named):
    out = prune_tiny(tmp_path, model_type)
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModel"].startswith("modeling_pruned.Pruned")
    assert config.get("model_file") == ("mlx_pruned.py" if named else None)
    assert (out / "mlx_pruned.py").is_file() == named
    assert ckpt_prune.verify(out).passed


def test_a_changed_file_does_not_verify(tmp_path):
    out = prune_tiny(tmp_path, "llama")
    (out / "mlx_pruned.py").write_text("raise SystemExit")
    assert not ckpt_prune.verify(out).passed


def test_the_base_model_loads_by_auto_model(tmp_path):
    out = prune_tiny(tmp_path, "llama")
    from transformers import AutoModel

    base = AutoModel.from_pretrained(out, trust_remote_code=True).eval()
    ids = torch.arange(4, 12)[None]
    with torch.inference_mode():
        expected = ckpt_prune.load(out).model(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, expected)


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name != "opt"])
def test_mlx_lm_computes_what_pytorch_does(tmp_path, model_type):
    mx = pytest.importorskip("mlx.core", reason="mlx-lm is not installed (extra mlx)")
    from mlx_lm.utils import load_model

    out = prune_tiny(tmp_path, model_type)
    ids = torch.randint(4, 20, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = ckpt_prune.load(out)(ids).logits.float().log_softmax(-1)
    model, _ = load_model(out, trust_remote_code=True)
    logits = torch.tensor(model(mx.array(ids.tolist())).astype(mx.float32).tolist())
    torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=0, atol=2e-5)
