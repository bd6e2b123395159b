"""How many units of every site stay: by ratio or size, by FLAP's rankings, or by the least predicted error."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ckpt_prune.architectures.family import SpaceName
from ckpt_prune.calibration.measure import moments_name
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.containers.container import Widths
from ckpt_prune.errors import UserError
from ckpt_prune.planning.accounting import Cost, cost_of
from ckpt_prune.planning.budget import BudgetError, Curve, least_error, merged
from ckpt_prune.planning.selection import Site
from ckpt_prune.planning.sizes import SizeKind, cost_in
from ckpt_prune.progress import track
from ckpt_prune.transform.engine import Decisions
from ckpt_prune.transform.layout import pruned_shapes
from ckpt_prune.transform.rankings import ranked, standardised_scores

if TYPE_CHECKING:
    from ckpt_prune.transform.job import Job

_RATIO_STEPS = 10_000
"""Ratios that are tried for a size: multiples of one in so many."""
_ROUNDS = 5
"""How often a budget is lowered by what the container adds to it, which is biases of a few blocks."""


def decide(job: "Job") -> Decisions:
    """What a job's recipe settles before the first block.

    Raises:
        UserError: a size that no widths reach, or statistics that lack what widths are found from.
    """
    allocation = job.recipe.allocation
    if allocation == "least-error":
        return _least_error(job)
    if job.recipe.size is not None:
        raise ValueError("a size is turned into a ratio by at_size before anything else")
    if allocation == "uniform":
        return Decisions(job.recipe, scores=job.scores or {})
    return Decisions(job.recipe, ranked(job, standardised_scores(job)))


def at_size(job: "Job") -> "Job":
    """The job with the least ratio that reaches its recipe's size, where one ratio says it all.

    Raises:
        UserError: no ratio reaches it.
    """
    recipe = job.recipe
    if recipe.size is None or recipe.allocation == "least-error" or job.plan is not None:
        return job
    uniform = recipe.allocation == "uniform"
    if not job.settled:
        return job
    limit, kind = recipe.size.of(job.before), recipe.size.kind
    scores = {} if uniform else standardised_scores(job)

    def widths(step: int) -> Widths:
        tried = recipe.with_ratio(step / _RATIO_STEPS)
        trial = replace(job, recipe=tried)
        return job.widths_of(Decisions(tried) if uniform else Decisions(tried, ranked(trial, scores)))

    def cost(step: int) -> int:
        return cost_in(kind, _cost(job, widths(step)))

    most, budget = _largest_step(job), limit
    for _ in range(_ROUNDS):
        if cost(most) > budget:
            raise UserError(_unreachable(job, cost(most)) if budget == limit else _taken_up(job))
        step = bisect_left(range(most), True, key=lambda tried: cost(tried) <= budget)
        # What the container adds is known only where it is chosen: elsewhere no class might have the shape.
        whole = cost_in(kind, job.cost_at(widths(step)))
        if whole <= limit:
            return replace(job, recipe=recipe.with_ratio(step / _RATIO_STEPS), asked=recipe)
        budget = min(budget - 1, limit - (whole - cost(step)))
    raise UserError(_taken_up(job))


def _largest_step(job: "Job") -> int:
    """The largest ratio that leaves a unit of every space."""
    recipe = job.recipe

    def empties(step: int) -> bool:
        sites = replace(job, recipe=recipe.with_ratio(step / _RATIO_STEPS)).unsettled
        try:
            return any(sites.keep_count(space) < 1 for space in recipe.spaces)
        except UserError:
            return True

    return bisect_left(range(_RATIO_STEPS), True, key=empties) - 1


def _unreachable(job: "Job", least: float) -> str:
    assert job.recipe.size is not None
    kind = job.recipe.size.kind
    return (
        f"{job.recipe.size.words}: out of reach of recipe {job.recipe.name}, whose spaces leave {least:,.0f} at the "
        f"least, of {cost_in(kind, job.before):,}"
    )


def _taken_up(job: "Job") -> str:
    assert job.recipe.size is not None
    return f"{job.recipe.size.words} cannot be met: the biases that the container needs take up what is saved"


def check_reachable(job: "Job") -> None:
    """Refuse a size that no widths reach, before anything is measured.

    Raises:
        UserError: with the least size there is.
    """
    recipe = job.recipe
    if recipe.size is None or recipe.allocation != "least-error":
        return
    units = {space: job.family.units(job.config, space) for space in recipe.spaces}
    smallest = {space: min(count, recipe.spaces[space].multiple_of) for space, count in units.items()}
    least = cost_in(recipe.size.kind, _cost(job, [smallest] * job.blocks))
    if least > recipe.size.of(job.before):
        raise UserError(_unreachable(job, least))


def dense_scores(job: "Job") -> dict[Site, Tensor]:
    """Scores of every site's units in the dense model, from its statistics; of q and k, (heads, dimensions)."""
    assert job.statistics is not None
    sites = job.unsettled.sites
    found: dict[Site, Tensor] = {}
    for block in track(range(job.blocks), "ranking", total=job.blocks):
        names = {space: moments_name(job.family, block, space) for space in job.recipe.spaces}
        moments = job.statistics.block(block, set(names.values()))
        for space, name in names.items():
            tensors = job.checkpoint.read([n for n in sites.tensors(block, space) if n in job.checkpoint.tensors])
            found[block, space] = sites.scores(block, space, tensors, moments.get(name, ())).cpu()
    return found


