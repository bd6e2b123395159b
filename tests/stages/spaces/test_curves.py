"""The cost of dropping units, and its prediction from gradients, match definitions on whole models by every score."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.samples import SampleRange, ShortWindows, TokenWindows
from ckpt_prune.measure.statistics.fisher import LABEL_DRAWS
from ckpt_prune.measure.statistics.folder import record_effects
from ckpt_prune.measure.streams.backward import draw_end_gradients
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site
from ckpt_prune.recipe.space_kinds import CANDIDATES
from ckpt_prune.runner.plan import make_plan
from ckpt_prune.scoring import obs
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.shared import measure_dense
from ckpt_prune.stages.spaces.effects import predicted as space_effects
from ckpt_prune.stages.spaces.effects.gradients import draw_tokens
from ckpt_prune.stages.spaces.effects.site_variants import trial_recipe
from ckpt_prune.stages.spaces.messages import predicted_line
from ckpt_prune.stages.spaces.solvers import solver_of
from ckpt_prune.stages.spaces.widths import decide, dense_ranking
from tests.encoders import calibrate, job_on
from tests.families import BLOCKS, prune
from tests.measure.test_fisher import draw_unlikeliest, losses_of
from tests.oracles import obs as oracle
from tests.oracles.whole_best import read
from tests.stages.spaces.test_effects import ByHand
from tests.stages.whole import data_of, stock
from tests.stored import Sources

CPU = torch.device("cpu")


def recipe_of(spaces: Mapping[str, str], variant: str = "llama", **top: object) -> FullRecipe:
    """Make a recipe; unless it prunes dimensions of queries and keys, biases of opt and vit make up for every mean."""
    method = "affine" if variant in ("opt", "vit") and "qk" not in spaces else "none"
    sections = {space: {"score": score, "compensation": {"method": method}} for space, score in spaces.items()}
    values = {"version": 1, "name": "test", "allocation": "least-error", "widths": "per_layer", "container": "any"}
    return FullRecipe.model_validate(values | {"spaces": sections} | top)


def dense_moments(model: ByHand, block: int, space: str) -> tuple[Tensor, Tensor, float]:
    """W, Σ x xᵀ (about the mean where there is a bias) and the tokens."""
    path = model.path(block, model.family.columns[space].consumer)
    consumer = model.model.get_submodule(path)
    seen: list[Tensor] = []
    handle = consumer.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model.model(**model.data.batch(slice(0, len(model.data))))
    handle.remove()
    x = seen[0].flatten(0, -2).double()
    x = x - x.mean(0) if consumer.bias is not None else x
    return consumer.weight.detach().double(), x.T @ x, len(x)


@pytest.mark.parametrize("score", ["obs", "rcpu"])
@pytest.mark.parametrize("variant", ["llama-gqa-tied", "opt"])
def test_errors_are_those_of_a_refit_in_the_metric(dense: Sources, variant, score):
    """tr(F (W − Ŵ) G (W − Ŵ)ᵀ) / 2 per token, λ counted too."""
    source, statistics = Model.open(dense.folder(variant)), dense.statistics(variant)
    model = ByHand(stock(dense.folder(variant), variant), source, data_of(variant))
    recipe = recipe_of({"heads": score, "mlp": score}, variant)
    for space in recipe.spaces:
        solver, name = solver_of(source, recipe, space, CPU), source.moments_name(1, space)
        tensors, folds, fisher = solver.read(1), statistics.read_moments(1)[name], statistics.read_fisher(1)[name]
        scores = solver.scores(1, tensors, folds)
        weight, gram, tokens = dense_moments(model, 1, space)
        values, vectors = torch.linalg.eigh(fisher.sums.double() / fisher.samples)
        turned = ((vectors * values.clamp_min(0).sqrt()) @ vectors.T) @ weight
        order = scores.argsort(stable=True).tolist()
        per_unit, strength = source.unit_columns(space), 0.01 * float(gram.diagonal().mean())
        for metric, used in ((fisher, turned), (None, weight)):
            errors = solver.errors(1, tensors, folds, scores, metric)
            half = 2 if metric is not None else 1
            for k in (0, 1, len(order) // 2, len(order) - 1, len(order)):
                expected = oracle.cost(used, gram, strength, order[:k], per_unit) / tokens / half
                assert float(errors[k]) == pytest.approx(expected, rel=2e-3, abs=1e-9)


def lost_by_hand(weight: Tensor, moments: Moments, kept: list[int], *, biased: bool) -> tuple[Tensor, Tensor]:
    """W − Ŵ of a ridge refit of some columns, and the mean of the inputs that a bias makes up for (else 0)."""
    mean = moments.mean if biased else torch.zeros_like(moments.mean)
    gram = moments.gram.double() - moments.count * torch.outer(mean, mean)
    strength, lost = 0.01 * gram.diagonal().mean(), weight.clone()
    damped = gram[kept][:, kept] + strength * torch.eye(len(kept))
    target = weight @ gram[:, kept] + strength * weight[:, kept]
    lost[:, kept] -= torch.linalg.solve(damped, target.T).T
    return lost, mean


# ---- what gradients predict --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "opt", "vit"])
def test_predictions_are_of_samples_that_no_refit_has_seen(variant, monkeypatch, dense, tmp_path):
    """½ E[(g·δ)²] on the last fold of a refit to the first one: gradients and inputs of a whole stock model."""
    draw_unlikeliest(monkeypatch)
    folder, data = dense.folder(variant), data_of(variant)
    source, statistics = Model.open(folder), calibrate(folder, tmp_path / "statistics", data, folds=2)
    half = len(data) // 2
    fitted = calibrate(folder, tmp_path / "half", SampleRange(data, 0, half), collect=("moments", "gram"))
    some = SampleRange(data, half, min(len(data), half + statistics.index.fisher))
    model = stock(folder, variant)
    by_hand = ByHand(model, source, data)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    block, space = 1, "mlp"
    path = by_hand.path(block, source.family.columns[space].consumer)
    seen: list[tuple[Tensor, Tensor]] = []
    model.get_submodule(path).register_forward_hook(lambda _m, args, out: seen.append((args[0].detach(), out)))
    output = model(**some.batch(slice(0, len(some))))
    monkeypatch.setattr("tests.measure.test_fisher.LIMIT", len(some))
    (loss,) = losses_of([(name, output[name]) for name in output if name.endswith("logits")])
    ((x, out),) = seen
    (g,) = torch.autograd.grad(loss, out)
    x, g = (values.reshape(len(some), -1, values.shape[-1]) for values in (x, g))
    recipe = recipe_of({space: "rcpu"}, variant)
    solver, name = solver_of(source, recipe, space, CPU), source.moments_name(block, space)
    tensors, folds = solver.read(block), fitted.read_moments(block)[name]
    weight, moments = model.get_submodule(path).weight.detach().double(), folds[0]
    biased = model.get_submodule(path).bias is not None
    per_sample = variant == "vit"
    for score in CANDIDATES:
        order = solver.scores(block, tensors, folds, score).argsort(stable=True).tolist()
        for count, value in statistics.index.predicted[name][score]:
            lost, mean = lost_by_hand(weight, moments, sorted(order[count:]), biased=biased)
            moved = (g.double() * ((x.double() - mean) @ lost.T)).sum(-1)
            square = moved.sum(1).square() if per_sample else moved.square().sum(1)
            assert value == pytest.approx(float(square.sum()) / 2 / len(some), rel=5e-3)


def test_the_score_of_a_site_is_the_best_at_its_width(dense, tmp_path):
    """Made up: rcpu is best in block 0, wanda-sp in the others."""
    folder, best = dense.folder("opt"), ["rcpu"] + ["wanda-sp"] * (BLOCKS - 1)
    statistics = calibrate(folder, tmp_path / "statistics", data_of("opt"), folds=2)
    source = Model.open(folder)
    made_up = {}
    for block in range(BLOCKS):
        name = source.moments_name(block, "mlp")
        points = [count for count, _ in statistics.index.predicted[name]["obs"]]
        made_up[name] = {
            score: [(count, count * (1.0 if score == best[block] else 2.0)) for count in points] for score in CANDIDATES
        }
    statistics.index.predicted.update(made_up)
    recipe = recipe_of({"mlp": "auto"}, ratio=0.4)
    request = job_on(folder, recipe, statistics)
    ranking, decided = dense_ranking(request), decide(request)
    for block in range(BLOCKS):
        site = Site(block, "mlp")
        assert [option.score for option in ranking[site]] == list(CANDIDATES)
        decision = decided.sites[site]
        chosen = next(option for option in ranking[site] if option.score == decision.score)
        dropped = len(chosen.scores) - decision.keep
        assert decision.score == best[block]
        assert float(chosen.errors[dropped]) == min(float(option.errors[dropped]) for option in ranking[site])
        assert torch.equal(decision.scores, chosen.scores)
    assert np.sum([decided.sites[Site(block, "mlp")].keep for block in range(BLOCKS)]) < 22 * BLOCKS


def test_where_sites_were_measured_no_score_wins_by_luck(dense, tmp_path):
    """Effects are measured by obs; rcpu and wanda-sp are told to do a hundred times better, and are not believed."""
    folder = dense.folder("opt")
    statistics = calibrate(folder, tmp_path / "statistics", data_of("opt"), folds=2)
    predicted = statistics.index.predicted
    for by_score in predicted.values():
        for score in CANDIDATES[1:]:
            by_score[score] = [(count, value / 100) for count, value in by_score[CANDIDATES[0]]]
    measured = record_effects(statistics, {name: own[CANDIDATES[0]] for name, own in predicted.items()})
    spaces, by_score = {"heads": "auto", "mlp": "auto"}, {}
    for score in ("auto", "obs"):
        decided = decide(job_on(folder, recipe_of(dict.fromkeys(spaces, score), ratio=0.4), measured))
        by_score[score] = {site: (own.keep, own.score, own.scores.tolist()) for site, own in decided.sites.items()}
    assert by_score["auto"] == by_score["obs"]
    assert {score for _, score, _ in by_score["auto"].values()} == {"obs"}


def test_draws_of_labels_are_averaged(dense, tmp_path, monkeypatch):
    """Each draw alone: the mean of their metrics and predictions is taken, and their spread is told."""
    folder, data = dense.folder("opt"), data_of("opt")
    together = calibrate(folder, tmp_path / "all", data, folds=2)
    alone = []
    for draw in range(LABEL_DRAWS):

        def single(*given, draw=draw):
            chosen = draw_end_gradients(*given)[draw]
            return [replace(chosen, weight=chosen.weight * LABEL_DRAWS)]

        monkeypatch.setattr("ckpt_prune.measure.statistics.fisher.draw_end_gradients", single)
        alone.append(calibrate(folder, tmp_path / str(draw), data, folds=2))
    assert all(statistics.index.spread == 0 for statistics in alone)
    spreads = []
    for name, by_score in together.index.predicted.items():
        for score, points in by_score.items():
            values = np.array([[value for _, value in own.index.predicted[name][score]] for own in alone])
            # Sums of squares, all positive, whose terms are the same: only the order of sums in float64 differs.
            np.testing.assert_allclose([value for _, value in points], values.mean(0), rtol=1e-12)
            assert (values.std(0) > 0).all()  # draws are not all one
        middle = np.array([own.index.predicted[name]["obs"] for own in alone])[:, len(points) // 2, 1]
        spreads.append(middle.std(ddof=1) / LABEL_DRAWS**0.5 / middle.mean())
    assert together.index.spread == pytest.approx(np.median(spreads), rel=1e-9)
    for name, metric in together.read_fisher(1).items():
        sums = torch.stack([own.read_fisher(1)[name].sums for own in alone]).double().mean(0)
        tokens = metric.samples * data.tokens * LABEL_DRAWS
        bound = tokens * torch.finfo(torch.float32).eps * float(sums.diagonal().max() if sums.dim() > 1 else sums.max())
        assert float((metric.sums.double() - sums).abs().max()) <= bound


# ---- of a plan ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "opt"])
def test_a_plan_predicts_what_every_site_does(variant, dense, tmp_path):
    """½ tr(F E[δδᵀ]) of the very weights that are written."""
    folder, statistics = dense.folder(variant), dense.statistics(variant)
    method = "affine" if variant == "opt" else "ridge"
    settings = {"score": "rcpu", "ratio": 0.5, "compensation": {"method": method}}
    values = {"version": 1, "name": "test", "container": "any", "spaces": {"heads": settings, "mlp": settings}}
    recipe = FullRecipe.model_validate(values)
    job = job_on(folder, recipe, statistics)
    plan = make_plan(job)
    prune(job, tmp_path / "out")
    written, before = read(tmp_path / "out"), read(folder)
    source = Model.open(folder)
    for site in plan.sites:
        name = site.consumer
        moments, fisher = statistics.read_moments(site.block)[name][0], statistics.read_fisher(site.block)[name]
        columns = source.consumer_columns(site.space, torch.tensor(site.kept)).numpy()
        lost = before[name].astype(np.float64)
        lost[:, columns] -= written[name]
        bias = name.replace(".weight", ".bias")
        added = written[bias].astype(np.float64) - before[bias] if bias in written else np.zeros(len(lost))
        mean, second = moments.mean.numpy(), moments.gram.double().numpy() / moments.count
        shift = np.outer(lost @ mean, added)
        errors = lost @ second @ lost.T - shift - shift.T + np.outer(added, added)
        expected = np.trace(fisher.mean.numpy() @ errors) / 2
        assert site.divergence == pytest.approx(expected, rel=1e-2)
    assert plan.divergence == pytest.approx(sum(site.divergence for site in plan.sites))


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("llama", "a divergence (KL) of 0.2000 nats from the dense model's output, about 1.22 times its perplexity; "),
        ("vit", "a divergence (KL) of 0.2000 nats from the dense model's output; "),
        ("bert-model", "the last hidden states are off by 0.2000 of their energy, or more"),
    ],
)
def test_what_is_predicted_is_said_in_the_words_of_the_model(dense, variant, line):
    class Plan:
        divergence: float | None = 0.2

    text = predicted_line(Model.open(dense.folder(variant)), Plan())
    order = "a second-order estimate, too low where many units go or samples are few"
    assert text == f"predicted: {line}" + (order if line.endswith("; ") else "")
    Plan.divergence = 0.0
    assert predicted_line(Model.open(dense.folder(variant)), Plan()) is None


# ---- spaces as wholes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "part"), [("llama-gqa-tied", 1), ("opt", 1), ("opt", 2)])
def test_spaces_are_measured_on_the_whole_model(variant, part, monkeypatch, dense, tmp_path):
    """Every consumer of a stock model refitted to the first fold, its output on the other against the dense one's.

    With positions for half of the tokens, the other half of each window is not read.
    """
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.measured.SHALLOW", 1)
    folder, data = dense.folder(variant), data_of(variant)
    compared = len(data) // 2 * data.tokens // part
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.predicted.SPACING", 1)
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.predicted.POSITIONS", compared)
    source, statistics = Model.open(folder), calibrate(folder, tmp_path / "statistics", data, folds=2)
    half = len(data) // 2
    fitted = calibrate(folder, tmp_path / "half", SampleRange(data, 0, half), collect=("moments", "gram"))
    some = SampleRange(data, half, min(len(data), half + statistics.index.fisher))
    assert compared == len(some) * data.tokens // part
    model = stock(folder, variant)
    by_hand = ByHand(model, source, ShortWindows(some, data.tokens // part))
    assert set(statistics.index.spaces) == {"heads", "mlp"}
    for space, points in statistics.index.spaces.items():
        solver = solver_of(source, recipe_of({space: "rcpu"}, variant), space, CPU)
        for count, value in points:
            pruned = copy.deepcopy(model)
            for block in range(BLOCKS):
                name = source.moments_name(block, space)
                by_score = statistics.index.predicted[name]
                score = min(CANDIDATES, key=lambda candidate, predicted=by_score: dict(predicted[candidate])[count])
                tensors, folds = solver.read(block), fitted.read_moments(block)[name]
                order = solver.scores(block, tensors, folds, score).argsort(stable=True).tolist()
                columns = oracle.columns(sorted(order[count:]), source.unit_columns(space))
                consumer = pruned.get_submodule(by_hand.path(block, source.family.columns[space].consumer))
                weight = consumer.weight.detach().double()
                lost, mean = lost_by_hand(weight, folds[0], columns, biased=consumer.bias is not None)
                with torch.no_grad():
                    consumer.weight.copy_(weight - lost)
                    if consumer.bias is not None:
                        consumer.bias += (lost @ mean).float()
            monkeypatch.setattr(f"{ByHand.__module__}.LIMIT", len(some))
            assert value == pytest.approx(by_hand.effect(pruned, 0), rel=1e-2)


@pytest.mark.parametrize("variant", ["llama-gqa-tied", "opt"])
def test_wide_sites_are_tried_and_ranked_by_one_order(variant, monkeypatch, dense, tmp_path):
    """Wide sites have no refits but those of whole spaces, and are not ranked again; predictions stay the same."""
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.measured.SHALLOW", 1)
    folder, data = dense.folder(variant), data_of(variant)
    plain = calibrate(folder, tmp_path / "plain", data, folds=2)
    monkeypatch.setattr(DropOrder, "is_wide", True)
    wide = calibrate(folder, tmp_path / "wide", data, folds=2)
    for name, by_score in plain.index.predicted.items():
        for score, points in by_score.items():
            assert wide.index.predicted[name][score] == [(k, pytest.approx(v, rel=1e-3)) for k, v in points]
    for space, points in plain.index.spaces.items():
        assert wide.index.spaces[space] == [(count, pytest.approx(value, rel=1e-3)) for count, value in points]
    assert plain.read_curves(0) == {}
    source, half = Model.open(folder), SampleRange(data, 0, len(data) // 2)
    fitted = calibrate(folder, tmp_path / "half", half, collect=("moments", "gram"))
    for (space, score), (scores, errors) in wide.read_curves(1).items():
        name = source.moments_name(1, space)
        solver = solver_of(source, recipe_of({space: score}, variant), space, CPU)
        solver = replace(solver, recipe=trial_recipe(source, 1, space, solver.read(1), score))
        tensors, folds, fisher = solver.read(1), fitted.read_moments(1)[name], wide.read_fisher(1)[name]
        torch.testing.assert_close(scores, solver.scores(1, tensors, folds, score), rtol=1e-4, atol=0)
        torch.testing.assert_close(errors, solver.errors(1, tensors, folds, scores, fisher), rtol=1e-4, atol=1e-12)


def test_wide_sites_are_not_ranked_beyond_what_is_tried(monkeypatch, dense, tmp_path):
    """Predictions are of the first three quarters of the order alone, and stay the same."""
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.measured.SHALLOW", 1)
    folder, data = dense.folder("llama"), data_of("llama")
    plain = calibrate(folder, tmp_path / "plain", data, folds=2)
    monkeypatch.setattr("ckpt_prune.stages.spaces.solvers.columns.WIDE", 1)
    counts, remove = [], obs.remove_greedily
    monkeypatch.setattr(
        obs, "remove_greedily", lambda *args, **how: (counts.append(how["count"]), remove(*args, **how))[1]
    )
    short = calibrate(folder, tmp_path / "short", data, folds=2)
    units = Model.open(folder).units
    assert set(counts) == {round(0.75 * units(space, 0)) for space in ("heads", "mlp")}
    assert short.index.predicted == plain.index.predicted


@pytest.mark.parametrize(
    ("target", "least", "per_input", "measured"),
    [("drift", 2, 0.1, 2), ("drift", 1, 2.0, 6), ("sequential", 2, 0.1, 2), ("dense", 2, 0.1, 8), ("drift", 1, 9.0, 8)],
)
def test_widths_are_decided_on_a_part_of_the_samples(dense, monkeypatch, target, least, per_input, measured):
    """If what stays is fitted behind pruned blocks, on all of them: so many tokens for each input of the mlp's 22."""
    monkeypatch.setattr(measure_dense, "LEAST_WINDOWS", least)
    monkeypatch.setattr(measure_dense, "TOKENS_PER_INPUT", per_input)
    data = TokenWindows(torch.zeros(8, 8, dtype=torch.long))
    recipe = recipe_of({"mlp": "obs"}, target=target, allocation="least-error", ratio=0.3)
    prepared = job_on(dense.folder("llama"), recipe, None, data, folds=2)
    assert prepared.live is not None
    assert len(measure_dense.choose_samples(prepared, prepared.live).samples) == measured


