"""The size/error curve: each point is the plan at its ratio."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.job import Job
from ckpt_prune.model.cost import cost_of
from ckpt_prune.runner.plan import make_plan, prepare_plan
from ckpt_prune.runner.sweep_points import SweepPoint, points_at
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.encoders import calibrate, request_on
from tests.stages.whole import data_of

RATIOS = (0.0, 0.5)
OBS = {"score": "obs", "compensation": {"method": "auto", "lambda_grid": [0.01, 1.0]}}


def least_error(**top: Any) -> FullRecipe:
    values = {"version": 1, "name": "test", "container": "any", "allocation": "least-error", "weigh_by": "energy"}
    return FullRecipe.model_validate(values | {"spaces": {"heads": OBS, "mlp": OBS}} | top)


QK = {"score": "logit-energy", "compensation": {"method": "logit"}}
CASES: dict[str, tuple[str, FullRecipe]] = {
    "least error": ("llama", least_error(widths="per_layer")),
    "q and k": ("vit", least_error(spaces={"qk": QK, "mlp": OBS}, widths="per_layer")),
    "ranked": ("llama", load_recipe("flap-global")),
}


def expected_point(request: Job, ratio: float) -> SweepPoint:
    """From a plan of its own."""
    prepared = prepare_plan(replace(request, recipe=request.recipe.with_ratio(ratio)))
    plan = make_plan(prepared)
    widths, errors = {}, {}
    for space in request.recipe.spaces:
        counts = [width[space] for width in prepared.widths]
        widths[space] = (min(counts), max(counts))
        site_errors = []
        for site in plan.sites:
            if site.space == space and len(site.kept) == site.units:
                site_errors.append(0.0)
            elif site.space == space and site.error_held_out is not None:
                site_errors.append(site.error_held_out)
            elif site.space == space:
                site_errors.append(site.error_compensated)
        errors[space] = None if None in site_errors else fmean(site_errors)
    return SweepPoint(ratio, plan.after, widths, errors)


@pytest.mark.parametrize("case", CASES)
def test_points_are_plans(dense, case):
    variant, recipe = CASES[case]
    request = request_on(dense.folder(variant), recipe, dense.statistics(variant, 2))
    points = points_at(request, RATIOS)
    for point, ratio in zip(points, RATIOS, strict=True):
        alone = expected_point(request, ratio)
        assert (point.value, point.after, point.widths) == (alone.value, alone.after, alone.widths)
        assert point.errors == pytest.approx(alone.errors)
    assert points[0].after == cost_of(request.model)
    assert set(points[0].errors.values()) == {0.0}
    assert points[0].after.parameters > points[1].after.parameters
    assert all(0 < error < 1 for error in points[1].errors.values())


def test_a_score_without_moments_needs_none(dense, tmp_path):
    folder = dense.folder("vit")
    statistics = calibrate(folder, tmp_path / "columns", data_of("vit"), collect=("moments", "gram"))
    spaces = {"qk": {"score": "magnitude"}, "mlp": {"score": "wanda-sp"}}
    recipe = FullRecipe.model_validate({"version": 1, "name": "test", "container": "any", "spaces": spaces})
    request = request_on(folder, recipe, statistics)
    assert make_plan(prepare_plan(request)).sites
    assert points_at(request, [0.5])[0].errors["qk"] is None


def test_a_ratio_that_leaves_nothing_is_refused(dense):
    request = request_on(dense.folder("llama"), load_recipe("magnitude"))
    with pytest.raises(UserError) as caught:
        points_at(request, [0.5, 0.99])
    assert str(caught.value) == "ratio 0.99 would drop all 22 units of a space: at least one must stay"
