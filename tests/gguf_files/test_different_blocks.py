"""Outputs whose blocks differ run in llama.cpp: as deci, openelm or gemma4, or filled up with zeros as their own."""

import pytest

import ckpt_prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.gguf.export import export_gguf
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.model.containers.opening import Opening, open_model
from tests.gguf_files.tiny import (
    DELTA,
    FALCON_H1,
    GEMMA4,
    GRANITE,
    GRANITE_4,
    HYBRID,
    LONGROPE,
    MAMBA,
    MIXTURE,
    NEMOTRON_H,
    STATES,
    WINDOWED,
    proving,
    save,
)
from tests.pairs import every, first_of_each

FORMS = {
    "llama": ("llama", {}, "deci"),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}, "deci"),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, "deci"),
    "granite": ("granite", GRANITE, "deci"),
    "granite-tied": ("granite", GRANITE | {"tie_word_embeddings": True}, "deci"),
    "phi3": ("phi3", {"sliding_window": None}, "deci"),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, "openelm"),
    "qwen3-untied": ("qwen3", {"head_dim": 16}, "qwen3"),
    "gemma3_text": ("gemma3_text", WINDOWED, "gemma3"),
    "afmoe": ("afmoe", MIXTURE | {"head_dim": 16, "sliding_window": 20, "mup_enabled": True}, "afmoe"),
    "gemma4_text": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, "gemma4"),
    "lfm2": ("lfm2", HYBRID | {"block_auto_adjust_ff_dim": False}, "lfm2"),
    "qwen3_5_text": ("qwen3_5_text", DELTA, "qwen35"),
    "granitemoehybrid": ("granitemoehybrid", GRANITE_4, "granitehybrid"),
    "falcon_h1": ("falcon_h1", FALCON_H1, "falcon-h1"),
    "nemotron_h": ("nemotron_h", NEMOTRON_H, "nemotron_h"),
    "mamba": ("mamba", STATES, "mamba"),
    "bamba": ("bamba", MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]}, "granitehybrid"),
    "phi3-longrope": ("phi3", LONGROPE, "phi3"),
    "starcoder2": ("starcoder2", {"sliding_window": None}, "starcoder2"),
    "gpt2": ("gpt2", {"num_hidden_layers": 2, "n_inner": 48, "intermediate_size": None}, "gpt2"),
    "falcon": ("falcon", {"num_hidden_layers": 2}, "falcon"),
    "falcon-groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "falcon"),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 2}, "gptneox"),
}
HAS_BIASES = ("llama", "mistral", "qwen2", "granite", "starcoder2", "gpt2", "gpt_neox")
HEADS_FIXED = ("gpt2", "falcon", "gptneox")
"""Architectures whose stock classes have heads that are as wide together as the model."""


BARE = ["spaces.heads.compensation.method=none", "spaces.mlp.compensation.method=none"]


def prune_unevenly(folder, *settings, recipe="flap-global", ratio=0.4):
    out, text = folder.parent / "pruned", proving(folder).text
    options = {"text": text, "samples": 4, "window": 32, "ratio": ratio, "progress": False, "overrides": settings}
    ckpt_prune.prune(folder, output=out, recipe=recipe, **options)
    return out