def test_a_score_that_does_better_everywhere_ranks_the_whole_space(dense, tmp_path, monkeypatch):
    """Each single score is tried at the first point of a space of many units; the best of all is kept."""
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.measured.SHALLOW", 1)
    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.predicted.MANY", 20)
    folder, tried = dense.folder("opt"), []

    def divergences(_readout, _samples, _dense, states, positions):
        tried.append(len(states))
        return [0.5, 0.7, 0.4, 0.45, 0.3, 0.9, 0.8]

    monkeypatch.setattr("ckpt_prune.stages.spaces.effects.predicted.measure_divergences", divergences)
    statistics = calibrate(folder, tmp_path / "statistics", data_of("opt"), folds=2)
    # Two points of the heads; of the mlp the best of each site, three scores, and the second point.
    assert tried == [2 + 1 + len(CANDIDATES) + 1]
    assert statistics.index.spaces == {"heads": [(1, 0.5), (2, 0.7)], "mlp": [(6, 0.3), (11, 0.8)]}
    assert statistics.index.scores == {"mlp": "rcpu"}
    request = job_on(folder, recipe_of({"mlp": "auto"}, ratio=0.4), statistics)
    assert {option.score for options in dense_ranking(request).values() for option in options} == {"rcpu"}


@pytest.mark.parametrize(
    ("obs", "rcpu", "wanda", "mixed", "chosen"),
    [
        (1.0, 1.2, 1.3, 1.1, "obs"),  # clearly the best
        (1.0, 1.2, 1.3, 1.04, None),  # the best of each site does about as well
        (1.0, 1.04, 1.3, 1.0, "rcpu"),  # and so does one that learns less of the text
        (1.0, 1.04, 1.03, 1.0, "wanda-sp"),
        (1.5, 1.2, 1.3, 1.0, None),
    ],
)
def test_of_what_does_about_as_well_the_least_learned_is_taken(obs, rcpu, wanda, mixed, chosen):
    assert space_effects._robust({"obs": obs, "rcpu": rcpu, "wanda-sp": wanda}, mixed) == chosen


def test_tokens_that_are_drawn_stand_for_all():
    """Lengths that differ a hundredfold: sums over few tokens come near those over all, and are right on average."""
    ratios = []
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        loud = torch.exp(1.5 * torch.randn(2048, 1, generator=g))
        inputs, gradient = loud * torch.randn(2048, 12, generator=g), loud * torch.randn(2048, 7, generator=g)
        moved = (gradient @ torch.randn(7, 12, generator=g) * inputs).sum(1).double().square()
        tokens, weights = draw_tokens(inputs, gradient)
        assert len(tokens) < 700
        assert bool((weights >= 1).all())
        ratios.append(float((weights * moved[tokens]).sum() / moved.sum()))
    assert np.mean(ratios) == pytest.approx(1, abs=0.01)
    assert np.std(ratios) < 0.03
