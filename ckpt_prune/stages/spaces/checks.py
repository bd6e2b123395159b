"""Checks of the stage `spaces`: whether model, statistics and plan suit the recipe."""

from collections import Counter

from ckpt_prune.common.errors import UserError
from ckpt_prune.compensation.methods import AUTO
from ckpt_prune.job.decisions import keep_count
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.family import Family
from ckpt_prune.model.spaces import BESIDE, KIND_OF_SPACE, Site, SpaceName, first_expert_spaces
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.space_kinds import kind_of
from ckpt_prune.stages.spaces.size_search import check_reachable
from ckpt_prune.stages.spaces.solvers import solver_of
from ckpt_prune.stages.spaces.widths import check_effects

_MISSING: dict[Collect, str] = {
    "logits": "recipe {name} prunes q and k, and {folder} has no moments of them",
    "rotary": "recipe {name} prunes rotary pairs, and {folder} has no moments of them",
    "centred": "recipe {name} says centre_keys, and {folder} has no moments of centred keys",
}


def check_sites(prepared: Prepared) -> None:
    recipe, model = prepared.recipe, prepared.model
    _check_counts(prepared)
    _check_gradients(prepared)
    _check_experts(prepared)
    if prepared.statistics is not None:
        _check_statistics(recipe, prepared.statistics)
    check_reachable(prepared)
    if recipe.perplexity_grid and not model.family.causal:
        raise UserError("lambda_by: perplexity is for causal language models: choose by folds, or fix lambda")
    if prepared.plan is not None:
        _check_plan(prepared, prepared.plan)
    check_enough_samples(prepared)


def _check_counts(prepared: Prepared) -> None:
    """Refuse numbers of units to keep that are not of this model."""
    recipe, model = prepared.recipe, prepared.model
    for space, settings in recipe.spaces.items():
        if settings.keep is None or space not in model.family.spaces:
            continue
        counts = len(settings.keep)
        if counts != model.blocks:
            raise UserError(f"spaces.{space}.keep has {counts} numbers, and the model {model.blocks} blocks")
        multiple = model.multiple(space)
        for block in model.blocks_with(space):
            kept, units = settings.keep[block], model.units(space, block)
            if not 1 <= kept <= units or (kept % multiple and kept < units):
                steps = f" in multiples of {multiple}" if multiple > 1 else ""
                raise UserError(
                    f"spaces.{space}.keep: {kept} cannot stay of block {block}, which has {units}: 1 to {units}{steps}"
                )


def check_measured(prepared: Prepared) -> None:
    recipe = prepared.recipe
    check_folds(prepared)
    if (
        recipe.weighed_by_effect
        and prepared.statistics is not None
        and prepared.plan is None
        and prepared.ranked is None
    ):
        check_effects(prepared, prepared.statistics)
    if recipe.perplexity_grid and prepared.live is None and prepared.plan is None:
        raise UserError("lambda_by: perplexity needs text to measure it on: give --text")


def check_folds(prepared: Prepared) -> None:
    """Refuse fewer than two folds if something is chosen on held-out ones."""
    recipe = prepared.recipe
    folds = prepared.live.folds if prepared.live else prepared.statistics.index.folds if prepared.statistics else 0
    # Maps of whole blocks are fitted on live samples alone, also if a plan or statistics choose the blocks.
    maps_later = recipe.has("depth") and prepared.live is None
    if not recipe.needs_folds or folds >= 2 or prepared.plan is not None or maps_later:
        return
    chosen = {space.compensation.method for space in recipe.spaces.values() if space.compensation.by_folds}
    what = "method auto" if AUTO in chosen else "lambda_by: folds"
    remedy = "calibrate with --folds 4"
    if prepared.live is not None:
        remedy = "say --folds 4" if len(prepared.live.samples) > 1 else "give at least two samples"
    raise UserError(f"{what} needs at least two folds: {remedy}")


