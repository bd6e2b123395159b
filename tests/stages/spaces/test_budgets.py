"""Widths for a size: against every width of tiny models tried, and against what is written."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_prune.common.errors import UserError
from ckpt_prune.compensation.logit import logit_system
from ckpt_prune.job.prepared import Prepared, begin
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.statistics.folder import Statistics, record_effects
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.spaces import Site
from ckpt_prune.recipe.sizes import cost_in
from ckpt_prune.runner.plan import make_plan
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.spaces.effects.site_variants import dropped_counts
from ckpt_prune.stages.spaces.size_search import Sized, at_size
from ckpt_prune.stages.spaces.solvers import solver_of
from ckpt_prune.stages.spaces.widths import (
    decide,
    dense_ranking,
    effects_on,
    scale_curve,
)
from ckpt_prune.verification.verify import verify
from tests.encoders import job_on, request_on
from tests.families import BLOCKS, calibrate, prune
from tests.oracles import whole_best
from tests.pairs import dealt, one_of
from tests.refusals import refusal
from tests.stages.whole import data_of, make_wide
from tests.stored import Sources

KINDS = ("params", "bytes", "flops")
SPACES = {"llama": ("heads", "mlp"), "opt": ("heads", "mlp"), "vit": ("qk", "mlp")}
# Hidden size 16, heads of 4 dimensions, 32 tokens of a text, 10 of an image. A unit's weights, its biases, and the
# dimensions in which scores are made and values are weighed: two products of tokens by tokens.
UNITS: dict[str, dict[str, tuple[int, int, int, int]]] = {
    "llama": {"heads": (4, 4 * 4 * 16, 0, 8), "mlp": (22, 3 * 16, 0, 0)},
    "opt": {"heads": (4, 4 * 4 * 16, 12, 8), "mlp": (22, 2 * 16, 1, 0)},
    "vit": {"qk": (4, 2 * 4 * 16, 8, 4), "mlp": (22, 2 * 16, 1, 0)},
}
"""Variant → space → units of a block, and of each: weights, biases, dimensions of attention."""
TOKENS = {"llama": 32, "opt": 32, "vit": 10}


def unit_cost(variant: str, space: str, kind: str) -> int:
    _, weights, biases, dimensions = UNITS[variant][space]
    if kind == "flops":
        return 2 * TOKENS[variant] * weights + 2 * TOKENS[variant] ** 2 * dimensions
    return (weights + biases) * (4 if kind == "bytes" else 1)


def make_recipe(variant: str, *, multiple: int = 1, compensation: Any = "none", **top: Any) -> FullRecipe:
    spaces = {
        space: {
            "score": "logit-energy" if space == "qk" else "obs",
            "multiple_of": multiple if space == "mlp" else 1,
            "compensation": compensation if isinstance(compensation, dict) and space != "qk" else {"method": "none"},
        }
        for space in top.pop("spaces", SPACES.get(variant, ("heads", "mlp")))
    }
    values = {"version": 1, "name": "test", "allocation": "least-error", "container": "any", "spaces": spaces}
    return FullRecipe.model_validate(values | top)


def curves_of(job: Prepared) -> dict[Site, np.ndarray]:
    """Return the error at every width, before measured effects; `test_curves.py` holds it against definitions."""
    model, recipe, statistics = job.model, job.recipe, job.statistics
    curves = {}
    for block in range(BLOCKS):
        metric = {} if recipe.weigh_by == "energy" else statistics.read_fisher(block)
        for space in recipe.spaces:
            solver, name = solver_of(model, recipe, space, torch.device("cpu")), model.moments_name(block, space)
            tensors, folds = solver.read(block), statistics.read_moments(block)[name]
            scores = solver.scores(block, tensors, folds)
            curves[Site(block, space)] = solver.errors(block, tensors, folds, scores, metric.get(name)).numpy()
    return curves


@pytest.fixture(scope="module")
def weighed(dense: Sources) -> Callable[[str], Statistics]:
    """Statistics of a variant with made-up effects: those of the last block are a hundred times the first's.

    The made-up effects are shares of what the metric predicts, so that every result depends on both.
    """
    by_variant: dict[str, Statistics] = {}

    def of(variant: str) -> Statistics:
        if variant not in by_variant:
            statistics, folder = dense.statistics(variant, 2), dense.folder(variant)
            job = job_on(folder, make_recipe(variant), statistics)
            effects = {}
            for (block, space), curve in curves_of(job).items():
                points = enumerate(dropped_counts(len(curve) - 1, (0.25, 0.5, 0.75)))
                site_effects = [(k, float(curve[k]) * 10**block * (2 + n)) for n, k in points]
                effects[job.model.moments_name(block, space)] = site_effects
            by_variant[variant] = record_effects(statistics, effects)
        return by_variant[variant]

    return of


def groups_of(job: Prepared, variant: str, kind: str) -> list[list[whole_best.Site]]:
    """The sites whose widths go together, space by space and block by block."""
    curves, recipe = curves_of(job), job.recipe
    sites = {}
    for (block, space), curve in curves.items():
        if recipe.weigh_by == "energy":
            errors = whole_best.as_shares(curve)
        else:
            errors = whole_best.as_effects(curve, job.statistics.index.effects[job.model.moments_name(block, space)])
        cost = unit_cost(variant, space, kind)
        sites[block, space] = whole_best.Site(errors, cost, recipe.spaces[space].multiple_of)
    if recipe.widths == "uniform":
        return [[sites[block, space] for block in range(BLOCKS)] for space in recipe.spaces]
    return [[sites[block, space]] for space in recipe.spaces for block in range(BLOCKS)]


def widths_of(job: Prepared) -> list[list[int]]:
    """In the order of `groups_of`."""
    if job.recipe.widths == "uniform":
        return [[job.widths[block][space] for block in range(BLOCKS)] for space in job.recipe.spaces]
    return [[job.widths[block][space]] for space in job.recipe.spaces for block in range(BLOCKS)]


def cost(job: Prepared, kind: str, *, before: bool = False) -> int:
    costs = job.before if before else job.output.cost
    return {"params": costs.parameters, "bytes": costs.bytes, "flops": costs.flops}[kind]


# ---- the least predicted error -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "weigh_by", "widths"),
    [("llama", "effect", "per_layer"), ("opt", "effect", "uniform")],
)
def test_no_widths_do_better(dense, weighed, variant, weigh_by, widths):
    choices = set()
    for kind, share in zip(KINDS, ("70%", "81%", "62.5%"), strict=True):
        recipe = make_recipe(variant, weigh_by=weigh_by, widths=widths, size={kind: share})
        job = job_on(dense.folder(variant), recipe, weighed(variant))
        limit = int(cost(job, kind, before=True) * float(share[:-1]) / 100)
        groups = groups_of(job, variant, kind)
        error, spent = whole_best.total(groups, widths_of(job))
        units = [len(site.errors) - 1 for sites in groups for site in sites]
        full_cost = sum(n * site.cost for n, site in zip(units, itertools.chain(*groups), strict=True))
        fixed = cost(job, kind, before=True) - full_cost
        assert cost(job, kind) == fixed + spent <= limit
        assert error == pytest.approx(whole_best.least(groups, limit - fixed), rel=1e-9)
        if widths == "uniform":
            assert all(len(set(site_widths)) == 1 for site_widths in widths_of(job))
        choices.add(str(widths_of(job)))
    assert len(choices) == 3


LOW_RANK = {"score": "logit-energy", "compensation": {"method": "low-rank", "lambda": 0.01}}
ATTENTION: dict[str, Any] = {
    "qk": LOW_RANK,
    "heads": {"score": "obs", "compensation": {"method": "affine"}},
    "mlp": {"score": "obs", "compensation": {"method": "affine"}},
}


def test_heads_dimensions_and_columns_in_one_budget(dense, tmp_path):
    """Widths for one budget lose no more than uniform ones; the output has the planned size and passes `verify`."""
    variant = "vit"
    values = make_recipe(variant, widths="per_layer", size={"params": "64%"}).model_dump(by_alias=True)
    statistics = dense.statistics(variant, 2)
    shared, separate = (
        job_on(
            dense.folder(variant),
            FullRecipe.model_validate(values | {"spaces": ATTENTION, "widths": widths}),
            statistics,
        )
        for widths in ("uniform", "per_layer")
    )
    curves = curves_of(separate)

    def lost(job: Prepared) -> float:
        total = 0.0
        for (block, space), curve in curves.items():
            width = job.widths[block]
            # An error inside a head that goes is none.
            stays = width["heads"] / job.model.units("heads", 0) if space == "qk" else 1.0
            total += stays * float(curve[len(curve) - 1 - width[space]])
        return total

    assert lost(separate) <= lost(shared)
    report = prune(separate, tmp_path / "out")
    numbers, taken = whole_best.sizes(tmp_path / "out")
    assert numbers == separate.output.cost.parameters == report["after"]["parameters"]
    assert separate.before.parameters * 0.6 < numbers <= separate.before.parameters * 0.64
    assert taken == separate.output.cost.bytes
    assert [check.detail for check in verify(tmp_path / "out", dense.folder(variant)) if check.passed is False] == []
    assert len({str(width) for width in separate.widths}) > 1


def test_what_corp_loses_tells_what_an_error_of_the_logits_is_worth(dense, weighed):
    """Effects of q and k are measured with CORP's compensation; low rank errs less, and is scaled by the same worth."""
    statistics, width = weighed("vit"), UNITS["vit"]["qk"][0]
    qk: dict[str, Any] = {"score": "logit-energy", "compensation": {"method": "low-rank"}}
    values = make_recipe("vit", widths="per_layer", size={"params": "90%"}).model_dump(by_alias=True)
    job = job_on(dense.folder("vit"), FullRecipe.model_validate(values | {"spaces": {"qk": qk}}), statistics)
    plain, ranking = curves_of(job), dense_ranking(job)
    corp = {"score": "logit-energy", "ratio": 1 / width, "compensation": {"method": "logit", "lambda": 0.001}}
    one = FullRecipe.model_validate({"version": 1, "name": "one", "container": "any", "spaces": {"qk": corp}})
    for site in make_plan(job_on(dense.folder("vit"), one, statistics, diagnostics=True)).sites:
        name = job.model.moments_name(site.site.block, "qk")
        moments = sum_folds(statistics.read_moments(site.site.block)[name])
        energy = logit_system(moments, torch.arange(width).expand(moments.heads, -1)).energy
        lost = torch.tensor([head.error_compensated for head in site.heads]) * energy / moments.samples
        predicted = float(statistics.read_fisher(site.site.block)[name].mean @ lost) / 2
        count, effect = effects_on(statistics, name, "logit-energy")[0]
        assert count == width - len(site.kept) // moments.heads
        (ranked,) = ranking[site.site]
        assert float(ranked.errors[count]) == pytest.approx(plain[site.site][count] * effect / predicted, rel=1e-4)
        assert not torch.allclose(ranked.errors, torch.from_numpy(plain[site.site]))


