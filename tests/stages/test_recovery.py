"""Recovered outputs of every family and every kind of pruning: what changes, what may not, and how well they are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_prune.common.filenames import REPORT, ROTATIONS
from ckpt_prune.runner.sections import titled_sections
from ckpt_prune.show.html import print_page
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.report import read_report_or_plan
from ckpt_prune.verification.verify import verify
from tests import encoders, families
from tests.families import BLOCKS, one_group
from tests.pairs import dealt, every, one_of
from tests.stages.recovering import (
    SAMPLES,
    assert_recovered,
    dense_states,
    is_linear,
    last_states,
    pruned_by,
    recover_pruned,
    training_data,
)
from tests.stages.test_rotations import random_rotations, rotating
from tests.stages.whole import data_of, make_recipe, tensors_of, watch_reading

HEADS = ("dinov2-classifier", "dinov2-swiglu-classifier", "deit-model", "opt-model", "opt-tied")
HEADS += ("bert-pretraining", "bert-sequence-classification")
"""What differs from another variant outside its blocks alone, which recovery does not look at."""
VARIANTS = [variant for variant in (*families.VARIANTS, *encoders.VARIANTS) if variant not in HEADS]


def check(dense: Path, pruned: Path, out: Path, variant: str) -> dict:
    """Recover, and hold the output against whole models: the last hidden states say what the report says."""
    data = training_data(variant)
    report = recover_pruned(pruned, dense, out, data)
    changed = assert_recovered(out, pruned, report, dense)
    assert any(changed.values())
    target = dense_states(dense, variant)
    for folder, key in ((pruned, "mse_before"), (out, "mse_after")):
        mse = float((last_states(folder, variant, data) - target).square().mean())
        assert report["layers"][-1][key] == pytest.approx(mse, rel=1e-4), key
    return report


# ---- families ----------------------------------------------------------------------------------------------------


def narrower(variant: str) -> FullRecipe:
    """Fewer heads and columns, in whatever holds them."""
    if variant in families.VARIANTS:
        return families.recipe("none", "magnitude", heads=one_group(variant), mlp=0.5, container="any")
    space = {"score": "magnitude", "ratio": 0.5, "compensation": {"method": "none"}}
    spaces = {"heads": space, "mlp": space}
    return FullRecipe.model_validate({"version": 1, "name": "test", "container": "any", "spaces": spaces})


@pytest.mark.parametrize(("variant", "way"), one_of(9, dealt(VARIANTS, ["masked", "narrower"])))
def test_every_variant(dense, tmp_path, variant, way):
    """Masked or narrower, in turns: every family in both, as a family has several variants side by side."""
    folder = dense.folder(variant)
    recipe = make_recipe("magnitude") if way == "masked" else narrower(variant)
    pruned = pruned_by(folder, tmp_path / "pruned", recipe, None)
    report = check(folder, pruned, tmp_path / "out", variant)
    if way == "narrower":
        before, after = (sum(t.numel() for t in tensors_of(checkpoint).values()) for checkpoint in (folder, pruned))
        assert after < before
        assert {site["space"] for site in report["sites"]} == {"heads", "mlp"}
        return
    linears = [n for n, t in tensors_of(pruned).items() if is_linear(n, tensors_of(pruned)) and n.endswith("weight")]
    assert len(report["linears"]) == len(linears)
    zeros = {linear["weight"]: linear["zeros"] for linear in report["linears"]}
    after = tensors_of(tmp_path / "out")
    assert all(int((after[name] == 0).sum()) == zeros[name] > 0 for name in linears)


# ---- kinds of pruning --------------------------------------------------------------------------------------------

PAD = {"container": "padded"}
KINDS: dict[str, tuple[str, FullRecipe, str]] = {
    "relabelled mistral": ("llama", families.recipe("ridge", heads=0.25, lam=0.1), "mistral"),
    "relabelled seed_oss, biases": ("llama", families.recipe("bias", heads=0.25), "seed_oss"),
    "relabelled seed_oss from mistral": ("mistral-mha", families.recipe("bias", heads=0.25), "seed_oss"),
    "per layer": ("llama-gqa-tied", load_recipe("flap-global", ratio=0.4), "remote"),
    "per layer seed_oss": ("seed_oss-biases-mha", load_recipe("flap-global", ratio=0.4), "remote"),
    "remote": ("qwen3", families.recipe("bias", heads=0.5, container="remote"), "remote"),
    "padded opt": ("opt", encoders.recipe({"heads": 0.25}, **PAD), "opt"),
    "padded swiglu": ("dinov2-swiglu", encoders.recipe({"heads": 0.25, "mlp": 0.25}, **PAD), "dinov2"),
    "padded bert": ("bert-mlm", encoders.recipe({"heads": 0.25, "mlp": 0.25}, **PAD), "bert"),
    "narrow q and k, vit": ("vit", encoders.recipe({"qk": 0.5}, container="remote"), "remote"),
    "narrow q and k, opt": ("opt", encoders.recipe({"qk": 0.5, "heads": 0.25}, container="remote"), "remote"),
    "narrow q and k, bert": ("bert-mlm", encoders.recipe({"qk": 0.5, "mlp": 0.25}, container="remote"), "remote"),
    "padded q and k": ("opt", encoders.recipe({"qk": 0.5}, **PAD), "opt"),
    "magnitude 2:4": ("wide llama", make_recipe("magnitude 2:4"), "llama"),
    "wanda": ("dinov2-swiglu", make_recipe("wanda", "by block"), "dinov2"),
    "wanda 2:4": ("wide opt", make_recipe("wanda 2:4", "by input"), "opt"),
    "sparsegpt": ("bert-mlm", make_recipe("sparsegpt"), "bert"),
    "sparsegpt 2:4": ("wide qwen2", make_recipe("sparsegpt 2:4"), "qwen2"),
}
"""Variant, recipe, and what the output is stored as."""


@pytest.mark.parametrize("kind", every(5, KINDS))
def test_every_kind_of_pruning(dense, tmp_path, kind):
    variant, recipe, container = KINDS[kind]
    folder = dense.folder(variant)
    pruned = pruned_by(folder, tmp_path / "pruned", recipe, data_of(variant))
    config = json.loads((pruned / "config.json").read_text())
    assert ("auto_map" in config, container) in ((True, "remote"), (False, config["model_type"]))
    report = check(folder, pruned, tmp_path / "out", variant)
    assert bool(report["container"]["padded"]) == kind.startswith("padded")
    pruned_report = json.loads((pruned / REPORT).read_text())
    new = {"recovery", "layers", "files", "stages", "job", "ckpt_prune", "torch", "transformers"}
    assert {k: v for k, v in report.items() if k not in new} == {k: v for k, v in pruned_report.items() if k not in new}


def test_padding_stays_zero(dense, tmp_path):
    """Weights and biases of dropped heads and columns: the model does not grow back."""
    variant, recipe, _ = KINDS["padded bert"]
    folder = dense.folder(variant)
    pruned = pruned_by(folder, tmp_path / "pruned", recipe, data_of(variant))
    report = recover_pruned(pruned, folder, tmp_path / "out", training_data(variant))
    after = tensors_of(tmp_path / "out")
    assert report["container"]["padded"] == ["heads"]
    name = encoders.VARIANTS[variant].tensor
    for site in (site for site in report["sites"] if site["space"] == "heads"):
        gone = [unit * 4 + i for unit in range(4) if unit not in site["kept"] for i in range(4)]
        assert len(gone) == 4
        for role in ("query", "key", "value"):
            assert not after[name(site["block"], role)][gone].any()
            assert not after[name(site["block"], role, "bias")][gone].any()
        assert not after[name(site["block"], "heads")][:, gone].any()


@pytest.mark.parametrize(
    ("variant", "dtype"),
    one_of(4, dealt(["mistral", "opt", "vit"], [torch.bfloat16, torch.float16])),
)
def test_half_precision(dense, tmp_path, variant, dtype):
    folder = dense.folder(variant, dtype=dtype)
    pruned = pruned_by(folder, tmp_path / "pruned", make_recipe("magnitude"), None)
    check(folder, pruned, tmp_path / "out", variant)
    linears = [t for n, t in tensors_of(tmp_path / "out").items() if "layer" in n and n.endswith("weight")]
    assert {tensor.dtype for tensor in linears} == {dtype}


def test_no_two_blocks_of_a_model_are_read_together(dense, tmp_path, monkeypatch):
    folder = dense.folder("llama")
    pruned = pruned_by(folder, tmp_path / "pruned", make_recipe("magnitude"), None)
    seen = watch_reading(monkeypatch)
    recover_pruned(pruned, folder, tmp_path / "out", training_data("llama"))
    assert seen.blocks == {str(block) for block in range(BLOCKS)}
    assert seen.together == 1
    # One is worked on, while the next is read and the last is written.
    assert seen.alive <= 3


# ---- rotated -----------------------------------------------------------------------------------------------------

# Two kinds a variant: what rotates positions and what does not has all three.
TURNED = dealt(["llama-gqa-tied", "qwen3", "opt", "opt-no-bias"], ["values", "shared", "per-layer"], 2)


@pytest.fixture(scope="module")
def turned(dense, tmp_path_factory) -> Callable[..., Path]:
    """Variant, kind and dtype → the output of random rotations, unpruned or half of it zeroed; made once."""
    root = tmp_path_factory.mktemp("turned")

    def make(variant: str, kind: str, ratio: float, dtype: torch.dtype = torch.float32) -> Path:
        out = root / f"{variant}-{kind}-{ratio}-{dtype}"
        if not out.exists():
            with pytest.MonkeyPatch.context() as patch:
                random_rotations(patch)
                pruned_by(dense.folder(variant, dtype=dtype), out, rotating(kind, ratio=ratio), None)
        return out

    return make


@pytest.mark.parametrize(("variant", "kind"), one_of(4, TURNED))
def test_the_dense_stream_is_in_the_basis_of_the_rotated_model(dense, turned, tmp_path, variant, kind):
    """Rotated and unpruned: nothing to recover, at any depth, though not a weight of the two is the same."""
    folder, unpruned = dense.folder(variant), turned(variant, kind, 0.0)
    report = recover_pruned(unpruned, folder, tmp_path / "out", training_data(variant))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (unpruned / "model.safetensors").read_bytes()
    plain = dense_states(folder, variant)
    energy = float(plain.square().mean())
    for layer in report["layers"]:
        assert layer["mse_before"] < 1e-8 * energy
        assert (layer["epochs"], layer["recovered"]) == (0, False)
    if kind == "shared":
        # In the dense model's own basis the same states are far off.
        there = dense_states(unpruned, variant)
        assert float((there - plain).square().mean()) > 0.1 * energy


@pytest.mark.parametrize(("variant", "kind"), one_of(4, TURNED))
def test_rotated_and_masked(dense, turned, tmp_path, variant, kind):
    """Against the whole model that is rotated and not masked."""
    pruned, data = turned(variant, kind, 0.5), training_data(variant)
    out = tmp_path / "out"
    report = recover_pruned(pruned, dense.folder(variant), out, data)
    assert any(assert_recovered(out, pruned, report).values())
    assert (out / ROTATIONS).read_bytes() == (pruned / ROTATIONS).read_bytes()
    target = dense_states(turned(variant, kind, 0.0), variant)
    for folder, key in ((pruned, "mse_before"), (out, "mse_after")):
        mse = float((last_states(folder, variant, data) - target).square().mean())
        assert report["layers"][-1][key] == pytest.approx(mse, rel=1e-3), key


# ---- pruned by others --------------------------------------------------------------------------------------------


def zero_half(folder: Path, out: Path) -> Path:
    """Half of the weights of every linear of a block, by torch alone."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if is_linear(name, tensors) and name.endswith(".weight"):
            tensor[tensor.abs() < tensor.abs().median()] = 0
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def slice_columns(folder: Path, out: Path) -> Path:
    """The first 13 columns of the MLP of a llama stay, saved as transformers does."""
    model = families.stock(folder)
    for layer in model.model.layers:
        mlp = layer.mlp
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight = torch.nn.Parameter(part.weight.detach()[:13].clone())
        mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight.detach()[:, :13].clone())
    model.config.intermediate_size = 13
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize(
    ("variant", "how"),
    [("vit", zero_half), ("qwen3", slice_columns), ("bert-old-names", zero_half)],
)
def test_what_another_tool_pruned(dense, tmp_path, variant, how):
    """No ckpt_prune.json: it is recovered all the same, and what is written speaks of what is known."""
    folder = dense.folder(variant)
    pruned = how(folder, tmp_path / "pruned")
    assert not (pruned / REPORT).exists()
    report = check(folder, pruned, tmp_path / "out", variant)
    assert report["recipe"]["name"] == "pruned elsewhere"
    assert (report["sites"], report["linears"], report["mask"], report["rotation"]) == ([], [], None, None)
    assert report["source"] == report["recovery"]["dense"]
    counts = [sum(t.numel() for n, t in tensors_of(f).items() if "position_ids" not in n) for f in (folder, pruned)]
    assert [report[when]["parameters"] for when in ("before", "after")] == counts
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pruned elsewhere and recovered" in card
    html = print_page(*titled_sections(read_report_or_plan(tmp_path / "out")))
    assert "pruned elsewhere" in html
    assert "CKA" in html
    assert all(c.passed is not False for c in verify(tmp_path / "out", folder))


