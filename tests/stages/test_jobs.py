"""Plans, and the choice of lambda."""

import json
import math

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.plan import read_plan
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.runner.plan import make_plan
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.run import search_strength
from tests.encoders import columns_of
from tests.families import contents, job_on, make, prune, recipe, stock, windows
from tests.oracles import closed_forms, perplexity
from tests.oracles.streams import inputs_of
from tests.refusals import refusal
from tests.stages.spaces.oracle import CONSUMERS, per_unit

GRID = [0.01, 1.0, 100.0]
BY_PERPLEXITY = {"lambda_by": "perplexity", "lambda_grid": GRID}
BY_FOLDS = {"lambda_by": "folds", "lambda_grid": GRID}


# ---- plans -----------------------------------------------------------------------------------------------------

PLANNED = {
    "one strength": recipe("ridge", lam=0.1),
    "nothing": recipe("ridge", heads=0, mlp=0),
}


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_prunes_as_its_recipe_does(sources, tmp_path, name):
    job = job_on(sources.folder("llama"), PLANNED[name], sources.statistics("llama", folds=2))
    (tmp_path / "plan.json").write_text(make_plan(job).to_json(), encoding="utf-8")
    plan = read_plan(tmp_path / "plan.json")
    prune(job, tmp_path / "direct")
    planned = prune(
        job_on(sources.folder("llama"), plan.recipe, sources.statistics("llama", folds=2), plan=plan),
        tmp_path / "planned",
    )
    direct, from_plan = contents(tmp_path / "direct"), contents(tmp_path / "planned")
    assert set(direct) == set(from_plan)
    assert {name for name in direct if direct[name] != from_plan[name]} == {"ckpt_prune.json"}
    assert planned["plan"] == plan.digest
    reports = [json.loads(files["ckpt_prune.json"]) | {"plan": None} for files in (direct, from_plan)]
    assert reports[0] == reports[1]


def test_a_plan_for_another_model_is_refused(sources, tmp_path):
    plan = make_plan(job_on(sources.folder("llama"), PLANNED["one strength"], sources.statistics("llama")))
    other = make(tmp_path / "other", "llama-biases")
    with pytest.raises(UserError) as caught:
        job_on(other, FullRecipe.model_validate(plan.recipe.model_dump(by_alias=True)), plan=plan, live=windows())
    assert str(caught.value) == f"the plan was made for another model ({sources.folder('llama').name}), not {other}"


def test_a_plan_edited_by_hand_is_refused(sources, tmp_path):
    plan = make_plan(job_on(sources.folder("llama"), PLANNED["one strength"], sources.statistics("llama")))
    text = plan.to_json()
    (tmp_path / "plan.json").write_text(text.replace('"lambda": 0.1', '"lambda": 0.2'), encoding="utf-8")
    with pytest.raises(UserError, match="the recipe inside does not match its digest: plan again instead of editing"):
        read_plan(tmp_path / "plan.json")
    for broken in ("", "[]", text[:-5], text.replace('"version": 1', '"version": 2', 1)):
        (tmp_path / "plan.json").write_text(broken, encoding="utf-8")
        with pytest.raises(UserError, match="is not a plan: plans are written by `ckpt-prune plan`"):
            read_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "absent.json")


def test_a_sequential_job_on_text_has_no_plan(sources):
    job = job_on(sources.folder("llama"), recipe("ridge", target="sequential"), live=windows())
    with pytest.raises(UserError, match="a plan is made from statistics: calibrate first"):
        make_plan(job)


# ---- the strength ----------------------------------------------------------------------------------------------


def test_the_strength_of_least_perplexity_is_chosen(sources, tmp_path):
    """Against one run for each strength, evaluated as a whole model by the textbook."""
    folder, ids = sources.folder("qwen3"), windows(3, 16)
    search = recipe("ridge", heads=0.5, mlp=0.5, target="sequential", search=BY_PERPLEXITY)

    def run(full_recipe, out):
        return prune(job_on(folder, full_recipe, live=ids), out)

    report = run(search, tmp_path / "searched")
    expected = {}
    for strength in GRID:
        run(recipe("ridge", heads=0.5, mlp=0.5, target="sequential", lam=strength), tmp_path / str(strength))
        expected[strength] = perplexity.perplexity(stock(tmp_path / str(strength)), ids)
    assert len({f"{p:.3f}" for p in expected.values()}) == len(GRID)
    best = min(expected, key=expected.get)
    assert report["lambda_search"]["chosen"] == best
    assert report["lambda_search"]["perplexity"] == pytest.approx({f"{k:g}": p for k, p in expected.items()}, rel=1e-4)
    name = "model.safetensors"
    assert (tmp_path / "searched" / name).read_bytes() == (tmp_path / str(best) / name).read_bytes()


