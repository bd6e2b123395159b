"""Vision transformers, OPT and BERT: streams, heads and mlp, containers and remote code, against whole models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt_prune
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.model.model import Model
from tests import refusals
from tests.contract.whole import Whole
from tests.encoders import (
    BLOCKS,
    FOR_CORP,
    HEAD_DIM,
    HEADS,
    VARIANTS,
    assert_same_outputs,
    calibrate,
    job_on,
    load_stock_once,
    make,
    recipe,
    samples,
    stock,
    watch,
)
from tests.families import prune
from tests.pairs import dealt, one_of
from tests.stored import Sources

SPECIAL = [name for name, variant in VARIANTS.items() if variant.config or variant.edit]
"""Those that `tests/contract` has not: it has one plain model of every class."""
CHOSEN = ["vit", "deit-teacher", "dinov2-model", "opt", "bert-mlm", "bert-model", *SPECIAL]
"""Them, and a plain one of every kind."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Sources:
    def measure(variant, folder, out, **options):
        return calibrate(folder, out, samples(variant), collect=FOR_CORP, **options)

    return Sources(tmp_path_factory.mktemp("dense"), make, measure)


def load_output(folder: Path, variant: str, report: dict, **options):
    """By stock transformers where the report says so, else by our own loader."""
    if report["container"]["remote_code"]:
        return ckpt_prune.load(folder)
    return stock(folder, variant, **options)


# ---- streams -------------------------------------------------------------------------------------------------------


def stream_on(folder: Path, data, folds: int = 1) -> tuple[HiddenStream, Model]:
    model = Model.open(folder)
    factory = BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32)
    return HiddenStream(factory, model.checkpoint.tensors, model.checkpoint.read, data, folds=folds), model


@pytest.mark.parametrize("variant", one_of(5, CHOSEN))
def test_logit_moments_are_grams_of_the_models_projections(dense, variant):
    """Per sample where there are few, summed over products where there are many: both against explicit sums."""
    chosen, data = VARIANTS[variant], samples(variant)
    rows, columns = np.triu_indices(HEAD_DIM)
    model = load_stock_once(dense.folder(variant), variant)
    paths = [chosen.module(b, role) for b in range(BLOCKS) for role in ("query", "key")]
    seen = watch(model, data, results=paths)
    forms = set()
    for folds in (1, 8):
        statistics = dense.statistics(variant, folds=folds)
        for block in range(BLOCKS):
            by_fold = statistics.read_moments(block)[chosen.tensor(block, "query")]
            for fold, moments in enumerate(by_fold):
                forms.add(moments.form)
                count = len(data) // folds
                run = slice(fold * count, (fold + 1) * count)
                packed = []
                for role in ("query", "key"):
                    x = seen[chosen.module(block, role)][run].reshape(count, -1, HEADS, HEAD_DIM)
                    packed.append(np.einsum("bthi,bthj->hbij", x, x)[:, :, rows, columns])
                assert (moments.samples, moments.tokens) == (count, count * chosen.tokens)
                if moments.form == "per-sample":
                    pairs = [(moments.queries, packed[0]), (moments.keys, packed[1])]
                else:
                    pairs = [(moments.fourth, np.einsum("hbp,hbq->hpq", *packed))]
                for ours, expected in pairs:
                    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert forms == {"per-sample", "fourth-order"}


def test_data_that_the_model_refuses(dense):
    data = samples("vit", 2)
    with pytest.raises(UserError, match=r"^the model refuses its calibration data: .*image size") as caught:
        stream_on(dense.folder("vit"), type(data)(data.values[:, :, :8, :8], 5))
    assert "\n" not in str(caught.value)


# ---- heads and mlp, with every compensation ------------------------------------------------------------------------

RATIOS = {"heads": 0.25, "mlp": 0.3}