# ---- numbers that do not fit -------------------------------------------------------------------------------------


def test_a_weight_beyond_half_precision_is_not_written(dense, tmp_path):
    """The one column of an MLP that is left is shut by ReLU: a weight of -inf does no harm to any error measured."""
    folder = shutil.copytree(dense.folder("opt-no-bias", dtype=torch.float16), tmp_path / "dense")
    tensors = load_file(folder / "model.safetensors")
    fc1, fc2, norm = (f"model.decoder.layers.0.{name}" for name in ("fc1.weight", "fc2.weight", "final_layer_norm."))
    # A column that sees the same in all tokens.
    tensors[f"{norm}weight"][0], tensors[f"{norm}bias"][0] = 0, 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pruned = shutil.copytree(folder, tmp_path / "pruned")
    for name, value in ((fc1, 1.0), (fc2, 1000.0)):
        tensors[name].zero_()
        tensors[name][0, 0] = value
    save_file(tensors, pruned / "model.safetensors", {"format": "pt"})
    # One step takes both down by as much: the one below the least number of float16, the other not.
    step = {"lr": 66000.0, "epochs": 1, "batch": SAMPLES, "only": "mlp", "layers": ":1"}
    report = recover_pruned(pruned, folder, tmp_path / "out", training_data("opt-no-bias"), **step)
    assert_recovered(tmp_path / "out", pruned, report)
    assert report["layers"][0]["diverged"]