def test_the_strength_of_least_held_out_error_is_chosen(sources, tmp_path):
    """Fit on one half, score on the other, in both directions, from activations."""
    full_recipe = recipe("ridge", heads=0.5, mlp=0.5, search=BY_FOLDS)
    report = prune(job_on(sources.folder("qwen3"), full_recipe, sources.statistics("qwen3", folds=2)), tmp_path / "out")
    model = stock(sources.folder("qwen3"))
    chosen = set()
    for site in report["sites"]:
        path = f"model.layers.{site['block']}.{CONSUMERS[site['space']]}"
        halves = [inputs_of(model, [path], half)[path] for half in (windows()[:4], windows()[4:])]
        kept = columns_of(site["kept"], per_unit(model, site["space"]))
        W = model.get_submodule(path).weight.detach().double().numpy()
        errors = {}
        for value in GRID:
            errors[value] = 0.0
            for train, held_out in (halves, halves[::-1]):
                X = train[:, kept]
                strength = value * float((X**2).sum(0).mean())
                answer = closed_forms.ridge(W[:, kept], X, train @ W.T, strength)
                errors[value] += closed_forms.residual(held_out[:, kept], held_out @ W.T, answer)
        assert site["strength"] == min(errors, key=errors.get)
        chosen.add(site["strength"])
    assert report["lambda_search"] is None
    assert chosen <= set(GRID)


def searching(sources, monkeypatch, values):
    """A job that chooses lambda, and that finds these losses."""
    answers = iter(values)
    monkeypatch.setattr(HiddenStream, "measure_nll", lambda self: next(answers))
    return job_on(sources.folder("llama"), recipe("ridge", target="sequential", search=BY_PERPLEXITY), live=windows())


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ([2.0, 1.0, 1.0], 100.0),
        ([1.0, 2.0, 3.0], 0.01),
        ([1e9, 3.0, math.nan], 1.0),
        ([math.nan, math.inf, 3.0], 100.0),
    ],
)
def test_ties_go_to_the_larger_strength_and_overflows_are_never_chosen(sources, monkeypatch, values, chosen):
    result = search_strength(searching(sources, monkeypatch, values))
    assert result.chosen == chosen
    assert list(result.perplexity.values()) == [math.exp(v) if v < 700 else None for v in values]
    assert json.loads(result.model_dump_json()) == result.model_dump()


def test_strengths_that_all_overflow_are_refused(sources, monkeypatch, tmp_path):
    job = searching(sources, monkeypatch, [1e9, math.nan, math.inf])
    assert refusal(prune, job, tmp_path / "out") == (
        "no lambda of the grid (0.01, 1, 100) gives a finite perplexity on the calibration text: "
        "drop less, or try other values with lambda_grid"
    )
    assert not list(tmp_path.iterdir())


def test_a_report_has_null_where_a_perplexity_overflowed(sources, monkeypatch, tmp_path):
    report = prune(searching(sources, monkeypatch, [1.0, math.nan, 1e9]), tmp_path / "out")
    assert list(report["lambda_search"]["perplexity"].values()) == [math.e, None, None]


@pytest.mark.parametrize(
    ("full_recipe", "how", "message"),
    [
        (recipe("ridge"), {}, "recipe test needs statistics: give --text FILE to measure them, or --statistics STATS"),
        (recipe("ridge", search=BY_PERPLEXITY), {"folds": 2}, "lambda_by: perplexity needs text to measure it on"),
        (recipe("ridge", search=BY_FOLDS), {"folds": 1}, "lambda_by: folds needs at least two folds"),
    ],
    ids=["no moments", "no text", "one fold"],
)
def test_a_job_that_lacks_something_is_refused(sources, full_recipe, how, message):
    statistics = sources.statistics("llama", **how) if how else None
    assert refusal(job_on, sources.folder("llama"), full_recipe, statistics).startswith(message)


def test_an_output_over_the_source_is_refused(sources):
    folder = sources.folder("llama")
    for out in (folder, folder / "inside", folder.parent):
        with pytest.raises(UserError, match="overlaps the source"):
            prune(job_on(folder, recipe("none", "magnitude")), out)