def _check_statistics(recipe: Recipe, statistics: Statistics) -> None:
    collected, remedy = statistics.index.collect, f"calibrate with --collect {','.join(recipe.collect)}"
    if "gram" not in collected:
        for space in recipe.spaces:
            reason = recipe.gram_for(space)
            if reason is not None:
                raise UserError(f"{reason} needs Grams, and {statistics.folder} has none: {remedy}")
    for kind, sentence in _MISSING.items():
        if kind in recipe.collect and kind not in collected:
            raise UserError(f"{sentence.format(name=recipe.name, folder=statistics.folder)}: {remedy}")


def _check_gradients(prepared: Prepared) -> None:
    """Refuse scores by gradients of the loss for models or statistics that have none."""
    if "taylor" not in prepared.recipe.collect:
        return
    what = f"recipe {prepared.recipe.name} ranks units by gradients of the loss"
    if not prepared.model.family.causal:
        raise UserError(
            f"{what} of next tokens, which is for causal language models, and this one is for "
            f"{prepared.model.family.purpose}: choose another score"
        )
    if prepared.model.family.experts is not None:
        raise UserError(f"{what}, which are not gathered for experts: choose another score")
    if prepared.statistics is not None and "taylor" not in prepared.statistics.index.collect:
        raise UserError(f"{what}, and {prepared.statistics.folder} has none: run `{prepared.recipe.calibration}`")


def _check_experts(prepared: Prepared) -> None:
    if prepared.recipe.refits_experts and not prepared.sequential and not prepared.lacks_moments:
        raise UserError(
            f"recipe {prepared.recipe.name} refits experts on the tokens that reach them once others are gone, which "
            "statistics of the dense model do not tell: give --text instead of --statistics, or say --set "
            "spaces.experts.compensation.method=none"
        )


def check_enough_samples(prepared: Prepared) -> None:
    """Refuse a strength of 0 with little data: nothing else determines a fit then."""
    index = prepared.statistics.index if prepared.statistics else None
    live = prepared.live.samples if prepared.live else None
    tokens = index.window if index else live.tokens if live else 0
    samples = index.samples if index else len(live) if live else 0
    if not samples or (prepared.recipe.size is not None and prepared.recipe.allocation == "uniform"):
        return  # a size is checked again at its ratio
    what = "images" if prepared.model.family.modality == "image" else f"windows of {tokens} tokens"
    for space, settings in prepared.recipe.spaces.items():
        method = settings.compensation.method
        bare = settings.compensation.lam == 0 and not settings.compensation.lambda_grid
        if not bare or not kind_of(space).methods[method].uses_strength:
            continue
        # A ranking over blocks may leave a block whole.
        uniform = prepared.recipe.allocation == "uniform"
        model, recipe = prepared.model, prepared.recipe
        sites = (Site(block, space) for block in model.blocks_with(space))
        kept = max((keep_count(model, recipe, site) for site in sites) if uniform else model.unit_counts(space))
        solver = solver_of(prepared.model, prepared.recipe, space, prepared.device)
        needed, unknowns = solver.samples_needed(kept, tokens)
        if samples < needed:
            raise UserError(
                f"{method} with lambda 0 needs at least {needed} {what} for the {unknowns}, and there are "
                f"{samples}: give more, or a lambda above 0"
            )