@pytest.mark.parametrize(
    ("crossing", "share"),
    one_of(
        2,
        dealt(
            [
                ("llama-gqa-tied", "queries", "params"),
                ("opt", "qk", "params"),
                ("opt", "qk", "flops"),
                ("vit", "qk", "bytes"),
            ],
            ["55%", "70%", "85%"],
        ),
    ),
)
def test_no_widths_of_spaces_that_cross_do_better(dense, crossing, share):
    """Every combination of one width per space, at the cost of its own shapes. An error inside what goes is none."""
    variant, inner, kind = crossing
    recipe = make_recipe(
        variant, spaces=(inner, "heads", "mlp"), weigh_by="energy", widths="uniform", size={kind: share}
    )
    job = job_on(dense.folder(variant), recipe, dense.statistics(variant, 2))
    model, curves = job.model, {space: [] for space in recipe.spaces}
    for (_, space), curve in curves_of(job).items():
        curves[space].append(whole_best.as_shares(curve))
    errors = {space: sum(parts) for space, parts in curves.items()}
    units = {space: model.units(space, 0) for space in recipe.spaces}
    limit = int(cost(job, kind, before=True) * float(share[:-1]) / 100)

    def error(widths: dict[str, int]) -> float:
        lost = {space: float(errors[space][units[space] - kept]) for space, kept in widths.items()}
        return lost["mlp"] + lost["heads"] + lost[inner] * widths["heads"] / units["heads"]

    tried = [
        dict(zip(units, kept, strict=True)) for kept in itertools.product(*(range(1, n + 1) for n in units.values()))
    ]
    fitting = [widths for widths in tried if cost_in(kind, cost_of(model, model.shapes_at([widths] * BLOCKS))) <= limit]
    assert cost(job, kind) <= limit
    assert error(job.widths[0]) == pytest.approx(min(map(error, fitting)), rel=1e-9)


