"""Compensation chosen on held-out folds, and the drift-correcting target: against fits of tokens of whole models."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import ckpt_prune
from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.fit import Blend, Fit
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.runner.plan import make_plan, prepare_plan
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.solvers import columns as sites
from tests import encoders
from tests.families import BLOCKS, prune
from tests.oracles import choice, closed_forms, drift, effects, whole_best
from tests.oracles.choice import Tokens
from tests.pairs import one_of
from tests.stages.spaces.test_drift_source import samples_of, until
from tests.stages.whole import data_of, stock, whole

Array = NDArray[np.float64]
RATIOS = {"heads": 0.5, "mlp": 0.4}
UNBIASED = ["none", "rotation", "rotation-scale", "ridge"]
BIASED = ["none", "bias", "rotation", "rotation-scale", "ridge", "affine"]
METHODS = {"llama": UNBIASED, "opt": BIASED, "vit": BIASED}
FULL_GRID = [1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]
GRID, SHARES = [0.003, 0.1, 3.0], [0.0, 0.5, 1.0]


def make_recipe(compensation: dict[str, Any], **top: Any) -> FullRecipe:
    spaces = {
        space: {"score": "obs", "ratio": ratio, "rounding": "floor", "compensation": compensation}
        for space, ratio in RATIOS.items()
    }
    return FullRecipe.model_validate({"version": 1, "name": "test", "container": "any", "spaces": spaces} | top)


def live_job(folder: Path, recipe: FullRecipe, data: Samples, folds: int) -> Job:
    """Measured in float64, so that whole models can be held against it."""
    return prepare_plan(Job(Model.open(folder), recipe, None, LiveSamples(data, folds, torch.float64)))


def columns_of(model: Model, space: str, kept: list[int]) -> list[int]:
    return encoders.columns_of(kept, model.unit_columns(space))


def in_folds(tokens: Array, folds: int) -> list[Array]:
    """(samples, tokens, width) as one (N, width) for each contiguous fold of samples."""
    edges = [len(tokens) * f // folds for f in range(folds + 1)]
    return [tokens[start:stop].reshape(-1, tokens.shape[2]) for start, stop in pairwise(edges)]


def fit_of(X: Array, Y: Array) -> Fit:
    """Plain sums over tokens."""
    sums = (torch.from_numpy(total) for total in (X.sum(0), Y.sum(0), X.T @ X, Y.T @ X))
    return Fit(len(X), *sums, float((Y**2).sum()))


# ---- the dense model's moments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "opt"])
def test_what_is_chosen_is_best_on_folds_of_the_dense_models_tokens(dense, variant):
    folds, folder = 4, dense.folder(variant)
    job = encoders.job_on(folder, make_recipe({"method": "auto"}), dense.statistics(variant, folds))
    plan = make_plan(job)
    model = whole(stock(folder, variant), variant)
    paths = {space: f"{model.layers}.{{}}.{site.consumer}" for space, site in drift.SITES[variant].items()}
    every = [paths[space].format(block) for block in range(BLOCKS) for space in paths]
    seen = encoders.watch(model.model, data_of(variant), inputs=every)
    chosen = set()
    for site in plan.sites:
        path = paths[site.space].format(site.block)
        W = model.model.get_submodule(path).weight.detach().double().numpy()
        kept = columns_of(job.model, site.space, site.kept)
        assert 0 < len(kept) < W.shape[1]
        X = np.concatenate(in_folds(seen[path], folds))
        # A bias makes up for every mean: where it may be chosen, only what varies counts.
        order = effects.removal(
            W, X - X.mean(0) if "affine" in METHODS[variant] else X, len(kept) // len(site.kept), damp=0.01
        )
        assert site.kept == sorted(order[-len(site.kept) :])
        blends = [Blend(fit_of(X[:, kept], X @ W.T)) for X in in_folds(seen[path], folds)]
        expected = choose_form(torch.from_numpy(W[:, kept]), blends, METHODS[variant], FULL_GRID)
        best = expected.best
        assert (site.method, site.strength, site.share) == (best.method, best.strength, None)
        assert site.runner_up == expected.runner_up
        assert site.error_held_out == pytest.approx(best.error, rel=1e-4)
        assert site.margin == pytest.approx(expected.margin, rel=1e-3, abs=1e-4)
        chosen.add((site.method, site.strength))
    assert len(chosen) > 1


def error_of(method: str, W: Array, kept: list[int], fitted: Array, other: Array) -> float:
    """The error on other tokens of a fit by the rule's strength, as a share of the kept weights' own there."""
    strength = max(0.001, 1.5 * len(kept) / len(fitted)) * np.square(fitted[:, kept]).sum(0).mean()
    fit = getattr(closed_forms, method)(W[:, kept], fitted[:, kept], fitted @ W.T, strength)
    none = W[:, kept], np.zeros(len(W))
    return closed_forms.residual(other[:, kept], other @ W.T, fit) / closed_forms.residual(
        other[:, kept], other @ W.T, none
    )


@pytest.mark.parametrize(("variant", "method"), [("llama", "ridge"), ("opt", "affine")])
def test_the_strength_follows_the_tokens_and_a_fit_that_loses_on_held_out_ones_is_left_out(dense, variant, method):
    folder = dense.folder(variant)
    job = encoders.job_on(folder, make_recipe({"method": method}), dense.statistics(variant, 2))
    model = whole(stock(folder, variant), variant)
    paths = {space: f"{model.layers}.{{}}.{site.consumer}" for space, site in drift.SITES[variant].items()}
    every = [paths[space].format(block) for block in range(BLOCKS) for space in paths]
    seen = encoders.watch(model.model, data_of(variant), inputs=every)
    for site in make_plan(job).sites:
        path = paths[site.space].format(site.block)
        W = model.model.get_submodule(path).weight.detach().double().numpy()
        kept = columns_of(job.model, site.space, site.kept)
        first, last = in_folds(seen[path], 2)
        unseen = [error_of(method, W, kept, first, last)]
        unseen += [error_of(method, W, kept, last, first)] if unseen[0] >= 1 else []
        both = np.concatenate([first, last])
        wins = 0.368 * error_of(method, W, kept, both, both) + 0.632 * np.mean(unseen) < 1
        assert site.method == (method if wins else "none")
        assert site.strength == (max(0.001, 1.5 * len(kept) / len(both)) if wins else None)
        assert site.error_held_out == pytest.approx(np.mean(unseen) * site.error_uncompensated, rel=1e-4)


# ---- the drift -----------------------------------------------------------------------------------------------------

FIXED = {"method": "ridge", "lambda": 0.1}
DRIFTING: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {"method": "auto", "lambda_grid": GRID, "shares": SHARES}, 3),
    "opt": ("opt", {"method": "auto", "lambda_grid": GRID, "shares": SHARES}, 3),
    "vit, default shares": ("vit", {"method": "auto", "lambda_grid": GRID, "candidates": ["ridge", "bias"]}, 2),
    "opt, ridge by folds": ("opt", {"method": "ridge", "lambda_grid": GRID, "lambda_by": "folds"}, 2),
    "llama, half the drift": ("llama", FIXED | {"shares": [0.5]}, 1),
    "opt, all of it": ("opt", FIXED, 1),
    "llama, least error": ("llama", FIXED, 1),
}
"""Case → variant, compensation, folds."""
BUDGET = {"allocation": "least-error", "weigh_by": "energy", "widths": "per_layer"}


@pytest.mark.parametrize("case", one_of(9, DRIFTING))
def test_consumers_are_refitted_to_the_dense_residual_stream(dense, case, tmp_path):
    """Every site on whole models of which all that comes before it is pruned."""
    variant, compensation, folds = DRIFTING[case]
    folder, data = dense.folder(variant), samples_of(variant)
    recipe = make_recipe(compensation, target="drift", **(BUDGET if "least error" in case else {}))
    job = live_job(folder, recipe, data, folds)
    report = prune(job, tmp_path / "out")
    remote = report["container"]["remote_code"]
    output = ckpt_prune.load(tmp_path / "out") if remote else stock(tmp_path / "out", variant)
    pruned, model = (whole(m.double(), variant) for m in (output, stock(folder, variant)))
    before, after = (whole_best.read(path) for path in (folder, tmp_path / "out"))
    seen = set()
    for site in report["sites"]:
        block, space = site["block"], site["space"]
        mixed = until(pruned, model, block, space, true_sequential=True)
        measured = drift.target(model, mixed, block, drift.SITES[variant][space], data)
        if len(site["kept"]) == site["units"]:
            continue
        kept = columns_of(job.model, space, site["kept"])
        # Units are ranked on the pruned prefix, also where their number was settled on the dense model.
        X, per_unit = np.concatenate(in_folds(measured.inputs, folds)), len(kept) // len(site["kept"])
        centred = variant != "llama" and compensation["method"] == "auto"
        order = effects.removal(before[site["consumer"]], X - X.mean(0) if centred else X, per_unit, damp=0.01)
        assert site["kept"] == sorted(order[-len(site["kept"]) :])
        lacking = measured.targets - measured.outputs
        if block == 0 and space == "heads":
            assert np.abs(lacking).max() < 1e-9  # nothing is pruned before it
            lacking = np.zeros_like(lacking)
        parts = [in_folds(values, folds) for values in (measured.inputs[..., kept], measured.outputs, lacking)]
        tokens = [Tokens(*part) for part in zip(*parts, strict=True)]
        name = site["consumer"]
        W = before[name].astype(np.float64)[:, kept]
        if folds > 1:
            methods = compensation.get("candidates", METHODS[variant])
            methods = methods if compensation["method"] == "auto" else [compensation["method"]]
            shares = compensation.get("shares", [0.0, 0.25, 0.5, 0.75, 1.0])
            best, *others = whole_best.choose(W, tokens, methods, GRID, shares)
            assert (site["method"], site["strength"], site["share"]) == best[:3]
            assert site["error_held_out"] == pytest.approx(best.error, rel=1e-4)
            assert site["runner_up"] == (others[0].method if others else None)
            if others:
                assert site["margin"] == pytest.approx(others[0].error / best.error - 1, abs=1e-4, rel=1e-3)
        else:
            share = compensation.get("shares", [1.0])[0]
            assert (site["method"], site["strength"], site["share"]) == ("ridge", 0.1, share)
        together = choice.together(tokens)
        scale = float(np.mean(np.sum(together.X**2, axis=0)))
        strength = (site["strength"] or 0.0) * scale
        target = together.Y + site["share"] * together.D
        weight, bias = choice.fit_answer(site["method"], W, together.X, target, strength)
        np.testing.assert_allclose(after[name], weight, rtol=1e-4, atol=2e-5 * np.abs(weight).max())
        bias_name = name.replace(".weight", ".bias")
        if bias_name in before:
            np.testing.assert_allclose(after[bias_name], before[bias_name] + bias, rtol=1e-4, atol=1e-4)
        else:
            assert bias_name not in after
        whole_target = together.Y + together.D
        missed = np.sum((whole_target - together.X @ weight.T - bias) ** 2)
        assert site["error_compensated"] == pytest.approx(missed / np.sum(whole_target**2), rel=1e-3)
        bare = np.sum((whole_target - together.X @ W.T) ** 2) / np.sum(whole_target**2)
        assert site["error_uncompensated"] == pytest.approx(bare, rel=1e-3)
        seen.add((site["method"], site["share"]))
    assert len(seen) == 1 if folds == 1 else len(seen) > 1
    if "least error" in case:
        widths = {(site["space"], len(site["kept"])) for site in report["sites"]}
        assert len(widths) > len({space for space, _ in widths})


# ---- what is chosen among ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "compensation", "methods"),
    [
        ("llama", {}, UNBIASED),
        ("llama-biases", {}, BIASED),
        ("opt", {}, BIASED),
        ("opt-no-bias", {}, UNBIASED),
        ("llama", {"candidates": ["affine", "bias", "affine"]}, ["affine", "bias"]),
    ],
    ids=["llama", "llama-biases", "opt", "opt-no-bias", "told"],
)
def test_a_bias_is_a_candidate_where_there_is_one_or_on_request(dense, variant, compensation, methods, monkeypatch):
    tried = []

    def watching(weight: Any, folds: Any, names: list[str], *more: Any, **options: Any) -> Any:
        tried.append(names)
        return choose_form(weight, folds, names, *more, **options)

    monkeypatch.setattr(sites, "choose_form", watching)
    recipe = make_recipe({"method": "auto", **compensation})
    job = encoders.job_on(dense.folder(variant), recipe, dense.statistics(variant, 2))
    plan = make_plan(job)
    assert tried == [methods] * (2 * BLOCKS)
    assert {site.method for site in plan.sites} <= set(methods)
    consumers = {job.model.family.columns[space].consumer for space in RATIOS}
    assert consumers <= job.output.container.biases if "bias" in methods else not job.output.container.biases