# Both are filled up, and have Mamba 2, or biases in fused projections.
@pytest.mark.parametrize(
    "name",
    first_of_each(FORMS, lambda name: FORMS[name][2].replace("falcon-h1", "granitehybrid").replace("gptneox", "gpt2")),
)
def test_blocks_of_their_own_shape_compute_what_pytorch_does(name, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model_type, changes, architecture = FORMS[name]
    folder = save(tmp_path / "model", model_type, **changes)
    # One key says how wide the experts of an afmoe are. Of a falcon three heads are left, which share one of keys.
    if name in ("afmoe", "falcon"):
        (tmp_path / "heads.yaml").write_text(
            "{version: 1, name: heads, container: remote, widths: per_layer, allocation: across-layers, "
            "spaces: {heads: {score: magnitude}}}"
        )
        out = prune_unevenly(folder, recipe=str(tmp_path / "heads.yaml"))
    elif model_type == "gemma4_text":  # its heads cannot be pruned
        out = prune_unevenly(
            folder, *BARE[1:], "widths=per_layer", "allocation=across-layers", "container=remote", recipe="corp-mlp"
        )
    elif model_type == "mamba":
        out = prune_unevenly(folder, "spaces.heads.optional=true", recipe="ridge")
    else:
        container = ("container=any",) if architecture in HEADS_FIXED else ()
        out = prune_unevenly(folder, *container, *(() if model_type in HAS_BIASES else BARE))
    exported = export_gguf(str(out), tmp_path / "m.gguf", proving(folder), kind="f32")
    assert exported.architecture == architecture
    alike = architecture not in ("deci", "openelm", "nemotron_h", "gemma4")
    assert alike == any("filled up with zeros to" in note for note in exported.notes)
    assert alike == any(note.startswith("zeros take ") for note in exported.notes)
    assert exported.passed, exported.proof
    assert exported.proof.kl < 1e-5


def drop_attention(folder, blocks):
    out = folder.parent / "pruned"
    settings = [f"depth={{part: attention, blocks: {blocks}}}", "container=remote"]
    ckpt_prune.prune(folder, output=out, recipe="shortgpt", overrides=settings, evaluate_samples=0, progress=False)
    return out


@pytest.mark.parametrize(("name", "blocks"), [("llama", [0, 2]), ("phi3", [1]), ("qwen2", [0, 1])])
def test_blocks_without_attention_compute_what_pytorch_does(name, blocks, tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    model_type, changes, _ = FORMS[name]
    out = drop_attention(save(tmp_path / "model", model_type, **changes), blocks)
    exported = export_gguf(str(out), tmp_path / "m.gguf", proving(out), kind="f32")
    assert exported.architecture == "deci"
    assert exported.passed, exported.proof
    tensors = open_gguf(exported.path).tensors
    has = {int(name.split(".")[1]) for name in tensors if name.endswith("attn_norm.weight")}
    assert set(blocks) - has == set(blocks) - {0}
    # llama.cpp divides by the heads of the first block.
    assert (0 in blocks) == any(note.startswith("block 0 has no attention, and gets") for note in exported.notes)


def test_blocks_without_attention_have_no_place_in_other_architectures(tmp_path):
    folder = save(tmp_path / "model", "starcoder2", sliding_window=None)
    out = drop_attention(folder, [1])
    with pytest.raises(UserError, match=r"starcoder2: all of its blocks have attention, and here some have none"):
        export_gguf(str(out), tmp_path / "m.gguf", proving(folder), proof=False)


def test_columns_are_filled_up_to_whole_blocks_of_a_type(tmp_path):
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install xllamacpp")
    folder = save(tmp_path / "model", "llama", intermediate_size=96)
    out = prune_unevenly(folder)
    exported = export_gguf(str(out), tmp_path / "m.gguf", proving(folder), kind="q8_0")
    assert exported.passed, exported.proof
    assert "zeros to multiples of 32 (prune with --for llama.cpp:q8_0, which makes" in "\n".join(exported.notes)
    says = "zeros to multiples of 32 (prune with --set spaces.mlp.multiple_of=32, which makes widths such multiples, "
    assert says in "\n".join(lay_out(open_model(str(out), Opening(trust=True)), "q4_k_m").notes)
    out.rename(tmp_path / "odd")
    even = open_model(str(prune_unevenly(folder, "spaces.mlp.multiple_of=32", recipe="flap")), Opening(trust=True))
    widths = even.unit_counts("mlp")
    assert widths == [64] * 6
    assert "multiples of 32" not in "\n".join(lay_out(even, "q4_k_m").notes)
    tensors = open_gguf(exported.path).tensors
    assert {tensor.kind.name for name, tensor in tensors.items() if "ffn_down.weight" in name} == {"Q8_0"}


def test_what_no_architecture_computes_is_refused_by_its_reason_and_leaves_nothing(tmp_path):
    folder = save(tmp_path / "model", "qwen3", head_dim=16)
    out = prune_unevenly(folder, "container=remote")
    with pytest.raises(UserError, match=r"openelm: its head.*qwen3: it has no place for .*bias"):
        export_gguf(str(out), tmp_path / "m.gguf", proving(folder), proof=False)
    assert not list(tmp_path.glob("*gguf*"))


MAVERICK = {"num_local_experts": 128, "intermediate_size": 8, "use_qk_norm": False}


@pytest.mark.parametrize(
    ("model_type", "changes", "recipe", "says"),
    every(
        2,
        [
            ("falcon", {}, "corp-mlp", r"falcon: it computes bias False, and config.json has True\): take one that"),
            ("llama4_text", MAVERICK, "expert-frequency", "norms queries and keys of models without 128 experts alone"),
        ],
    ),
)
def test_settings_that_llama_cpp_does_not_compute_are_refused_before_work(model_type, changes, recipe, says, tmp_path):
    folder = save(tmp_path / "model", model_type, num_hidden_layers=2, **changes)
    with pytest.raises(UserError, match=says):
        prune_unevenly(folder, "runs_on=[llama.cpp]", recipe=recipe, ratio=0.3)
    assert not (tmp_path / "pruned").exists()


def test_thin_matrices_are_refused_by_what_they_are(tmp_path):
    folder = save(tmp_path / "model", "llama")
    ckpt_prune.prune(folder, output=tmp_path / "thin", recipe="svd-llm-w", evaluate_samples=0, progress=False,
                     overrides=["low_rank.method=plain"])  # fmt: skip
    with pytest.raises(UserError, match="does not take outputs with two thin matrices in place of one: take"):
        export_gguf(str(tmp_path / "thin"), tmp_path / "m.gguf", proving(folder), proof=False)
    assert not list(tmp_path.glob("*gguf*"))


@pytest.mark.parametrize("rotated", [[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]], ids=str)
def test_rotary_positions_in_other_blocks_than_llama_cpp_has_them_are_refused(rotated, tmp_path):
    folder = save(tmp_path / "model", "smollm3", no_rope_layers=rotated)
    with pytest.raises(UserError, match="every 4th of its blocks has no rotary positions, and here others have"):
        export_gguf(str(folder), tmp_path / "m.gguf", proving(folder), proof=False)
    usual = save(tmp_path / "usual", "smollm3", no_rope_layers=[1, 1, 1, 0, 1, 1])
    assert export_gguf(str(usual), tmp_path / "m.gguf", proving(usual), proof=False).architecture == "smollm3"


def test_narrower_heads_are_not_taken_for_fewer(tmp_path):
    """Four heads of 6 have as many rows as three of 8."""
    folder = save(tmp_path / "model", "llama", num_key_value_heads=4)
    (tmp_path / "narrow.yaml").write_text(
        "{version: 1, name: narrow, ratio: 0.25, container: remote, widths: per_layer, layers: '2:4', "
        "spaces: {rotary: {score: logit-energy, ratio: 0.25}, values: {score: principal}}}"
    )
    out = prune_unevenly(folder, recipe=str(tmp_path / "narrow.yaml"), ratio=None)
    with pytest.raises(UserError, match="all heads have 8 rows of q, k and v each, and those of block 2 have others"):
        export_gguf(str(out), tmp_path / "m.gguf", proving(folder), proof=False)