def _check_plan(prepared: Prepared, plan: Plan) -> None:
    """Refuse a plan that does not list every pruned space of every block once, with kept units that there are."""
    spaces, model = prepared.recipe.spaces, prepared.model
    expected = [Site(block, space) for space in spaces for block in model.blocks_with(space)]
    if Counter(each.site for each in plan.sites) != Counter(expected):
        raise UserError("the plan does not list every space of every block once: plan again instead of editing it")
    for site in plan.sites:
        space = site.site.space
        units, copies = prepared.model.site_units(space, site.block), prepared.model.copies(space)
        if prepared.model.family.spaces[space].kind == "experts":
            copies = prepared.model.expert_groups
        if not site.kept or sorted(set(site.kept) & set(range(units))) != site.kept:
            raise UserError(
                f"the plan's kept units of {space} in block {site.block} are not ascending indices "
                f"below {units}: plan again instead of editing it"
            )
        if len(site.scores) != units:
            raise UserError(
                f"the plan has {len(site.scores)} scores for the {units} units of {space} in block {site.block}: "
                "plan again instead of editing it"
            )
        width = units // copies
        if len({sum(row // width == copy for row in site.kept) for copy in range(copies)}) != 1:
            raise UserError(
                f"the plan keeps different numbers of units of {space} side by side in block {site.block}: "
                "plan again instead of editing it"
            )


def check_spaces(family: Family, recipe: Recipe) -> None:
    """Refuse a recipe that prunes what a family lacks.

    That is a space that it does not have, such as q and k if it rotates them by position, or of which no unit can go.
    """
    whole_recipe, recipe = recipe, recipe.at(family)
    if whole_recipe.spaces and not recipe.spaces:
        kept = {name: space.whole for name, space in family.spaces.items() if space.whole is not None}
        reasons = {name: (kept | family.absent).get(name) for name in whole_recipe.spaces}
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
        raise UserError(
            f"recipe {recipe.name} prunes {' and '.join(whole_recipe.spaces)} where there is any, and this "
            f"{family.model_type} has none{why and f' ({why})'}: nothing is left to do"
        )
    for space in recipe.spaces:
        if space not in family.spaces:
            raise UserError(f"recipe {recipe.name} prunes {_say_lacking(space, family)}")
    conflict = find_shared_width(family, recipe)
    if conflict is not None:
        raise UserError(f"{conflict}: choose a recipe with allocation: uniform, such as ridge")
    gated = [name for name in recipe.spaces if name in family.columns and family.columns[name].gate is not None]
    if gated and recipe.target == "drift":
        raise UserError(
            f"recipe {recipe.name} makes up for drift (target drift) in {gated[0]}, whose output {family.model_type} "
            f"multiplies by another factor for every token: say target: sequential, or leave out spaces.{gated[0]}"
        )
    for name in recipe.spaces:
        obstacle = family.spaces[name].whole
        if obstacle is not None:
            raise UserError(
                f"recipe {recipe.name} prunes {name}, of which none can go in {family.model_type}: {obstacle}. "
                f"Leave out spaces.{name}"
            )


def find_shared_width(family: Family, recipe: Recipe) -> str | None:
    """Say that a recipe finds widths where one config key states those of all stacks of blocks; None if not."""
    spaces = (family.spaces[name] for name in recipe.at(family).spaces if name in family.spaces)
    shared = next((space for space in spaces if family.shares_width(space)), None)
    if shared is None or (recipe.allocation, recipe.widths) == ("uniform", "uniform"):
        return None
    return (
        f"recipe {recipe.name} finds a width for each stack of blocks, and {family.width_key(shared)} of "
        f"{family.model_type} states one for all"
    )


def _say_lacking(space: SpaceName, family: Family) -> str:
    """Name a space, say why a family does not have it, and what can be pruned instead."""
    model_type, ends, others = family.model_type, KIND_OF_SPACE[space], ", ".join(first_expert_spaces(family.spaces))
    if space in family.absent:
        return f"{space}, which {model_type} has not ({family.absent[space]}): it has {others}"
    if ends == "logits" and family.rope:
        return (
            f"q and k, and {model_type} rotates them by position in fixed pairs (RoPE): the matrix that makes up for "
            "dropped dimensions cannot be absorbed there. "
            + ("Whole pairs can go: spaces.rotary. " if family.rotary_spaces else "")
            + f"Heads and mlp can be pruned: recipes corp-heads and corp-mlp, or leave out spaces.{space}"
        )
    if ends == "rotary":
        problem = family.no_rotary or "its description does not say how they lie"
        reason = f"in {model_type} none can go: {problem}" if family.rope else f"{model_type} has none"
        remedy = "; spaces.qk prunes dimensions of its queries and keys" if family.logits else ""
        return f"{space}, pairs of rotary positions, and {reason}{remedy}"
    if space in BESIDE and ends == "columns":
        return (
            f"{space}, query heads inside KV groups, and none can go by itself in this {model_type}: spaces.heads "
            "drops them with their keys and values"
        )
    if ends == "values":
        fused = family.attention.query == family.attention.value
        why = "one projection makes queries, keys and values" if fused else "its class knows heads of one width"
        return f"{space}, and values of {model_type} stay as wide as they are: {why}. Leave out spaces.{space}"
    return f"{space}, which {model_type} has not: it has {others}"