def error_curve(scores: Tensor) -> Tensor:
    """Error of dropping the k units of least score, for every k, (units + 1,) float64.

    Args:
        scores: (units,) of score obs, which are such errors; or (heads, dimensions) of q and k, whose energies add up
            over the k dimensions that every head loses.
    """
    ranked = scores.double().sort(-1).values
    dropped = ranked if scores.ndim == 1 else ranked.cumsum(-1).sum(0)
    return torch.cat([dropped.new_zeros(1), dropped])


def weighed_by_energy(curve: Tensor) -> Tensor:
    """An error curve as shares of what dropping everything costs."""
    return curve / curve[-1] if curve[-1] > 0 else curve


def weighed_by_effect(curve: Tensor, effects: list[tuple[int, float]]) -> Tensor:
    """An error curve in units of the measured effect: through the measured points, in the curve's shape between them.

    Args:
        curve: (units + 1,).
        effects: (units dropped, divergence of the model's output), ascending; none for a site of one unit.
    """
    known = [(k, effect / float(curve[k])) for k, effect in effects if curve[k] > 0]
    if not known:
        return weighed_by_energy(curve)
    # The divergence per unit of error changes slowly with k: linear between the measured points, constant outside.
    factor = torch.full_like(curve, known[-1][1])
    factor[: known[0][0]] = known[0][1]
    weighed = curve * factor
    for (start, left), (stop, right) in pairwise(known):
        between = curve[start : stop + 1] * torch.linspace(left, right, stop - start + 1, dtype=curve.dtype)
        # The factor may fall faster than the curve rises: no width between costs more than the wider of the two ends.
        weighed[start : stop + 1] = between.clamp_max(between[[0, -1]].max())
    return weighed.cummax(0).values


def _least_error(job: "Job") -> Decisions:
    recipe = job.recipe
    if job.statistics is None:
        raise UserError(
            f"allocation {recipe.allocation} has no widths before the model is measured: `ckpt-prune plan --statistics "
            "STATS` tells them"
        )
    check_reachable(job)
    scores = dense_scores(job) if job.scores is None else job.scores
    kind: SizeKind = "params" if recipe.size is None else recipe.size.kind
    curves = _curves(job, scores, job.statistics.index.effects, kind)
    dense = sum(curve.units * curve.unit_cost for curve in curves.values())
    whole = cost_in(kind, job.before)
    limit = _limit(job)
    budget = limit - (whole - dense)
    for _ in range(_ROUNDS):
        try:
            counts = _solve(job, curves, budget)
        except BudgetError as error:
            if recipe.size is None:
                raise
            raise UserError(_taken_up(job)) from error
        # Sequential moments differ from these: there, units are ranked anew when their block is reached.
        decisions = Decisions(recipe, counts=counts, scores={} if job.sequential else scores)
        widths = job.widths_of(decisions)
        found = cost_in(kind, job.cost_at(widths))
        # A ratio speaks of weights, not of the biases that a container adds.
        if recipe.size is None or found <= limit:
            return decisions
        budget = min(budget - 1, limit - (found - cost_in(kind, _cost(job, widths))) - (whole - dense))
    raise UserError(_taken_up(job))


def _curves(
    job: "Job", scores: Mapping[Site, Tensor], effects: Mapping[str, list[tuple[int, float]]], kind: SizeKind
) -> dict[Site, Curve]:
    """What every site loses with its units, weighed as the recipe says, and what a unit costs."""
    unit_costs = _unit_costs(job, kind)
    curves: dict[Site, Curve] = {}
    for (block, space), own in scores.items():
        curve = error_curve(own)
        if job.recipe.weighed_by_effect:
            curve = weighed_by_effect(curve, effects.get(moments_name(job.family, block, space), []))
        else:
            curve = weighed_by_energy(curve)
        curves[block, space] = Curve(curve, unit_costs[space], job.recipe.spaces[space].multiple_of)
    return curves


def _solve(job: "Job", curves: Mapping[Site, Curve], budget: float) -> dict[Site, int]:
    if job.recipe.widths == "per_layer":
        return least_error(curves, budget)
    spaces = {space: merged([c for site, c in curves.items() if site[1] == space]) for space in job.recipe.spaces}
    kept = least_error(spaces, budget)
    return {site: kept[site[1]] for site in curves}


def _limit(job: "Job") -> int:
    """The size to keep to: the recipe's, or what its ratio leaves in every block."""
    if job.recipe.size is not None:
        return job.recipe.size.of(job.before)
    return cost_in("params", _cost(job, job.widths_of(Decisions(job.recipe))))


def _unit_costs(job: "Job", kind: SizeKind) -> dict[SpaceName, float]:
    """What one unit of a space costs in one block: all sizes are linear in the widths of a block."""
    units = {space: job.family.units(job.config, space) for space in job.recipe.spaces}
    found: dict[SpaceName, float] = {}
    for space in units:
        if units[space] == 1:
            found[space] = 1.0  # it stays whatever it costs
            continue
        widths = [dict(units) for _ in range(job.blocks)]
        widths[0][space] -= 1
        found[space] = float(cost_in(kind, job.before) - cost_in(kind, _cost(job, widths)))
    return found


def _cost(job: "Job", widths: Widths) -> Cost:
    """Cost at some widths, before the container adds biases."""
    return cost_of(job.family, job.config, pruned_shapes(job.checkpoint, job.family, widths))


def check_effects(statistics: Statistics) -> None:
    """Refuse to weigh by effects that were not measured.

    Raises:
        UserError: there are none.
    """
    if not statistics.index.effects:
        raise UserError(
            f"{statistics.folder} holds no effects, by which allocation least-error weighs errors: calibrate with "
            "--folds 4 --effects, or say --set weigh_by=energy"
        )
