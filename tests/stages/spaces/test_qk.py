"""Queries and keys narrower than values: logits, scale and containers, against a whole model pruned by hand."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_prune
from ckpt_prune.compensation.logit_methods import LOGIT_METHODS
from ckpt_prune.verification.verify import verify
from tests.contract.whole import Whole
from tests.encoders import (
    BLOCKS,
    FOR_CORP,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    STRENGTH,
    VARIANTS,
    assert_same_outputs,
    calibrate,
    edit_files,
    heads_of,
    job_on,
    load_stock_once,
    make,
    outputs,
    pairs_of,
    recipe,
    samples,
    stock,
    watch,
)
from tests.families import prune
from tests.oracles import logits
from tests.pairs import dealt, one_of, pairwise
from tests.stored import Sources

CHOSEN = ["vit", "vit-no-qkv-bias", "deit-teacher", "dinov2-model", "dinov2-swiglu-classifier", "opt", "opt-350m-like"]
CHOSEN += ["bert-mlm", "bert-model", "bert-old-names"]
CONTAINERS = ["remote", "padded"]
KEPT = {0.25: 3, 0.5: 2, 0.75: 1}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Sources:
    def measure(variant, folder, out, **options):
        return calibrate(folder, out, samples(variant), collect=FOR_CORP, **options)

    return Sources(tmp_path_factory.mktemp("dense"), make, measure)


def run(dense, variant, out, full_recipe, *, live=False, **more):
    """Prune; the report and the model as its container loads."""
    source = {"live": samples(variant)} if live else {"statistics": dense.statistics(variant)}
    report = prune(job_on(dense.folder(variant), full_recipe, **source, **more), out)
    return report, ckpt_prune.load(out) if report["container"]["remote_code"] else stock(out, variant)


def whole_of(dense, variant, ratios) -> Whole:
    return Whole.of_folder(dense.folder(variant), load_stock_once(dense.folder(variant), variant), ratios)


def logits_of(model, variant, data, block) -> list[np.ndarray]:
    """Logits of each head of a block as the softmax takes them but for masks, (samples, tokens, tokens)."""
    paths = [VARIANTS[variant].module(block, role) for role in ("query", "key")]
    seen = watch(model, data, results=paths)
    heads = int(model.get_submodule(VARIANTS[variant].module(block, "heads")).in_features) // HEAD_DIM
    query, key = (np.split(seen[path], heads, axis=2) for path in paths)
    return [q @ k.transpose(0, 2, 1) * HEAD_DIM**-0.5 for q, k in zip(query, key, strict=True)]


# ---- nothing dropped -----------------------------------------------------------------------------------------------


# The source's container stays whichever is asked for; `tests/contract` has every class.


# ---- compensation --------------------------------------------------------------------------------------------------


# Every class in both containers, where the scale is kept in another way, with two widths of three in turn.
@pytest.mark.parametrize(("place", "ratio"), one_of(7, dealt(itertools.product(CHOSEN, CONTAINERS), list(KEPT))))
def test_logits_are_those_of_the_dense_kronecker_solve(dense, place, ratio, tmp_path):
    """Q_S (I + M) K_Sᵀ of every layer, each on its own pruned prefix, and what the model makes of them."""
    variant, container = place
    report, model = run(dense, variant, tmp_path / "out", recipe({"qk": ratio}, container=container))
    by_hand = whole_of(dense, variant, {"qk": ratio}).prune(samples(variant), {"qk": "logit"})
    assert {(s["block"], s["space"]): s["kept"] for s in report["sites"]} == by_hand.kept
    data, expected_model = samples(variant, 4, seed=9), by_hand.model.float()
    for block in range(BLOCKS):
        ours, expected = (logits_of(m, variant, data, block) for m in (model, expected_model))
        for head in range(HEADS):
            np.testing.assert_allclose(
                ours[head], expected[head], rtol=1e-4, atol=1e-4 * float(np.abs(expected[head]).max())
            )
    assert_same_outputs(model, expected_model, data, tolerance=1e-3)
    rows = HEADS * KEPT[ratio] if container == "remote" else HIDDEN
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored[VARIANTS[variant].tensor(0, "query")].shape == (rows, HIDDEN)


@pytest.mark.parametrize("variant", ["vit", "opt"])
def test_errors_are_those_of_the_logits(dense, variant, tmp_path):
    """Whole layers and heads, before and after, floor and ρ², on the calibration samples, from the logits in full."""
    report, _ = run(dense, variant, tmp_path / "out", recipe({"qk": 0.5}), diagnostics=True)
    paths = [VARIANTS[variant].module(block, role) for block in range(BLOCKS) for role in ("query", "key")]
    seen = watch(load_stock_once(dense.folder(variant), variant), samples(variant), results=paths)
    for site in report["sites"]:
        pairs_by_head = pairs_of(*(seen[VARIANTS[variant].module(site["block"], r)] for r in ("query", "key")))
        sums = np.zeros(4)
        for head, pairs in enumerate(pairs_by_head):
            S = [row - head * HEAD_DIM for row in site["kept"] if row // HEAD_DIM == head]
            M = logits.solve(pairs, S, STRENGTH * logits.diagonal_mean(pairs, S))
            zero, energy = np.zeros_like(M), logits.energy(pairs)
            errors = [logits.error(pairs, S, zero), logits.error(pairs, S, M), logits.floor(pairs, S), energy]
            sums += errors
            lost = sum(np.sum(logits.lost_logits(sample, S) ** 2) for sample in pairs)
            # Q_P K_Pᵀ alone is what M has to make up for.
            assert lost == pytest.approx(errors[0], rel=1e-9)
            head_record = site["heads"][head]
            assert head_record["head"] == head
            keys = ("error_uncompensated", "error_compensated", "floor")
            assert [head_record[key] for key in keys] == pytest.approx([f / energy for f in errors[:3]], rel=1e-3)
            assert head_record["rho2"] == pytest.approx(1 - errors[2] / errors[0], abs=1e-3)
        assert site["error_uncompensated"] == pytest.approx(sums[0] / sums[3], rel=1e-4)
        assert site["error_compensated"] == pytest.approx(sums[1] / sums[3], rel=1e-4)
        assert (site["j0"], site["floor"]) == pytest.approx((sums[0] / 24, sums[2] / 24), rel=1e-3)
        assert site["rho2"] == pytest.approx(1 - sums[2] / sums[0], abs=1e-3)
        assert site["error_compensated"] < site["error_uncompensated"]
        assert (site["method"], site["strength"], site["consumer"]) == ("logit", STRENGTH, None)


def test_lambda_zero_reaches_the_floor_and_absolute_is_absolute(dense, tmp_path):
    def errors(compensation, name):
        full_recipe = recipe({"qk": 0.5}, methods={"qk": {"method": "logit"} | compensation})
        report, _ = run(dense, "vit", tmp_path / name, full_recipe, diagnostics=True)
        return report["sites"]

    for site in errors({"lambda": 0.0}, "zero"):
        floor = site["floor"] / site["j0"] * site["error_uncompensated"]
        assert site["error_compensated"] == pytest.approx(floor, rel=1e-4)
    paths = [VARIANTS["vit"].module(0, role) for role in ("query", "key")]
    seen = watch(load_stock_once(dense.folder("vit"), "vit"), samples("vit"), results=paths)
    first = errors({"lambda": 500.0, "lambda_units": "absolute"}, "absolute")[0]
    total = energy = 0.0
    for head, pairs in enumerate(pairs_of(*(seen[path] for path in paths))):
        S = [row - head * HEAD_DIM for row in first["kept"] if row // HEAD_DIM == head]
        total += logits.error(pairs, S, logits.solve(pairs, S, 500.0))
        energy += logits.energy(pairs)
    assert first["error_compensated"] == pytest.approx(total / energy, rel=1e-4)


def test_lambda_by_folds_is_the_best_on_held_out_samples(dense, tmp_path):
    grid = [1e-4, 0.01, 1.0]
    compensation = {"method": "logit", "lambda_grid": grid, "lambda_by": "folds"}
    full_recipe = recipe({"qk": 0.5}, methods={"qk": compensation})
    report = prune(
        job_on(dense.folder("vit"), full_recipe, dense.statistics("vit", folds=4), diagnostics=True), tmp_path / "o"
    )
    paths = [VARIANTS["vit"].module(block, role) for block in range(BLOCKS) for role in ("query", "key")]
    seen = watch(load_stock_once(dense.folder("vit"), "vit"), samples("vit"), results=paths)
    for site in report["sites"]:
        by_head = pairs_of(*(seen[VARIANTS["vit"].module(site["block"], r)] for r in ("query", "key")))
        folds = [[pairs[6 * f : 6 * f + 6] for pairs in by_head] for f in range(4)]
        kept = [[row - h * HEAD_DIM for row in site["kept"] if row // HEAD_DIM == h] for h in range(HEADS)]
        errors = {value: logits.held_out(folds, kept, value, relative=True) for value in grid}
        assert site["strength"] == min(errors, key=lambda value: errors[value])
        assert site["error_held_out"] == pytest.approx(min(errors.values()), rel=1e-3)


# ---- a case without loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "container"),
    one_of(4, dealt(["vit", "vit-no-qkv-bias", "dinov2-swiglu", "opt", "bert-mlm"], CONTAINERS)),
)
def test_dropped_dimensions_that_the_kept_ones_hold_are_no_loss(variant, container, tmp_path):
    """Rows 1 and 3 of every head are mixtures of rows 0 and 2, in queries and keys alike, biases too."""
    chosen = VARIANTS[variant]
    folder = make(tmp_path / "dense", variant)

    def mix(tensors, config):
        generator = torch.Generator().manual_seed(3)
        for block in range(BLOCKS):
            for role in ("query", "key"):
                mixture = 0.3 * torch.randn(HEADS, 2, 2, generator=generator)
                for kind in ("weight", "bias"):
                    name = chosen.tensor(block, role, kind)
                    if name in tensors:
                        rows = tensors[name].view(HEADS, HEAD_DIM, -1).clone()
                        rows[:, 1::2] = mixture @ rows[:, ::2]
                        tensors[name] = rows.view_as(tensors[name])
        return tensors

    edit_files(folder, mix)
    statistics = calibrate(folder, tmp_path / "statistics", samples(variant), collect=FOR_CORP)
    full_recipe = recipe({"qk": 0.5}, methods={"qk": {"method": "logit", "lambda": 1e-7}}, container=container)
    report = prune(job_on(folder, full_recipe, statistics, diagnostics=True), tmp_path / "out")
    for site in report["sites"]:
        assert site["error_compensated"] < 1e-6
        assert site["error_uncompensated"] > 1e-4
        assert site["rho2"] > 0.999
        assert site["kept"] == [row for row in range(HIDDEN) if row % 2 == 0]
    model = ckpt_prune.load(tmp_path / "out") if container == "remote" else stock(tmp_path / "out", variant)
    dense_model, data = stock(folder, variant), samples(variant, 4, seed=9)
    assert_same_outputs(model, dense_model, data, tolerance=2e-3)
    bare = prune(job_on(folder, recipe({"qk": 0.5}, methods="none"), statistics), tmp_path / "bare")
    assert bare["sites"][0]["method"] == "none"
    name = next(iter(outputs(model, data)))
    lost = outputs(ckpt_prune.load(tmp_path / "bare"), data)[name] - outputs(dense_model, data)[name]
    assert lost.abs().max() > 0.02


# ---- the scale of the softmax --------------------------------------------------------------------------------------


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# In either container the logits, and what follows from the attention, are held above.
@pytest.mark.parametrize(("variant", "container"), one_of(5, dealt(CHOSEN, CONTAINERS)))
def test_attention_keeps_the_scale_of_the_original_head(dense, variant, container, tmp_path):
    """The block's own attention weights, from rows of the dense projections, scaled by 4^-½ and not by 2^-½."""
    full_recipe = recipe({"qk": 0.5}, methods="none", container=container)
    report, model = run(dense, variant, tmp_path / "out", full_recipe)
    model.set_attn_implementation("eager")
    chosen, data = VARIANTS[variant], samples(variant, 3, seed=9)
    seen: list[torch.Tensor] = []
    attention = model.get_submodule(chosen.module(0, "attention"))
    attention.register_forward_hook(lambda _, args, out: seen.append(out[1]))
    outputs(model, data)
    paths = [chosen.module(0, role) for role in ("query", "key")]
    dense_seen = watch(load_stock_once(dense.folder(variant), variant), data, results=paths)
    kept = report["sites"][0]["kept"]
    assert len(kept) == 8
    for head in range(HEADS):
        S = [row - head * HEAD_DIM for row in kept if row // HEAD_DIM == head]
        assert len(S) == 2
        q, k = (heads_of(dense_seen[path])[head][:, :, S] for path in paths)
        scores = q @ k.transpose(0, 2, 1) * HEAD_DIM**-0.5
        if chosen.model_type == "opt":
            scores += np.triu(np.full(scores.shape[1:], -1e9), 1)
        np.testing.assert_allclose(seen[0][:, head].double().numpy(), softmax(scores), rtol=1e-4, atol=1e-5)


# ---- spaces together, targets, containers --------------------------------------------------------------------------


# Every two of them: each class with each combination of spaces, each target and each container, and these in turn.


@pytest.mark.parametrize(
    ("variant", "method", "container"),
    one_of(
        3,
        pairwise(["vit", "dinov2-swiglu", "opt", "bert-old-names", "opt-no-prefix"], list(LOGIT_METHODS), CONTAINERS),
    ),
)
def test_verify_finds_the_dense_rows(dense, variant, method, container, tmp_path):
    """Also where heads are counted anew around padded queries and keys."""
    full_recipe = recipe({"qk": 0.5, "heads": 0.25, "mlp": 0.3}, methods={"qk": method}, container=container)
    run(dense, variant, tmp_path / "out", full_recipe)
    checks = verify(tmp_path / "out", dense.folder(variant))
    assert [(check.name, check.detail) for check in checks if check.passed is False] == []


# Both are held against the whole model above: one combination a class.
