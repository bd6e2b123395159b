"""Masks and rotations from the command line: every shipped recipe, exact output, and what is refused."""

import shutil
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ckpt_prune
from ckpt_prune.common.zero_patterns import RotationName
from ckpt_prune.evaluation.whole_model import quiet_transformers
from ckpt_prune.show.section import format_figure
from ckpt_prune.sparsity import damping
from ckpt_prune.stages.rotation.keys import Rotation
from tests import encoders, families
from tests.cli.running import (
    TEXT,
    drop_time_line,
    edit_weights,
    enter_copy,
    listing,
    ok,
    read_json,
    read_refusal,
    set_config,
    without_quality,
)
from tests.evaluation.tiny import random_windows
from tests.images import write_images, write_vit
from tests.pairs import choose_cases, one_of

MASKS = [f"{method}-{pattern}" for method, pattern in product(("magnitude", "wanda", "sparsegpt"), ("50", "2-4"))]
SHARED = [f"cayley-rotator-shared-{mask}" for mask in MASKS]
PER_LAYER = [f"denoise-rotator-{mask}" for mask in MASKS]
EACH_ONCE = {SHARED[3], SHARED[4], PER_LAYER[1], PER_LAYER[5]}
"""Every method after one kind of rotation, and both patterns."""
FEW = ("--set", "rotation.steps=3")
PRUNE = ("prune", "dense", "-o", "out", "--recipe")

COSTS = """\
                    before    after   share
parameters           5.20K    5.20K  100.0%
bytes              20.8 KB  20.8 KB  100.0%
FLOPs / 32 tokens     418K     418K  100.0%
"""
TURNED = """\
stored as llama with remote code (the residual stream turns between blocks): load with ckpt_prune.load or \
trust_remote_code
                    before    after   share
parameters           5.20K    5.43K  104.3%
bytes              20.8 KB  21.7 KB  104.3%
FLOPs / 32 tokens     418K     434K  103.9%
"""
"""One matrix of 16 x 16 between the two blocks: 256 of 5200 parameters, and 2 x 256 x 32 FLOPs."""
WIDTHS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (16, 16)),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (8, 16)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (24, 16)),
    "mlp.down_proj": (16, 24),
}
LINEARS = {f"model.layers.{block}.{path}.weight": shape for block in range(2) for path, shape in WIDTHS.items()}
HALF_OF_ALL = 1920
"""Weights of two blocks: 2 x (2 x 256 + 2 x 128 + 3 x 384) = 3840."""