def test_nothing_goes_where_everything_fits(dense, weighed):
    for size in ({"params": "100%"}, {"flops": "1T"}):
        job = job_on(dense.folder("opt"), make_recipe("opt", widths="per_layer", size=size), weighed("opt"))
        assert job.output.cost == job.before


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("llama", {"params": "4_500"}),
        ("opt", {"bytes": "20KB"}),
        ("vit", {"flops": "80%"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_written_is_within_the_size(dense, weighed, variant, size, tmp_path):
    """Counted in the files."""
    recipe = make_recipe(variant, widths="per_layer", compensation={"method": "ridge"}, size=size)
    job = job_on(dense.folder(variant), recipe, weighed(variant))
    report = prune(job, tmp_path / "out")
    numbers, taken = whole_best.sizes(tmp_path / "out")
    assert (report["after"]["parameters"], report["after"]["bytes"]) == (numbers, taken)
    shapes = {n: (torch.float32, tuple(v.shape)) for n, v in whole_best.read(tmp_path / "out").items()}
    flops = cost_of(job.model, shapes).flops
    assert report["after"]["flops"] == flops
    limits = {
        "4_500": 4500,
        "20KB": 20_000,
        "80%": job.before.flops * 4 // 5,
    }
    ((kind, text),) = size.items()
    written = {"params": numbers, "bytes": taken, "flops": flops}[kind]
    smallest = min(unit_cost(variant, space, kind) for space in SPACES[variant])
    assert 0 <= limits[text] - written < smallest
    again = [(site["block"], site["space"], len(site["kept"])) for site in report["sites"]]
    heads = 4 if variant == "vit" else 1
    assert again == [
        (block, space, width[space] * (heads if space == "qk" else 1))
        for block, width in enumerate(job.widths)
        for space in SPACES[variant]
    ]


AFFINE = {"method": "auto", "candidates": ["affine"], "lambda_grid": [0.01, 1.0]}


@pytest.mark.parametrize(
    ("widths", "kind", "share"), [("uniform", "params", 45), ("per_layer", "bytes", 60), ("per_layer", "params", 80)]
)
def test_biases_of_the_container_count(dense, weighed, share, widths, kind):
    """A llama has no slot for the biases that affine adds: others get one with those, and widths make room."""
    recipe = make_recipe("llama", widths=widths, compensation=AFFINE, size={kind: f"{share}%"})
    job = job_on(dense.folder("llama"), recipe, weighed("llama"))
    groups = groups_of(job, "llama", "params")
    _, spent = whole_best.total(groups, widths_of(job))
    full_cost = BLOCKS * (4 * 256 + 22 * 48)
    rows = [dict.fromkeys("qkv", 4 * w["heads"]) | dict.fromkeys(("gate", "up"), w["mlp"]) for w in job.widths]
    opened = [module.split(".")[1].removesuffix("_proj") for module in job.output.container.biases]
    biases = sum(block.get(name, 16) for block in rows for name in opened)
    assert job.output.cost.parameters == job.before.parameters - full_cost + spent + biases
    # What a head of every block, or of one, takes with its biases is more than what may be left over.
    spare = cost(job, kind, before=True) * share // 100 - cost(job, kind)
    assert 0 <= spare < 268 * (BLOCKS if widths == "uniform" else 1) * (4 if kind == "bytes" else 1)


@pytest.mark.parametrize("widths", ["uniform", "per_layer"])
def test_a_size_below_the_least_widths_is_refused(dense, weighed, widths):
    def job(text: str) -> Prepared:
        recipe = make_recipe("llama", widths=widths, size={"params": text})
        return job_on(dense.folder("llama"), recipe, weighed("llama"))

    dropped = BLOCKS * (3 * 256 + 21 * 48)
    least = 7632 - dropped
    assert job(str(least)).widths == [{"heads": 1, "mlp": 1}] * BLOCKS
    assert job(str(least)).after.parameters == least
    with pytest.raises(UserError) as caught:
        _ = job(str(least - 1)).widths
    assert str(caught.value) == (
        f"{least - 1} parameters: out of reach of recipe test, whose spaces leave {least:,} at the least, 30.2% of "
        "7,632 (parameters: mlp 42%, attention 40%, embedding 8%, head 8%, rest 1%)"
    )


@pytest.mark.parametrize("widths", ["uniform", "per_layer"])
def test_a_size_that_biases_take_up_is_refused(dense, weighed, widths):
    """The least widths would do without them."""
    least = 7632 - BLOCKS * (3 * 256 + 21 * 48)
    recipe = make_recipe("llama", widths=widths, compensation=AFFINE, size={"params": str(least)})
    with pytest.raises(UserError) as caught:
        _ = job_on(dense.folder("llama"), recipe, weighed("llama")).widths
    assert str(caught.value) == (
        f"{least} parameters cannot be met: the biases that the container needs take up what is saved"
    )


def test_least_error_needs_statistics_and_the_metric(dense, tmp_path):
    folder = dense.folder("llama")
    with pytest.raises(UserError) as caught:
        _ = job_on(folder, make_recipe("llama", weigh_by="energy"), None, data_of("llama")).widths
    assert str(caught.value) == (
        "allocation least-error has no widths before the model is measured: `ckpt-prune plan --statistics STATS` "
        "prints them"
    )
    bare = calibrate(folder, tmp_path / "bare")
    assert refusal(job_on, folder, make_recipe("llama"), bare) == (
        f"{bare.folder} holds no Fisher metric, by which allocation least-error weighs errors: calibrate with "
        "--folds 4, or say --set weigh_by=energy"
    )
    job_on(folder, make_recipe("llama", weigh_by="energy"), bare)


# ---- one ratio for a size ----------------------------------------------------------------------------------------


def sized_job(folder: Path, name: str, statistics: Statistics | None, size: dict[str, str], *changes: str) -> Prepared:
    recipe = load_recipe(name, changes, size=size)
    return job_on(folder, recipe, statistics)


def at_ratio(folder: Path, name: str, statistics: Statistics | None, ratio: float, *changes: str) -> Prepared:
    return job_on(folder, load_recipe(name, changes, ratio), statistics)


def test_the_least_ratio_of_a_ranking_that_is_within_the_size(dense):
    """One ratio says it all; where blocks share their widths the finest space makes up for the rest (test_sizing)."""
    folder, statistics = dense.folder("llama"), dense.statistics("llama")
    job = sized_job(folder, "flap-global", statistics, {"flops": "60%"})
    limit = int(cost(job, "flops", before=True) * 60 / 100)
    step = round(job.recipe.ratio * 10_000)
    assert job.recipe.ratio == step / 10_000
    assert job.recipe.size is None
    assert job.facts(Sized).recipe == load_recipe("flap-global", size={"flops": "60%"})
    assert {job.recipe.ratio_of(space) for space in job.recipe.spaces} == {job.recipe.ratio}
    assert cost(job, "flops") <= limit
    assert cost(at_ratio(folder, "flap-global", statistics, step / 10_000), "flops") == cost(job, "flops")
    assert cost(at_ratio(folder, "flap-global", statistics, (step - 1) / 10_000), "flops") > limit
    assert job.facts(Sized).larger == cost(at_ratio(folder, "flap-global", statistics, (step - 1) / 10_000), "flops")
    assert len({str(width) for width in job.widths}) > 1


@pytest.mark.parametrize(("name", "share"), [("flap", 62), ("flap-global", 60)])
def test_a_ratio_that_leaves_room_for_biases_is_found(dense, name, share):
    statistics = dense.statistics("llama")
    job = sized_job(dense.folder("llama"), name, statistics, {"params": f"{share}%"})
    assert job.output.cost.parameters <= job.before.parameters * share // 100


def test_a_job_without_a_size_or_with_widths_of_its_own_stays(dense, weighed):
    for recipe in (load_recipe("wanda-sp"), make_recipe("llama", size={"params": "70%"})):
        request = begin(request_on(dense.folder("llama"), recipe, weighed("llama")))
        assert at_size(request) is request
    ranked_recipe = load_recipe("flap-global", size={"params": "70%"})
    ranked = begin(request_on(dense.folder("llama"), ranked_recipe, None, data_of("llama")))
    assert at_size(ranked) is ranked


@pytest.mark.parametrize("heads", [1, 2])
def test_what_a_ratio_reaches_a_size_reaches(tmp_path, heads):
    """Heads are rounded down: one of two is left from 0.5 on, while the mlp goes on shrinking."""
    folder = make_wide(tmp_path / "dense", "llama", num_key_value_heads=heads)
    there = at_ratio(folder, "magnitude", None, 0.9).after.parameters
    assert there < at_ratio(folder, "magnitude", None, 0.5).after.parameters
    assert sized_job(folder, "magnitude", None, {"params": str(there)}).after.parameters <= there


def test_a_size_is_settled_before_anything_else(dense):
    request = begin(request_on(dense.folder("llama"), load_recipe("magnitude", size={"params": "70%"})))
    with pytest.raises(ValueError, match="a size is turned into a ratio by at_size before anything else"):
        decide(request)


# ---- curves ------------------------------------------------------------------------------------------------------


@st.composite
def draw_curve(draw):
    """A rising curve, and points of it with any effects that rise too."""
    steps = draw(st.lists(st.floats(1e-3, 10), min_size=2, max_size=12))
    curve = torch.tensor([0.0, *itertools.accumulate(steps)], dtype=torch.float64)
    points = sorted(draw(st.sets(st.integers(1, len(steps) - 1), min_size=1, max_size=3)))
    worths = draw(st.lists(st.floats(1e-3, 10), min_size=len(points), max_size=len(points)))
    return curve, points, worths


@given(draw_curve())
def test_effects_are_met_where_each_error_is_worth_more_than_the_last(drawn):
    """Worth rising with the units dropped, nothing bends down between two points."""
    curve, points, worths = drawn
    effects = [(k, float(curve[k]) * worth) for k, worth in zip(points, itertools.accumulate(worths), strict=True)]
    scaled = scale_curve(curve, effects)
    assert scaled.numpy() == pytest.approx(whole_best.as_effects(curve.numpy(), effects))
    assert [float(scaled[k]) for k, _ in effects] == pytest.approx([effect for _, effect in effects])
