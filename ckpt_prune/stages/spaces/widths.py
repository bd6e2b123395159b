"""How many units of every site stay: by ratio or size, by FLAP's rankings, or by the least predicted error."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.job.decisions import Decision, Decisions, Losses, kept_units, multiple_of
from ckpt_prune.job.prepared import Prepared, RankedUnits
from ckpt_prune.job.sizes import SizeKind
from ckpt_prune.job.space_kinds import CANDIDATES, CHOSEN, kind_of
from ckpt_prune.measure.moment_sources import CachedMoments, MomentSource, NoMoments
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.spaces import Site, SpaceName, recipe_space
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.spaces.budget import BudgetError, Crossing, Curve, least_error, merged, total_error
from ckpt_prune.stages.spaces.rankings import ranked, standardised_scores
from ckpt_prune.stages.spaces.size_search import (
    ROUNDS,
    Crossed,
    Ranking,
    crossed_spaces,
    dense_size,
    limit_of,
    output_size,
    size_at,
    taken_up,
    unit_costs,
)
from ckpt_prune.stages.spaces.solvers import solver_of


def ranking_of(prepared: Prepared) -> Ranking | None:
    """What a recipe that ranks blocks ranks them by, where it can be told; None for other recipes.

    Scores do not depend on the ratio: `sizing.at_size` and `decide` share one ranking.
    """
    if not prepared.recipe.ranks_blocks or prepared.plan is not None or not prepared.widths_known:
        return None
    return standardised_scores(prepared.model, prepared.recipe, _dense_cache(prepared), prepared.device)


def decide(prepared: Prepared, ranking: Ranking | None = None) -> Decisions:
    """What a recipe settles before the first block.

    Args:
        prepared: without a plan.
        ranking: of `ranking_of`.

    Raises:
        UserError: a size that no widths reach, or statistics that lack what widths are found from.
    """
    recipe = prepared.recipe
    if recipe.allocation == "least-error":
        return _least_error(prepared)
    if recipe.size is not None:
        raise ValueError("a size is turned into a ratio by at_size before anything else")
    if recipe.allocation == "uniform":
        by_ratio, known = Decisions(recipe), prepared.ranked or {}
        columns = prepared.model.family.columns
        sites = {
            site: replace(by_ratio.of(prepared.model, site), scores=own.scores)
            for site, (own,) in known.items()
            # Units in which others have gone are ranked once these are gone.
            if not any(each.within == site.space for name, each in columns.items() if name in recipe.spaces)
        }
        return Decisions(recipe, sites)
    assert ranking is not None
    return kept_units(prepared.model, recipe, ranked(prepared.model, recipe, ranking))


def _dense_cache(prepared: Prepared) -> MomentSource:
    if not prepared.recipe.needs_moments:
        return NoMoments()
    assert prepared.statistics is not None
    return CachedMoments(prepared.statistics, prepared.model)


def dense_ranking(prepared: Prepared) -> dict[Site, list[RankedUnits]]:
    """Every site's units in the dense model, by each score that may rank them.

    With the errors of its widths where these are found by them: in units of the model's own output where the recipe
    weighs by effect.
    """
    assert prepared.statistics is not None
    model, recipe, statistics = prepared.model, prepared.recipe, prepared.statistics
    solvers = {space: solver_of(model, recipe, space, prepared.device) for space in recipe.spaces}
    source = CachedMoments(statistics, model)

    def rank(block: int) -> dict[Site, list[RankedUnits]]:
        found: dict[Site, list[RankedUnits]] = {}
        moments = source.moments(block, {}, list(solvers))
        metric = statistics.read_fisher(block) if recipe.weighed_by_effect else {}
        for space, solver in solvers.items():
            tensors, own, name = solver.read(block), moments.get(space, ()), model.moments_name(block, space)
            ranked = found.setdefault(Site(block, space), [])
            for score in _scores(statistics, space, solver.own.score):
                scores, errors = solver.scores(block, tensors, own, score), None
                if recipe.allocation == "least-error":
                    errors = solver.errors(block, tensors, own, scores, metric.get(name))
                if errors is not None and recipe.weighed_by_effect and solver.tried_out:
                    effects = effects_on(statistics, model.site_name(block, space), score)
                    counts = [count for count, _ in effects]
                    predicted = solver.tried_errors(block, tensors, own, counts, errors, metric[name])
                    errors = scaled(errors, effects, predicted)
                ranked.append(RankedUnits(score, scores.cpu(), errors))
        return found

    group = process_group()
    blocks = model.spaced_blocks[group.rank :: group.size]
    ranked_blocks = group.interleave([rank(block) for block in track(blocks, "ranking", total=len(blocks))])
    found = {site: own for each in ranked_blocks for site, own in each.items()}
    return _together(found, statistics.index.spaces) if recipe.weighed_by_effect else found


def _scores(statistics: Statistics, space: SpaceName, score: str) -> tuple[str, ...]:
    """The scores that may rank the units of a space."""
    if score != CHOSEN:
        return (score,)
    single = statistics.index.scores.get(space)
    return kind_of(space).candidates if single is None else (single,)


def _together(
    ranking: Mapping[Site, Sequence[RankedUnits]], spaces: Mapping[str, Sequence[tuple[int, float]]]
) -> dict[Site, list[RankedUnits]]:
    """Errors scaled to what is measured of all sites of a space together, where it is known."""
    factors: dict[str, list[tuple[int, float]]] = {}
    for space, points in spaces.items():
        sites = [own for site, own in ranking.items() if site.space == space]
        told = [(count, sum(min(float(_errors(one)[count]) for one in own) for own in sites)) for count, _ in points]
        factors[space] = [
            (k, measured / all_) for (k, all_), (_, measured) in zip(told, points, strict=True) if all_ > 0
        ]
    return {
        site: [
            replace(
                each, errors=scaled(_errors(each), [(k, float(_errors(each)[k]) * f) for k, f in factors[site.space]])
            )
            if factors.get(site.space)
            else each
            for each in own
        ]
        for site, own in ranking.items()
    }


def effects_on(statistics: Statistics, name: str, score: str) -> list[tuple[int, float]]:
    """What is known of the effects of dropping units of a site by a score: (units dropped, divergence), ascending.

    Those that gradients predict. Where effects of the same counts were measured too, which is by score obs, they are
    scaled by what the measured ones are to those predicted with it.
    """
    by_score, measured = statistics.index.predicted.get(name, {}), statistics.index.effects.get(name, [])
    own, usual = by_score.get(score), by_score.get(CANDIDATES[0])
    if own is None or usual is None or score == CANDIDATES[0]:
        return measured or own or []
    if [count for count, _ in measured] != [count for count, _ in usual]:
        return own
    triples = zip(own, usual, measured, strict=True)
    return [(count, value * true / told if told > 0 else true) for (count, value), (_, told), (_, true) in triples]


def weighed_by_energy(curve: Tensor) -> Tensor:
    """An error curve as shares of what dropping everything costs."""
    return curve / curve[-1] if curve[-1] > 0 else curve


def scaled(curve: Tensor, effects: list[tuple[int, float]], predicted: Sequence[float] | None = None) -> Tensor:
    """A curve of predicted divergences, through measured ones where there are any, in its own shape between them.

    Args:
        curve: (units + 1,).
        effects: (units dropped, divergence of the model's output), ascending.
        predicted: for each of them what it was predicted to be; by default, what the curve says.
    """
    told = [float(curve[k]) for k, _ in effects] if predicted is None else predicted
    known = [(k, effect / own) for (k, effect), own in zip(effects, told, strict=True) if own > 0]
    if not known:
        return curve
    # Measured over predicted changes slowly with k: linear between the measured points, constant outside.
    factor = torch.full_like(curve, known[-1][1])
    factor[: known[0][0]] = known[0][1]
    weighed = curve * factor
    for (start, left), (stop, right) in pairwise(known):
        between = curve[start : stop + 1] * torch.linspace(left, right, stop - start + 1, dtype=curve.dtype)
        # The factor may fall faster than the curve rises: no width between costs more than the wider of the two ends.
        weighed[start : stop + 1] = between.clamp_max(between[[0, -1]].max())
    return weighed.cummax(0).values


def _least_error(prepared: Prepared) -> Decisions:
    recipe, model = prepared.recipe, prepared.model
    ranking = dense_ranking(prepared) if prepared.ranked is None else prepared.ranked
    kind: SizeKind = "params" if recipe.size is None else recipe.size.kind
    curves = curves_of(prepared, ranking, kind)
    dense = sum(curve.units * curve.unit_cost for curve in curves.values())
    whole = dense_size(prepared, kind)
    limit = _limit(prepared)
    budget = limit - (whole - dense)
    crossed = crossed_spaces(prepared, kind)
    for _ in range(ROUNDS):
        try:
            counts = _solve(prepared, curves, budget, crossed)
        except BudgetError as error:
            if recipe.size is None:
                raise
            raise UserError(taken_up(prepared)) from error
        # Sequential moments differ from these: there, units are ranked anew when their block is reached.
        decisions = Decisions(recipe, {site: _decision(prepared, n, ranking[site]) for site, n in counts.items()})
        widths = decisions.widths(model)
        found = output_size(prepared, kind, widths)
        # A ratio speaks of weights, not of the biases that a container adds.
        if recipe.size is None or found <= limit:
            losses = _losses(curves, counts, budget, crossed) if recipe.widths == "uniform" else None
            return replace(decisions, losses=losses)
        budget = min(budget - 1, limit - (found - size_at(prepared, kind, widths)) - (whole - dense))
    raise UserError(taken_up(prepared))


def _decision(prepared: Prepared, keep: int, own: Sequence[RankedUnits]) -> Decision:
    """So many units, by the score that is best at that width."""
    best = min(own, key=lambda each: float(_errors(each)[-1 - keep]))
    again = prepared.sequential and keep < len(_errors(best)) - 1
    return Decision(keep, scores=None if again else best.scores, score=best.score)


def curves_of(prepared: Prepared, ranking: Mapping[Site, Sequence[RankedUnits]], kind: SizeKind) -> dict[Site, Curve]:
    """What every site loses with its units, by the best score at every width, and what a unit costs."""
    costs = unit_costs(prepared, kind)
    curves: dict[Site, Curve] = {}
    for site, own in ranking.items():
        curve = torch.stack([_errors(each) for each in own]).amin(0)
        if not prepared.recipe.weighed_by_effect:
            curve = weighed_by_energy(curve)
        curves[site] = Curve(curve, costs[site.space], multiple_of(prepared.model, prepared.recipe, site.space))
    return curves


def _errors(ranked: RankedUnits) -> Tensor:
    assert ranked.errors is not None
    return ranked.errors


def _solve(
    prepared: Prepared, curves: Mapping[Site, Curve], budget: float, crossed: Sequence[Crossed]
) -> dict[Site, int]:
    if prepared.recipe.widths == "per_layer":
        return _per_block(curves, budget, crossed)
    together: dict[str, list[Curve]] = {}
    for site, curve in curves.items():
        together.setdefault(recipe_space(site.space), []).append(curve)
    spaces = {space: merged(own) for space, own in together.items()}
    blocks = prepared.model.blocks
    crossings = [Crossing(c.inside, {own: cost * blocks for own, cost in c.shared.items()}) for c in crossed]
    kept = least_error(spaces, budget, crossings)
    return {site: kept[recipe_space(site.space)] for site in curves}


def _per_block(curves: Mapping[Site, Curve], budget: float, crossed: Sequence[Crossed]) -> dict[Site, int]:
    """Widths of every block for itself; all experts of one are as wide."""
    together: dict[Site, list[Curve]] = {}
    for site, curve in curves.items():
        together.setdefault(_with_experts(site), []).append(curve)
    sites = {site: own[0] if len(own) == 1 else merged(own) for site, own in together.items()}
    kept = least_error(sites, budget, _crossings(sites, crossed))
    return {site: kept[_with_experts(site)] for site in curves}


def _with_experts(site: Site) -> Site:
    return site._replace(space=recipe_space(site.space))


def crossings_of(prepared: Prepared, curves: Mapping[Site, Curve], kind: SizeKind) -> list[Crossing[Site]]:
    """Which sites of a request's blocks cross."""
    return _crossings(curves, crossed_spaces(prepared, kind))


def _crossings(curves: Mapping[Site, Curve], crossed: Sequence[Crossed]) -> list[Crossing[Site]]:
    """Which sites of every block cross."""
    return [
        Crossing(
            [(Site(block, inner), Site(block, outer)) for inner, outer in spaces.inside],
            {tuple(Site(block, space) for space in own): cost for own, cost in spaces.shared.items()},
        )
        for spaces in crossed
        for block in sorted({site.block for site in curves})
    ]


def _losses(
    curves: Mapping[Site, Curve], counts: Mapping[Site, int], budget: float, crossed: Sequence[Crossed]
) -> Losses:
    """What shared widths lose beside what widths per block would, within the same budget."""
    crossings = _crossings(curves, crossed)
    chosen = total_error(curves, counts, crossings)
    # The search per block is no exact one: shared widths are among its choices, and it never does worse than they.
    return Losses(chosen, min(chosen, total_error(curves, _per_block(curves, budget, crossed), crossings)))


def _limit(prepared: Prepared) -> int:
    """The size to keep to: the recipe's, or what its ratio leaves in every block."""
    if prepared.recipe.size is not None:
        return limit_of(prepared)
    return size_at(prepared, "params", Decisions(prepared.recipe).widths(prepared.model))


def check_effects(prepared: Prepared, statistics: Statistics) -> None:
    """Refuse to weigh by effects on the model's output where there is no metric of them, or none of some space.

    Raises:
        UserError: there is none.
    """
    index = statistics.index
    if not index.fisher:
        raise UserError(
            f"{statistics.folder} holds no Fisher metric, by which allocation least-error weighs errors: calibrate "
            "with --folds 4, or say --set weigh_by=energy"
        )
    for space in prepared.recipe.spaces:
        # Effects that were measured of some spaces and not of others are on scales of their own.
        untried = prepared.model.site_name(0, space) not in {**index.predicted, **index.effects}
        if untried and space not in prepared.model.family.consumers and space in prepared.model.family.columns:
            kinds = ",".join([*prepared.recipe.collect, space])
            raise UserError(
                f"{statistics.folder} holds no effects of {space}, which allocation least-error weighs beside those of "
                f"other spaces: calibrate with --collect {kinds}, or say --set weigh_by=energy"
            )