@pytest.mark.parametrize(("variant", "method", "padded"), [("vit", "affine", []), ("opt-no-bias", "ridge", ["heads"])])
def test_padded_containers_of_heads_and_mlp(dense, variant, method, padded, tmp_path):
    data, folder, out = samples(variant), dense.folder(variant), tmp_path / "out"
    full_recipe = recipe(RATIOS, methods=method, container="padded", target="dense")
    report = prune(job_on(folder, full_recipe, dense.statistics(variant)), out)
    by_hand = Whole.of_folder(folder, load_stock_once(folder, variant), RATIOS)
    by_hand.prune(data, {"heads": method, "mlp": method}, "dense")
    assert {(s["block"], s["space"]): s["kept"] for s in report["sites"]} == by_hand.kept
    assert_same_outputs(
        load_output(out, variant, report), by_hand.model.float(), samples(variant, 6, seed=9), tolerance=5e-4
    )
    assert not report["container"]["remote_code"]
    assert report["container"]["padded"] == padded


# ---- containers ----------------------------------------------------------------------------------------------------


def prune_variant(dense, variant, out, ratios, methods="none", **top):
    return prune(job_on(dense.folder(variant), recipe(ratios, methods=methods, **top), dense.statistics(variant)), out)


def refusal(dense, variant, ratios, methods="none", **top) -> str:
    out = dense.root / "never"
    line = refusals.refusal(prune_variant, dense, variant, out, ratios, methods, **top)
    assert not out.exists()
    assert not out.with_name("never.partial").exists()
    return line


STOCKLESS = (
    ". Say --container any to store it with code of its own beside the weights, or --container padded for a stock "
    "class that is filled up with zeros, which saves nothing there"
)


def test_a_third_of_dinov2s_mlp_has_no_ratio(dense, tmp_path):
    message = refusal(dense, "dinov2-model", {"mlp": 0.3}, container="auto")
    assert message == "no stock class fits: dinov2 knows only mlp widths of 16, 32, 48, not 44" + STOCKLESS + (
        "; --set spaces.mlp.multiple_of=16 rounds the mlp up to a stock width"
    )
    remote = prune_variant(dense, "dinov2-model", tmp_path / "any", {"mlp": 0.3})
    assert remote["container"]["remote_code"]
    assert remote["container"]["note"] == (
        "stored as dinov2 with remote code (dinov2 knows only mlp widths of 16, 32, 48, not 44): "
        "load with ckpt_prune.load or trust_remote_code"
    )
    padded = prune_variant(dense, "dinov2-model", tmp_path / "padded", {"mlp": 0.3}, container="padded")
    assert padded["container"]["padded"] == ["mlp"]
    assert padded["container"]["note"] == (
        "mlp padded with zeros to the dense width for a stock class: nothing is saved there"
    )
    assert padded["after"] == padded["before"]
    assert remote["after"]["parameters"] < padded["after"]["parameters"]
    assert json.loads((tmp_path / "padded" / "config.json").read_text())["mlp_ratio"] == 4
    data = samples("dinov2-model", 5, seed=9)
    assert_same_outputs(
        ckpt_prune.load(tmp_path / "any"), stock(tmp_path / "padded", "dinov2-model"), data, tolerance=1e-5
    )


@pytest.mark.parametrize("variant", ["opt", "opt-350m-like", "bert-mlm", "bert-model"])
def test_heads_of_opt_and_bert_have_no_stock_class(dense, variant, tmp_path):
    message = refusal(dense, variant, {"heads": 0.25}, container="auto")
    kind = VARIANTS[variant].model_type
    reason = f"the heads of {kind} are always as wide together as the hidden size"
    assert message == f"no stock class fits: {reason}{STOCKLESS}"
    both = refusal(dense, variant, {"heads": 0.25, "mlp": 0.25}, container="auto")
    alone = "; --set spaces.heads.ratio=0 prunes mlp alone, which the stock class has room for"
    assert both == message + alone
    without = prune_variant(dense, variant, tmp_path / "mlp", {"heads": 0.0, "mlp": 0.25}, container="auto")
    assert without["container"]["remote_code"] is False
    report = prune_variant(dense, variant, tmp_path / "out", {"heads": 0.25}, container="remote")
    assert report["container"]["note"] == (
        f"stored as {kind} with remote code ({reason}): load with ckpt_prune.load or trust_remote_code"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["head_dim"]) == (3, 4)
    model = ckpt_prune.load(tmp_path / "out")
    assert type(model).__name__ == f"Pruned{VARIANTS[variant].architecture}"