@pytest.fixture(scope="module")
def masks(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    with quiet_transformers():
        write_vit(folder / "vit")
        encoders.make(folder / "bert", "bert-mlm")
        encoders.make(folder / "dinov2", "dinov2-model")
        encoders.make(folder / "opt", "opt")
        encoders.make(folder / "opt-post-norm", "opt-350m-like")
        encoders.make(folder / "opt-no-head", "opt-model")
        families.make(folder / "tied", "llama-gqa-tied")
    write_images(folder / "images", [f"{i:02}.png" for i in range(12)])
    for name in ("dense", "sharded", "stats"):
        shutil.copytree(made / name, folder / name)
    shutil.copy(made / "calib.txt", folder)
    return folder


@pytest.fixture
def here(masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `dense`, `stats`, `calib.txt`, `images` and models of other families of its own."""
    return enter_copy(masks, tmp_path, monkeypatch)


def few(recipe: str) -> tuple[str, ...]:
    """Options that keep what a recipe learns short."""
    return FEW if "rotator" in recipe or recipe == "denoise-code" else ()


def tensors(folder: str) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(Path(folder).glob("model*.safetensors")) for name, t in load_file(path).items()}


def zeros_per_row(weight: torch.Tensor) -> set[int]:
    return set((weight == 0).sum(1).tolist())


def zeros_per_group(weight: torch.Tensor, of: int) -> set[int]:
    return set((weight.reshape(weight.shape[0], -1, of) == 0).sum(2).flatten().tolist())


def zeros(folder: str) -> int:
    weights = tensors(folder)
    return sum(int((weights[name] == 0).sum()) for name in LINEARS)


def stock(folder: str, auto=AutoModelForCausalLM):
    model, info = auto.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(input_ids=random_windows(3, 20, seed=3), use_cache=False).logits


def error_line(out: str) -> str:
    errors = [entry["error"] for entry in read_json(f"{out}/ckpt_prune.json")["linears"]]
    assert all(0 < error < 1 for error in errors)
    mean, most = sum(errors) / len(errors), max(errors)
    worst = next(entry for entry in read_json(f"{out}/ckpt_prune.json")["linears"] if entry["error"] == most)
    return (
        f"  The error of their outputs on the calibration samples is {mean:#.3g} on average, {most:#.3g} at most "
        f"({worst['kind']} of block {worst['block']}).\n"
    )


def masked_line(recipe: str) -> str:
    method, pattern = recipe.removeprefix("denoise-rotator-").removeprefix("cayley-rotator-shared-").split("-", 1)
    how = f"{method}{' 2:4' if pattern == '2-4' else ''}"
    return f"Mask\n  Masked by {how}: 50.00% zeros in 14 linear weights of 3.84K parameters.\n"


def assert_masked_by_half(folder: str, recipe: str) -> None:
    """Counted by hand: of each weight, and where the method says so of each row or group."""
    weights = tensors(folder)
    for name, shape in LINEARS.items():
        weight = weights[name]
        assert weight.shape == shape
        assert int((weight == 0).sum()) == weight.numel() // 2, name
        if recipe.endswith("2-4"):
            assert zeros_per_group(weight, 4) == {2}, name
        elif "wanda" in recipe:
            assert zeros_per_row(weight) == {shape[1] // 2}, name
        else:
            assert len(zeros_per_row(weight)) > 1, name
    report = read_json(f"{folder}/ckpt_prune.json")
    assert {e["weight"]: (e["rows"], e["columns"], e["zeros"]) for e in report["linears"]} == {
        name: (*shape, shape[0] * shape[1] // 2) for name, shape in LINEARS.items()
    }
    assert zeros(folder) == HALF_OF_ALL


# ---- every shipped recipe ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", choose_cases(MASKS, {MASKS[0], MASKS[3], MASKS[4], MASKS[5]}.__contains__))
def test_masks(here, recipe):
    output = ok(*PRUNE, recipe, *TEXT)
    errors = error_line("out") if recipe.startswith("sparsegpt") else ""
    assert output.startswith(COSTS + masked_line(recipe) + errors + "written to out\n")
    assert_masked_by_half("out", recipe)
    before, after = tensors("dense"), tensors("out")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        if name not in LINEARS:
            assert torch.equal(tensor, before[name]), name
        elif "sparsegpt" in recipe:
            stays = tensor != 0
            assert not torch.equal(tensor[stays], before[name][stays]), name
        else:
            assert torch.equal(tensor, torch.where(tensor == 0, 0, before[name])), name
    assert read_json("dense/config.json") == {
        key: value for key, value in read_json("out/config.json").items() if key != "rope_theta"
    }
    assert logits(stock("out")).isfinite().all()
    assert read_json("out/ckpt_prune.json")["rotation"] is None


@pytest.mark.parametrize("recipe", choose_cases([*SHARED, *PER_LAYER], EACH_ONCE.__contains__))
def test_rotations_and_masks(here, recipe):
    shared = "shared" in recipe
    output = ok(*PRUNE, recipe, *TEXT, *FEW)
    report = read_json("out/ckpt_prune.json")
    learned = report["rotation"]["learned"]
    assert [entry["block"] for entry in learned] == ([None] if shared else [0, 1])
    assert all(entry["entropy_after"] < entry["entropy_before"] and entry["steps"] == 3 for entry in learned)
    assert [entry["map"]["weight"] for entry in learned if "map" in entry] == ["model.layers.0.self_attn.o_proj.weight"]
    for histogram in learned[0]["map"]["histograms"].values():
        assert sum(histogram["kept"]) == sum(histogram["zeroed"]) == 16 * 16 // 2
    before, after = (sum(entry[f"entropy_{when}"] for entry in learned) for when in ("before", "after"))
    importance = next(method for method in ("magnitude", "wanda", "sparsegpt") if method in recipe)
    rotated = (
        f"Rotation\n  Entropy of the {importance} importance of weights: {format_figure(before)} nats before rotation "
        f"{'shared' if shared else 'per-layer'}, {format_figure(after)} nats after "
        f"({100 * (after - before) / before:+.1f}%), in 3 steps{'' if shared else ' per block'}.\n"
    )
    errors = error_line("out") if importance == "sparsegpt" else ""
    costs = COSTS if shared else TURNED
    assert output.startswith(costs + rotated + masked_line(recipe) + errors + "written to out\n")
    assert_masked_by_half("out", recipe)
    model = stock("out") if shared else ckpt_prune.load("out")
    assert type(model).__name__ == ("LlamaForCausalLM" if shared else "PrunedLlamaForCausalLM")
    assert model.num_parameters() == report["after"]["parameters"] == (5200 if shared else 5426)
    assert logits(model).isfinite().all()
    assert (Path("out") / "modeling_pruned.py").exists() == (not shared)
    added = {"model.layers.1.entry_rotation.weight"}
    assert tensors("out").keys() - tensors("dense").keys() == (set() if shared else added)


def test_a_head_that_is_no_longer_tied_is_said(here):
    output = ok("prune", "tied", "--recipe", "cayley-rotator-shared-magnitude-50", *FEW, "-o", "out")
    assert output.startswith("the head is no longer tied to the embedding: it reads another basis\n")
    assert read_json("out/config.json")["tie_word_embeddings"] is False
    model = stock("out")
    assert model.num_parameters() == read_json("out/ckpt_prune.json")["after"]["parameters"]
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


# ---- how much ------------------------------------------------------------------------------------------------------


OPTIONS = {
    "wanda-2-4": ("wanda", "--pattern", "2:4"),
    "magnitude-2-4": ("magnitude-50", "--pattern", "02:04"),
    "denoise-rotator-sparsegpt-2-4": ("sparsegpt", "--pattern", "2:4", "--rotate", "denoise"),
    "cayley-rotator-magnitude-50": ("magnitude-50", "--rotate", "cayley"),
    "cayley-rotator-shared-wanda-50": ("wanda", "--rotate", "shared"),
    "denoise-rotator-wanda-4-8": ("wanda", "--rotate", "denoise", "--pattern", "4:8"),
    "denoise-code": ("sparsegpt", "--rotate", "denoise-code"),
    "group-rotator-wanda-2-4": ("wanda", "--rotate", "groups", "--pattern", "2:4"),
}


@pytest.mark.parametrize("recipe", one_of(2, OPTIONS))
def test_options_do_what_the_recipe_of_that_name_does(here, recipe):
    ok(*PRUNE, recipe, *TEXT, *few(recipe))
    name, *options = OPTIONS[recipe]
    ok("prune", "dense", "-o", "by-options", "--recipe", name, *options, *TEXT, *few(recipe))
    for file in ("model.safetensors", "config.json"):
        assert Path("by-options", file).read_bytes() == Path("out", file).read_bytes()


def test_every_named_rotation_is_an_option():
    assert get_args(RotationName) == tuple(Rotation.named)


# ---- statistics, dry runs, JSON, plans -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "collected", "lacks", "wants"),
    [
        ("sparsegpt-50", "moments,gram", "linears", "moments,gram,linears"),
        ("sparsegpt-50", "moments", "gram and no linears", "moments,gram,linears"),
    ],
)
def test_statistics_that_lack_something(here, recipe, collected, lacks, wants):
    ok("calibrate", "dense", *TEXT, "--collect", collected, "-o", "less")
    message = read_refusal(*PRUNE, recipe, "--statistics", "less")
    needs = wants.replace(",", " and ")
    assert message == f"recipe {recipe} needs {needs}, and less has no {lacks}: calibrate with --collect {wants}"
    ok("calibrate", "dense", *TEXT, "--collect", wants, "-o", "enough")
    ok(*PRUNE, recipe, "--statistics", "enough", *few(recipe))


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("wanda-50", COSTS + "to be masked by wanda: 50.0% of every linear weight in every block\n"),
        ("magnitude-2-4", COSTS + "to be masked by magnitude 2:4: 50.0% of every linear weight in every block\n"),
        (
            "denoise-rotator-sparsegpt-2-4",
            TURNED
            + "to be rotated first, per-layer: 2000 steps of sparsegpt importance\n"
            + "to be masked by sparsegpt 2:4: 50.0% of every linear weight in every block\n",
        ),
    ],
)
def test_dry_run(here, recipe, expected):
    before = listing()
    assert drop_time_line(ok(*PRUNE, recipe, *TEXT, "--dry-run")) == expected + "everything checked, nothing written\n"
    assert listing() == before


# ---- models that a recipe does not fit -----------------------------------------------------------------------------


def in_half(folder: str, changes: dict[str, float]) -> None:
    """Store a model in float16, with tensors of these endings multiplied."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            factor = next((value for end, value in changes.items() if name.endswith(end)), 1.0)
            weights[name] = (weights[name] * factor).half()

    edit_weights(folder, change)
    set_config(folder, dtype="float16")


@pytest.mark.parametrize("kind", ["per-layer", "shared"])
def test_gains_that_a_weight_cannot_take_in(here, kind):
    """The gain of a norm is folded into what reads it: 2000 times 100 is more than float16 holds."""
    in_half("dense", {"input_layernorm.weight": 2000, "q_proj.weight": 100})
    args = (*PRUNE, "denoise-rotator-magnitude-50", *FEW, "--set")
    assert read_refusal(*args, f"rotation.kind={kind}").startswith(
        "model.layers.0.self_attn.q_proj.weight: with the gains of norms absorbed it does not fit its dtype torch.f"
    )
    ok(*args, "rotation.kind=values")
    assert all(tensor.isfinite().all() for tensor in tensors("out").values())


@pytest.mark.parametrize("kind", ["per-layer", "shared"])
def test_gains_that_the_head_cannot_take_in(here, kind):
    in_half("dense", {"model.norm.weight": 2000, "lm_head.weight": 100})
    args = (*PRUNE, "denoise-rotator-magnitude-50", *FEW, "--set", f"rotation.kind={kind}")
    assert read_refusal(*args).startswith("lm_head.weight: with the gains of norms absorbed it does not fit its dtype ")
    assert not Path("out").exists()


def test_a_mask_of_one_part(here):
    """Attention has half of 768 weights in each block; the mlp is what it was."""
    line = "to be masked by wanda 2:4: 50.0% of every linear weight of the attention in every block\n"
    args = (*PRUNE, "wanda-2-4", "--set", "mask.only=attention", *TEXT)
    assert line in ok(*args, "--dry-run")
    masked = "Masked by wanda 2:4 of the attention: 50.00% zeros in 8 linear weights of 1.54K parameters.\n"
    assert masked in ok(*args)
    assert zeros("out") == HALF_OF_ALL * 2 // 5
    checked = ok("verify", "out", "--against", "dense")
    assert "8 masked weights of the attention: 50.0 % zeros, 2:4 holds in every group" in checked
    before, after = tensors("dense"), tensors("out")
    assert all(torch.equal(before[name], after[name]) for name in LINEARS if ".mlp." in name)


@pytest.mark.parametrize("allocation", ["owl", "alpha", "divergence"])
def test_a_mask_of_one_part_with_shares_of_blocks(here, allocation):
    ok(*PRUNE, "wanda-50", "--set", "mask.only=mlp", "--set", f"mask.allocation={allocation}", *TEXT)
    mlp = sum(shape[0] * shape[1] for name, shape in LINEARS.items() if ".mlp." in name)
    # Rows of 16 and 24 are rounded down.
    assert mlp * (0.5 - 1 / 16) < zeros("out") <= mlp / 2
    assert not any((tensors("out")[name] == 0).any() for name in LINEARS if "_attn" in name)


def test_zeros_that_another_prune_loses(here):
    ok(*PRUNE, "wanda-2-4", *TEXT)
    assert "made from   dense by recipe wanda-2-4\n" in ok("inspect", "out")
    line = (
        "this model was masked before (wanda 2:4): what is rewritten now loses those zeros, and another mask chooses "
        "anew; see `ckpt-prune inspect OUT --sparsity`\n"
    )
    assert line in ok("prune", "out", "--recipe", "ridge", *TEXT, "-o", "again")
    assert line not in ok("prune", "dense", "--recipe", "ridge", *TEXT, "-o", "once")


def test_updates_that_a_weight_cannot_take_in(here):
    name = "model.layers.0.mlp.down_proj.weight"
    in_half("dense", {name: 6e4 / float(tensors("dense")[name].abs().max())})
    assert read_refusal(*PRUNE, "sparsegpt-2-4", *TEXT).startswith(
        f"{name}: the new tensor does not fit its dtype torch.float16: "
    )


# ---- singular Hessians ---------------------------------------------------------------------------------------------

EIGHT_TOKENS = ("--text", "calib.txt", "--samples", "1", "--window", "8")


def test_singular_hessians_are_damped_and_said(here):
    """Eight tokens for 16 and 24 inputs."""
    output = ok(*PRUNE, "sparsegpt-50", "--set", "mask.damp=0", *EIGHT_TOKENS)
    *_, damped, few, written = without_quality(output)
    assert damped == (
        "  14 of 14 Hessians were singular with damping 0 and took up to 0.0001: use more samples (q of block 0, k of "
        "block 0, v of block 0 and 11 more)."
    )
    assert few == (
        "warning: few calibration tokens: 8 for 24 inputs of a projection, so errors are those of a fit, not a "
        "prediction; use more samples (48 tokens or more)"
    )
    assert written == "written to out"
    assert [entry["damp"] for entry in read_json("out/ckpt_prune.json")["linears"]] == [1e-4] * 14
    assert "Hessian" not in ok("prune", "dense", "--recipe", "sparsegpt-50", *EIGHT_TOKENS, "-o", "damped")


def test_a_hessian_that_stays_singular_is_named(here, monkeypatch):
    monkeypatch.setattr(damping, "dampings", lambda damp, most: iter([damp]))
    assert read_refusal(*PRUNE, "sparsegpt-50", "--set", "mask.damp=0", *EIGHT_TOKENS).startswith(
        "model.layers.0.self_attn.q_proj.weight: the Hessian is singular with damping 0 of its mean diagonal: "
    )


# ---- what other commands make of it --------------------------------------------------------------------------------


def test_a_ratio(here):
    """Rounded down in every row: 4 of 16 and 7 of 24."""
    output = ok(*PRUNE, "wanda-50", "--ratio", "0.3", *TEXT)
    rows = 2 * sum(shape[0] for shape in WIDTHS.values() if shape[1] == 16), 2 * 16
    expected = rows[0] * 4 + rows[1] * 7
    assert zeros("out") == expected == 992
    assert "Masked by wanda: 25.83% zeros in 14 linear weights of 3.84K parameters.\n" in output
    weights = tensors("out")
    assert all(zeros_per_row(weights[name]) == {7 if shape[1] == 24 else 4} for name, shape in LINEARS.items())
