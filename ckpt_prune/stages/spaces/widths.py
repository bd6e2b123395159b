"""How many units of every site stay: by ratio or size, by FLAP's rankings, or by the least predicted error."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ckpt_prune.budget.choices import BudgetError
from ckpt_prune.budget.curves import Crossing, Curve, least_error, merge_curves, total_error
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.job.decisions import Decisions, Losses, SiteDecision, kept_units, multiple_of
from ckpt_prune.job.prepared import Prepared, RankedUnits
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moment_sources import CachedMoments, NoMoments
from ckpt_prune.measure.statistics.folder import BlockCurves, Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName, recipe_space
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.sizes import SizeKind
from ckpt_prune.recipe.space_kinds import CANDIDATES, CHOSEN, kind_of
from ckpt_prune.stages.spaces.effects.site_variants import trial_recipe
from ckpt_prune.stages.spaces.rankings import keep_ranked, standardised_scores
from ckpt_prune.stages.spaces.size_search import (
    ROUNDS,
    CrossedSpaces,
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
from ckpt_prune.stages.spaces.solvers.base import Solver
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver

SiteRanking = Mapping[Site, Sequence[RankedUnits]]
"""Site → its units by every score that may rank them."""


def ranking_of(prepared: Prepared) -> Ranking | None:
    """Return the scores of a recipe that ranks all blocks in one list, if they are known; None for other recipes.

    Scores do not depend on the ratio: `size_search.at_size` and `decide` share one ranking.
    """
    recipe, model = prepared.recipe, prepared.model
    if not recipe.ranks_blocks or prepared.plan is not None or not prepared.widths_known:
        return None
    if not recipe.needs_statistics:
        return standardised_scores(model, recipe, NoMoments(), prepared.device)
    assert prepared.statistics is not None
    return standardised_scores(model, recipe, CachedMoments(prepared.statistics, model), prepared.device)


def decide(prepared: Prepared, ranking: Ranking | None = None) -> Decisions:
    """Return the decisions of a recipe before the first block; there is no plan. `ranking` is that of `ranking_of`."""
    recipe, model = prepared.recipe, prepared.model
    if recipe.allocation == "least-error":
        return _decide_by_errors(prepared)
    if recipe.size is not None:
        raise ValueError("a size is turned into a ratio by at_size before anything else")
    if recipe.allocation == "uniform":
        by_ratio = Decisions(recipe)
        # Units in which others have gone are ranked once these are gone.
        inner = {space.part_of for name, space in model.family.columns.items() if name in recipe.spaces}
        sites = {
            site: replace(by_ratio.of(model, site), scores=units.scores)
            for site, (units,) in (prepared.ranked or {}).items()
            if site.space not in inner
        }
        return Decisions(recipe, sites)
    assert ranking is not None
    return kept_units(model, recipe, keep_ranked(model, recipe, ranking))


def dense_ranking(prepared: Prepared) -> dict[Site, list[RankedUnits]]:
    """Rank every site's units in the dense model, by each score that may rank them.

    With least-error, also compute the errors of all widths; in units of the model's own output if the recipe weighs by
    effect.
    """
    assert prepared.statistics is not None
    model, recipe, statistics = prepared.model, prepared.recipe, prepared.statistics
    solver_by_space = {space: solver_of(model, recipe, space, prepared.device) for space in recipe.spaces}
    source = CachedMoments(statistics, model)
    names_of = {s: _names_of_scores(statistics, s, solver.settings.score) for s, solver in solver_by_space.items()}

    def rank(block: int) -> dict[Site, list[RankedUnits]]:
        ranking: dict[Site, list[RankedUnits]] = {}
        solvers = {space: solver for space, solver in solver_by_space.items() if space in model.spaces(block)}
        tensors_of = {space: solver.read(block) for space, solver in solvers.items()}
        curves = known_curves(prepared, solvers, tensors_of, block)
        missing = [space for space in solvers if any((space, score) not in curves for score in names_of[space])]
        moments = source.moments(block, {}, missing)
        metric = statistics.read_fisher(block) if recipe.weighed_by_effect else {}
        for space, solver in solvers.items():
            tensors, folds, name = tensors_of[space], moments.get(space, ()), model.moments_name(block, space)
            for score in names_of[space]:
                curve = curves.get((space, score))
                scores, errors = (solver.scores(block, tensors, folds, score), None) if curve is None else curve
                if recipe.allocation == "least-error" and curve is None:
                    errors = solver.errors(block, tensors, folds, scores, metric.get(name))
                if errors is not None and recipe.weighed_by_effect and solver.has_effects:
                    effects = effects_on(statistics, model.site_name(block, space), score)
                    counts = [count for count, _ in effects]
                    predicted = solver.tried_errors(block, tensors, folds, counts, errors, metric[name])
                    errors = scale_curve(errors, effects, predicted)
                ranking.setdefault(Site(block, space), []).append(RankedUnits(score, scores.cpu(), errors))
        return ranking

    group = process_group()
    blocks = model.spaced_blocks[group.rank :: group.size]
    by_block = group.interleave([rank(block) for block in track(blocks, "ranking", total=len(blocks))])
    ranking = {site: units for sites in by_block for site, units in sites.items()}
    return _scale_spaces(ranking, statistics.index.spaces) if recipe.weighed_by_effect else ranking


def _names_of_scores(statistics: Statistics, space: SpaceName, score: str) -> tuple[str, ...]:
    if score != CHOSEN:
        return (score,)
    index, candidates = statistics.index, kind_of(space).candidates
    if index.effects:
        # Of the first alone. What gradients say of the others beside it would let the luckiest win.
        return candidates[:1]
    single = index.scores.get(space)
    return candidates if single is None else (single,)


def known_curves(
    prepared: Prepared, solvers: Mapping[SpaceName, Solver], tensors: Mapping[SpaceName, Tensors], block: int
) -> BlockCurves:
    """Return curves of a block's sites that were found while effects were predicted, if they are the recipe's own.

    They are of all folds but the last. That is enough where units are ranked again when their block is reached, and
    errors are scaled to effects that were predicted of the same folds.
    """
    if not (prepared.recipe.weighed_by_effect and prepared.sequential and prepared.statistics is not None):
        return {}
    curves = prepared.statistics.read_curves(block)

    def is_own(space: SpaceName) -> bool:
        solver = solvers.get(space)
        if not isinstance(solver, ColumnSolver):
            return False
        recipe = trial_recipe(prepared.model, block, space, tensors[space])
        trial = ColumnSolver(prepared.model, recipe, space, prepared.device)
        return solver.is_centred(block, tensors[space]) == trial.is_centred(block, tensors[space])

    return {key: pair for key, pair in curves.items() if is_own(key[0])}


def _scale_spaces(
    ranking: SiteRanking, spaces: Mapping[str, Sequence[tuple[int, float]]]
) -> dict[Site, list[RankedUnits]]:
    """Scale errors to measured effects of all sites of a space together: space → (units dropped, divergence)."""
    factors: dict[str, list[tuple[int, float]]] = {}
    for space, points in spaces.items():
        curves = [[_errors(units) for units in by_score] for site, by_score in ranking.items() if site.space == space]
        sums = [sum(min(float(curve[count]) for curve in of_site) for of_site in curves) for count, _ in points]
        factors[space] = [
            (count, measured / predicted)
            for predicted, (count, measured) in zip(sums, points, strict=True)
            if predicted > 0
        ]

    def scale(units: RankedUnits, space: str) -> RankedUnits:
        errors = _errors(units)
        return replace(
            units, errors=scale_curve(errors, [(k, float(errors[k]) * factor) for k, factor in factors[space]])
        )

    return {
        site: [scale(units, site.space) if factors.get(site.space) else units for units in by_score]
        for site, by_score in ranking.items()
    }


def effects_on(statistics: Statistics, name: str, score: str) -> list[tuple[int, float]]:
    """Return known effects of dropping units of a site by a score: (units dropped, divergence), ascending.

    These are predicted from gradients. If effects of the same counts were also measured, which is by score obs, the
    predictions are scaled by measured over predicted effects of obs.
    """
    by_score, measured = statistics.index.predicted.get(name, {}), statistics.index.effects.get(name, [])
    predicted, usual = by_score.get(score), by_score.get(CANDIDATES[0])
    if predicted is None or usual is None or score == CANDIDATES[0]:
        return measured or predicted or []
    if [count for count, _ in measured] != [count for count, _ in usual]:
        return predicted
    triples = zip(predicted, usual, measured, strict=True)
    return [(count, value * true / base if base > 0 else true) for (count, value), (_, base), (_, true) in triples]


def scale_curve(curve: Tensor, effects: list[tuple[int, float]], predicted: Sequence[float] | None = None) -> Tensor:
    """Return a curve of predicted divergences scaled to go through measured ones, keeping its shape between them.

    Args:
        curve: (units + 1,).
        effects: (units dropped, divergence of the model's output), ascending.
        predicted: the prediction for each of them; by default, the curve's.
    """
    predicted = [float(curve[k]) for k, _ in effects] if predicted is None else predicted
    factors = [(k, effect / value) for (k, effect), value in zip(effects, predicted, strict=True) if value > 0]
    if not factors:
        return curve
    # Measured over predicted changes slowly with k: linear between the measured points, constant outside.
    factor = torch.full_like(curve, factors[-1][1])
    factor[: factors[0][0]] = factors[0][1]
    weighed = curve * factor
    for (start, left), (stop, right) in pairwise(factors):
        between = curve[start : stop + 1] * torch.linspace(left, right, stop - start + 1, dtype=curve.dtype)
        # The factor may fall faster than the curve rises: no width between costs more than the wider of the two ends.
        weighed[start : stop + 1] = between.clamp_max(between[[0, -1]].max())
    return weighed.cummax(0).values


def _decide_by_errors(prepared: Prepared) -> Decisions:
    recipe, model = prepared.recipe, prepared.model
    ranking = dense_ranking(prepared) if prepared.ranked is None else prepared.ranked
    kind: SizeKind = "params" if recipe.size is None else recipe.size.kind
    curves = curves_of(prepared, ranking, kind)
    outside = dense_size(prepared, kind) - sum(curve.units * curve.unit_cost for curve in curves.values())
    # The size to keep to: the recipe's, or what its ratio leaves in every block.
    limit = size_at(prepared, "params", Decisions(recipe).widths(model)) if recipe.size is None else limit_of(prepared)
    budget = limit - outside
    crossed = crossed_spaces(prepared, kind)
    for _ in range(ROUNDS):
        try:
            counts = _least_error_counts(prepared, curves, budget, crossed)
        except BudgetError as error:
            if recipe.size is None:
                raise
            raise UserError(taken_up(prepared)) from error
        decisions = Decisions(recipe, {site: _decision(prepared, n, ranking[site]) for site, n in counts.items()})
        widths = decisions.widths(model)
        size = output_size(prepared, kind, widths)
        # A ratio means weights, without the biases that a container adds.
        if recipe.size is None or size <= limit:
            losses = _losses(model, curves, counts, budget, crossed) if recipe.widths == "uniform" else None
            return replace(decisions, losses=losses)
        budget = min(budget - 1, limit - (size - size_at(prepared, kind, widths)) - outside)
    raise UserError(taken_up(prepared))


def _decision(prepared: Prepared, keep: int, ranked_units: Sequence[RankedUnits]) -> SiteDecision:
    """Keep so many units, by the score that is best at that width."""
    best = min(ranked_units, key=lambda units: float(_errors(units)[-1 - keep]))
    # Sequential moments differ from the dense model's: units are ranked anew when their block is reached.
    again = prepared.sequential and keep < len(_errors(best)) - 1
    return SiteDecision(keep, scores=None if again else best.scores, score=best.score)


def curves_of(prepared: Prepared, ranking: SiteRanking, kind: SizeKind) -> dict[Site, Curve]:
    """Return every site's error at each width, by the best score there, and the cost of a unit."""
    costs = unit_costs(prepared, kind)
    curves: dict[Site, Curve] = {}
    for site, by_score in ranking.items():
        curve = torch.stack([_errors(units) for units in by_score]).amin(0)
        if not prepared.recipe.weighed_by_effect and curve[-1] > 0:
            curve = curve / curve[-1]  # as a share of what dropping everything costs
        curves[site] = Curve(curve, costs[site.space], multiple_of(prepared.model, prepared.recipe, site.space))
    return curves


def _errors(units: RankedUnits) -> Tensor:
    assert units.errors is not None
    return units.errors


def _least_error_counts(
    prepared: Prepared, curves: Mapping[Site, Curve], budget: float, crossed: Sequence[CrossedSpaces]
) -> dict[Site, int]:
    if prepared.recipe.widths == "per_layer":
        return _counts_per_block(prepared.model, curves, budget, crossed)
    model, by_space = prepared.model, dict[str, list[Curve]]()
    for site, curve in curves.items():
        by_space.setdefault(model.counted_as(site.space), []).append(curve)
    blocks = model.blocks
    crossings = [Crossing(c.inside, {sharing: cost * blocks for sharing, cost in c.shared.items()}) for c in crossed]
    kept = least_error({space: merge_curves(members) for space, members in by_space.items()}, budget, crossings)
    return {site: kept[model.counted_as(site.space)] for site in curves}


def _counts_per_block(
    model: Model, curves: Mapping[Site, Curve], budget: float, crossed: Sequence[CrossedSpaces]
) -> dict[Site, int]:
    """Return widths of every block for itself; all spaces whose width one config key states are as wide."""
    pooling = model.family.pooling  # its block states it by itself
    counted = {s: recipe_space(s) if s in pooling else model.counted_as(s) for s in {site.space for site in curves}}
    merged_site = {site: site._replace(space=counted[site.space]) for site in curves}
    grouped: dict[Site, list[Curve]] = {}
    for site, curve in curves.items():
        grouped.setdefault(merged_site[site], []).append(curve)
    sites = {site: members[0] if len(members) == 1 else merge_curves(members) for site, members in grouped.items()}
    kept = least_error(sites, budget, crossings_of(sites, crossed))
    return {site: kept[merged_site[site]] for site in curves}


def crossings_of(curves: Mapping[Site, Curve], crossed: Sequence[CrossedSpaces]) -> list[Crossing[Site]]:
    """Return the sites of every block that cross."""
    return [
        Crossing(
            [(Site(block, inner), Site(block, outer)) for inner, outer in spaces.inside],
            {tuple(Site(block, space) for space in sharing): cost for sharing, cost in spaces.shared.items()},
        )
        for spaces in crossed
        for block in sorted({site.block for site in curves})
    ]


def _losses(
    model: Model,
    curves: Mapping[Site, Curve],
    counts: Mapping[Site, int],
    budget: float,
    crossed: Sequence[CrossedSpaces],
) -> Losses:
    """Return the losses of shared widths and of widths per block, within the same budget."""
    crossings = crossings_of(curves, crossed)
    chosen = total_error(curves, counts, crossings)
    per_block = total_error(curves, _counts_per_block(model, curves, budget, crossed), crossings)
    # The search per block is not exact. Shared widths are among its choices: it never does worse than they.
    return Losses(chosen, min(chosen, per_block))


def check_effects(prepared: Prepared, statistics: Statistics) -> None:
    """Refuse to weigh by effects on the model's output if there is no metric of them, or none for some space."""
    index = statistics.index
    if not index.fisher:
        raise UserError(
            f"{statistics.folder} holds no Fisher metric, by which allocation least-error weighs errors: calibrate "
            "with --folds 4, or say --set weigh_by=energy"
        )
    for space in prepared.recipe.spaces:
        # Effects that were measured for some spaces and not for others are on scales of their own.
        untried = prepared.model.site_name(0, space) not in {**index.predicted, **index.effects}
        if untried and space not in prepared.model.family.consumers and space in prepared.model.family.columns:
            kinds = ",".join([*prepared.recipe.collect, space])
            raise UserError(
                f"{statistics.folder} holds no effects of {space}, which allocation least-error weighs beside those of "
                f"other spaces: calibrate with --collect {kinds}, or say --set weigh_by=energy"
            )