@pytest.mark.parametrize("variant", ["vit", "vit-model", "deit", "deit-teacher", "dinov2-swiglu-classifier"])
def test_heads_of_vision_transformers_are_stock(dense, variant, tmp_path):
    report = prune_variant(dense, variant, tmp_path / "out", {"heads": 0.25}, "affine", container="auto")
    assert report["container"]["note"] is None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_attention_heads"], config["head_dim"], config["hidden_size"]) == (3, 4, 16)
    attention = stock(tmp_path / "out", variant).get_submodule(VARIANTS[variant].module(0, "attention"))
    assert attention.scaling == 0.5  # of the four dimensions a head has, not of 16 / 3


# ---- remote code ---------------------------------------------------------------------------------------------------


def test_generating_with_the_cache_equals_generating_without(dense, tmp_path):
    ratios = {"qk": 0.5, "heads": 0.25, "mlp": 0.3}
    report = prune_variant(dense, "opt", tmp_path / "out", ratios, None, container="remote")
    assert report["container"]["remote_code"]
    model = ckpt_prune.load(tmp_path / "out")
    ids = samples("opt", 3, seed=9).windows[:1, :6]
    cached = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    for _ in range(6):
        following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, following[:, None]], 1)
    assert torch.equal(cached, ids)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    one_of(
        2,
        dealt(
            ["vit", "deit-teacher", "dinov2-swiglu", "opt", "opt-tied", "bert-pretraining"],
            [torch.bfloat16, torch.float16],
        ),
    ),
)
def test_half_precision_is_kept(dense, variant, dtype, tmp_path):
    folder = dense.folder(variant, dtype)
    statistics = calibrate(folder, tmp_path / "statistics", samples(variant), collect=FOR_CORP)
    full_recipe = recipe({"qk": 0.5, "heads": 0.25, "mlp": 0.25}, container="remote")
    prune(job_on(folder, full_recipe, statistics), tmp_path / "out")
    assert {info.dtype for info in Checkpoint.open(tmp_path / "out").tensors.values()} == {dtype}
    model = ckpt_prune.load(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    wide = ckpt_prune.load(tmp_path / "out", dtype=torch.float32)
    assert wide.dtype == torch.float32
    # What is computed in half precision is near what the same weights give in float32.
    batch = samples(variant, 3, seed=9).batch(slice(3))
    half = {name: values.to(dtype) if values.is_floating_point() else values for name, values in batch.items()}
    with torch.inference_mode():
        ours, reference = model(**half)[0].float(), wide(**batch)[0]
    assert (ours - reference).norm() < (0.1 if dtype == torch.bfloat16 else 0.02) * reference.norm()


@pytest.mark.parametrize("variant", ["opt-model", "opt-350m-like", "bert-sequence-classification", "dinov2-classifier"])
def test_uneven_widths(dense, variant, tmp_path):
    """Another width in every block, against the dense model with columns zeroed."""
    spaces = {"heads": {"score": "corp", "ratio": 0.4}, "mlp": {"score": "corp", "ratio": 0.4}}
    full_recipe = type(recipe({"mlp": 0.1})).model_validate(
        {"version": 1, "name": "t", "allocation": "across-layers", "widths": "per_layer", "spaces": spaces}
    )
    report = prune(job_on(dense.folder(variant), full_recipe, dense.statistics(variant)), tmp_path / "out")
    assert report["container"]["remote_code"]
    assert len({len(s["kept"]) for s in report["sites"] if s["space"] == "mlp"}) > 1
    zeroed = stock(dense.folder(variant), variant)
    for site in report["sites"]:
        per = HEAD_DIM if site["space"] == "heads" else 1
        gone = [unit * per + i for unit in range(site["units"]) if unit not in site["kept"] for i in range(per)]
        with torch.no_grad():
            zeroed.get_submodule(VARIANTS[variant].module(site["block"], site["space"])).weight[:, gone] = 0
    assert_same_outputs(ckpt_prune.load(tmp_path / "out"), zeroed, samples(variant, 4, seed=9))
