"""Parameters and FLOPs of vision transformers, OPT and BERT: of real models, and CORP's table from configs alone."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ckpt_prune
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model
from tests.cli.running import ok
from tests.contract.models import Case
from tests.encoders import CONTEXT, FOR_CORP, VARIANTS, calibrate, job_on, make, recipe, samples, stock
from tests.evaluation.tiny import random_windows
from tests.families import prune
from tests.pairs import dealt, one_of

WHAT = {
    "qk": ({"qk": 0.5}, "any"),
    "qk-padded": ({"qk": 0.5}, "padded"),
    "heads": ({"heads": 0.25}, "any"),
    "heads-padded": ({"heads": 0.25}, "padded"),
    "mlp": ({"mlp": 0.3}, "any"),
    "values": ({"values": 0.5}, "any"),
    "all": ({"qk": 0.25, "heads": 0.5, "values": 0.5, "mlp": 0.3}, "any"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    root = tmp_path_factory.mktemp("costs")
    sources = {}

    def get(variant):
        if variant not in sources:
            folder = make(root / variant, variant)
            # Two samples: what is counted does not hang on what they say.
            two = samples(variant, 2)
            sources[variant] = folder, calibrate(folder, root / f"{variant}-statistics", two, collect=FOR_CORP)
        return sources[variant]

    return get


def check(cost, model, variant):
    """Attention is eager: on a CPU the counter knows no FLOPs of the fused kernel that "sdpa" runs."""
    assert cost.parameters == model.num_parameters()
    model.set_attn_implementation("eager")
    chosen = VARIANTS[variant]
    batch = samples(variant, 1).batch(slice(1)) if chosen.vision else {"input_ids": random_windows(1, CONTEXT)}
    assert cost.tokens == (chosen.tokens if chosen.vision else CONTEXT)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(**batch)
    assert cost.flops == counter.get_total_flops()


# Costs are counted by kind of model and by space: each variant twice, and so each kind with all of them.
@pytest.mark.parametrize(("variant", "what"), one_of(6, dealt(VARIANTS, list(WHAT), 2)))
def test_parameters_bytes_and_flops_are_those_of_the_real_model(dense, variant, what, tmp_path):
    folder, statistics = dense(variant)
    ratios, container = WHAT[what]
    method = {"heads": "ridge", "values": "ridge", "mlp": "ridge"} if variant == "opt-no-bias" else None
    job = job_on(folder, recipe(ratios, methods=method, container=container), statistics)
    report = prune(job, tmp_path / "out")
    check(job.before, stock(folder, variant), variant)
    out = tmp_path / "out"
    check(job.output.cost, ckpt_prune.load(out) if report["container"]["remote_code"] else stock(out, variant), variant)
    for path, cost in ((folder, job.before), (out, job.output.cost)):
        # A safetensors file begins with the length of its header in eight bytes.
        file = path / "model.safetensors"
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert cost.bytes == file.stat().st_size - 8 - header
    padded = container == "padded" and (what == "qk-padded" or VARIANTS[variant].model_type in ("opt", "bert"))
    assert (job.output.cost.flops == job.before.flops) == padded


@pytest.mark.parametrize("variant", ["vit", "opt"])
def test_a_bias_that_is_added_counts(dense, variant, tmp_path):
    """With affine compensation OPT without biases gains one for each consumer of each block."""
    variant = {"vit": "vit", "opt": "opt-no-bias"}[variant]
    folder, statistics = dense(variant)
    counts = []
    for method in ("ridge", "affine"):
        job = job_on(folder, recipe({"mlp": 0.3}, methods=method, container="remote"), statistics)
        prune(job, tmp_path / method)
        check(job.output.cost, ckpt_prune.load(tmp_path / method), variant)
        counts.append(job.output.cost.parameters)
    assert (counts[1] > counts[0]) == (variant == "opt-no-bias")


@pytest.mark.parametrize(
    "case",
    [
        Case("dinov2_with_registers", "Dinov2WithRegistersForImageClassification"),
        Case("dinov3_vit", "DINOv3ViTModel", "use_gated_mlp"),
        Case("siglip_vision_model", "SiglipVisionModel"),
        Case("beit", "BeitForImageClassification", "use_relative_position_bias"),
        Case("beit", "BeitModel", "use_shared_relative_position_bias"),
    ],
    ids=str,
)
def test_flops_with_registers_tables_and_a_probe(case, tmp_path):
    cost = cost_of(Model.open(case.write(tmp_path / "model")))
    model = case.model()
    model.set_attn_implementation("eager")
    data = case.samples(1)
    assert (cost.parameters, cost.tokens) == (model.num_parameters(), data.tokens)
    # torch runs its own attention in one kernel where it may, of which the counter knows no FLOPs.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**data.batch(slice(1)))
    torch.backends.mha.set_fastpath_enabled(fused)
    assert cost.flops == counter.get_total_flops()


# ---- CORP's table, from configs alone ------------------------------------------------------------------------------

SIZES = {
    # hidden, blocks, heads, patch
    "T": (192, 12, 3, 16),
    "S": (384, 12, 6, 16),
    "B": (768, 12, 12, 16),
    "L": (1024, 24, 16, 16),
    "H": (1280, 32, 16, 14),
}
PAPER = {
    # millions at 50 %, scoring/README.md, section 3
    "corp": {"T": 3.5, "S": 13.2, "B": 51.2, "L": 178.4, "H": 369.8},
    "corp-mlp": {"T": 3.9, "S": 15.0, "B": 58.2, "L": 203.6, "H": 422.2},
    "corp-qk": {"T": 5.3, "S": 20.3, "B": 79.5, "L": 279.1, "H": 579.6},
}


def deit(size: str, model_type: str = "deit") -> dict:
    hidden, blocks, heads, patch = SIZES[size]
    return {
        "model_type": model_type,
        "architectures": [{"deit": "DeiTForImageClassification", "vit": "ViTForImageClassification"}[model_type]],
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "image_size": 224,
        "patch_size": patch,
        "id2label": {str(i): f"class {i}" for i in range(1000)},
        "label2id": {f"class {i}": i for i in range(1000)},
    }


def parameters(size: str, qk: int, mlp: int, special: int = 2) -> int:
    """Added up module by module, biases and special tokens included."""
    hidden, blocks, heads, patch = SIZES[size]
    wide, narrow = hidden, heads * qk
    attention = 2 * (hidden + 1) * narrow + 2 * (hidden + 1) * wide
    block = attention + (hidden + 1) * mlp + (mlp + 1) * hidden + 4 * hidden
    tokens = (224 // patch) ** 2 + special
    embeddings = (3 * patch**2 + 1) * hidden + (tokens + special) * hidden
    return embeddings + blocks * block + 2 * hidden + (hidden + 1) * 1000


# A deit and a vit differ by one token: each size and each recipe with both.
@pytest.mark.parametrize(
    ("size", "recipe_name", "model_type"),
    [
        (size, name, ["deit", "vit"][(row + column) % 2])
        for row, size in enumerate(SIZES)
        for column, name in enumerate(PAPER)
        if size not in "LH" or row % 3 == column  # large ones are slow to lay out
    ],
)
def test_corps_parameter_counts(tmp_path, size, recipe_name, model_type):
    """To the last parameter by hand, and to the paper's digits.

    The paper's models have a class token alone, like a vit here; the distillation token that transformers' deit always
    has rounds 422.249 M up to 422.3 M.
    """
    (tmp_path / "config.json").write_text(json.dumps(deit(size, model_type)))
    summary = json.loads(ok("inspect", str(tmp_path), "--recipe", recipe_name, "--ratio", "0.5", "--json"))
    hidden, _, heads, _ = SIZES[size]
    head_dim = hidden // heads
    qk = head_dim if recipe_name == "corp-mlp" else head_dim // 2
    mlp = 4 * hidden if recipe_name == "corp-qk" else 2 * hidden
    special = {"deit": 2, "vit": 1}[model_type]
    assert summary["parameters"] == parameters(size, head_dim, 4 * hidden, special)
    (after,) = summary["pruned"]
    assert after["parameters"] == parameters(size, qk, mlp, special)
    assert (
        after["units"] == {"corp": {"qk": qk, "mlp": mlp}, "corp-mlp": {"mlp": mlp}, "corp-qk": {"qk": qk}}[recipe_name]
    )
    off = model_type == "deit" and (size, recipe_name) == ("H", "corp-mlp")
    assert f"{after['parameters'] / 1e6:.1f}" == ("422.3" if off else f"{PAPER[recipe_name][size]:.1f}")


def test_flops_of_deit_tiny_are_those_of_the_papers(tmp_path):
    """1.26 G multiply-adds of the dense one, as its authors count (1.3 G)."""
    (tmp_path / "config.json").write_text(json.dumps(deit("T")))
    summary = json.loads(ok("inspect", str(tmp_path), "--recipe", "corp", "--ratio", "0.5", "--json"))
    tokens, hidden = 198, 192
    per_block = tokens * (4 * hidden**2 + 8 * hidden**2) + 2 * tokens**2 * hidden
    dense = 12 * per_block + 196 * 768 * hidden + hidden * 1000
    assert summary["flops"] == 2 * dense
    assert summary["tokens"] == tokens
    after = tokens * (3 * hidden**2 + 4 * hidden**2) + tokens**2 * (hidden + hidden // 2)
    assert summary["pruned"][0]["flops"] == 2 * (12 * after + 196 * 768 * hidden + hidden * 1000)
