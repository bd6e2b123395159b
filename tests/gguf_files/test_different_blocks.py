"""Outputs whose blocks differ run in llama.cpp as deci or openelm, and what neither computes is refused."""

import pytest

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from tests.gguf_files.tiny import proving, save

GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
FORMS = {
    "llama": ("llama", {}, "deci"),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}, "deci"),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, "deci"),
    "granite": ("granite", GRANITE, "deci"),
    "granite-tied": ("granite", GRANITE | {"tie_word_embeddings": True}, "deci"),
    "phi3": ("phi3", {"sliding_window": None}, "deci"),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, "openelm"),
}


BARE = ["spaces.heads.compensation.method=none", "spaces.mlp.compensation.method=none"]


def pruned(folder, *settings):
    out, text = folder.parent / "pruned", proving(folder).text
    options = {"text": text, "samples": 4, "window": 32, "ratio": 0.4, "progress": False, "overrides": settings}
    ckpt_prune.prune(folder, output=out, recipe="flap-global", **options)
    return out


@pytest.mark.parametrize("name", FORMS)
def test_blocks_of_their_own_shape_compute_what_pytorch_does(name, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model_type, changes, architecture = FORMS[name]
    folder = save(tmp_path / "model", model_type, **changes)
    out = pruned(folder, *(BARE if model_type in ("phi3", "qwen3") else ()))
    exported = export_gguf(str(out), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.architecture == architecture
    assert exported.passed, exported.proof
    assert exported.proof.kl < 1e-5


def test_what_no_architecture_computes_is_refused_by_its_reason_and_leaves_nothing(tmp_path):
    folder = save(tmp_path / "model", "qwen3", head_dim=16)
    out = pruned(folder, *BARE)
    with pytest.raises(UserError, match=r"qwen3: its blocks have one shape.*openelm: its head"):
        export_gguf(str(out), tmp_path / "m.gguf", proving(folder), proof=False)
    assert not list(tmp_path.glob("*gguf*"))
