"""What has to fit together before a request writes its first byte."""

from collections import Counter

from ckpt_prune.architectures.family import DATA_OPTIONS, Family
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sites import Site
from ckpt_prune.architectures.spaces import BESIDE, ENDS, first_of_experts
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.compensation.methods import AUTO
from ckpt_prune.containers.checking import check_source, check_stock
from ckpt_prune.errors import UserError
from ckpt_prune.parallel.group import here
from ckpt_prune.planning.kinds import kind_of
from ckpt_prune.planning.plan import Plan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.report.reading import report_of
from ckpt_prune.rotations.rotated import CONFIG_KEY, check_rotatable
from ckpt_prune.rotations.sliced import SLICING_KEY
from ckpt_prune.transform.budgets import check_effects
from ckpt_prune.transform.decisions import keep_count
from ckpt_prune.transform.masking import check_widths
from ckpt_prune.transform.narrowing import check_hidden
from ckpt_prune.transform.output import unlearned
from ckpt_prune.transform.request import Request
from ckpt_prune.transform.shortening import check_depth
from ckpt_prune.transform.sizing import check_reachable
from ckpt_prune.transform.solvers import solver_of


def check_request(request: Request) -> None:
    """Check a request's names, shapes, statistics, plan and recipe against each other.

    Raises:
        UserError: with the first thing that does not fit.
    """
    check_fit(request)
    check_data(request)


def check_fit(request: Request) -> None:
    """Check whatever of a request does not ask for something to measure on.

    Raises:
        UserError: with the first thing that does not fit.
    """
    # Told of when all is done: damaged, it would be found after the output has got its name.
    report_of(request.model.checkpoint.path)
    check_source(request.model)
    check_again(request.model, request.recipe)
    check_spaces(request.model.family, request.recipe)
    request.recipe.blocks(request.model.blocks)
    if request.recipe.depth is not None:
        check_depth(request)
    if request.recipe.hidden is not None:
        check_hidden(request)
    _mask(request)
    _low_rank(request)
    _taylor(request)
    _experts(request)
    if request.statistics is not None:
        request.statistics.check_model(request.model)
        if request.recipe.mask is not None or request.recipe.low_rank is not None:
            _linears(request, request.statistics)
        elif "gram" not in request.statistics.index.collect:
            lacking = [
                request.recipe.gram_for(space) for space in request.recipe.spaces if request.recipe.needs_gram(space)
            ]
            if lacking:
                raise UserError(
                    f"{lacking[0]} needs Grams, and {request.statistics.folder} has none: "
                    f"calibrate with --collect {','.join(request.recipe.collect)}"
                )
        if "logits" in request.recipe.collect and "logits" not in request.statistics.index.collect:
            raise UserError(
                f"recipe {request.recipe.name} prunes q and k, and {request.statistics.folder} has no moments of them: "
                f"calibrate with --collect {','.join(request.recipe.collect)}"
            )
        if "rotary" in request.recipe.collect and "rotary" not in request.statistics.index.collect:
            raise UserError(
                f"recipe {request.recipe.name} prunes rotary pairs, and {request.statistics.folder} has no moments of "
                f"them: calibrate with --collect {','.join(request.recipe.collect)}"
            )
        if "centred" in request.recipe.collect and "centred" not in request.statistics.index.collect:
            raise UserError(
                f"recipe {request.recipe.name} says centre_keys, and {request.statistics.folder} has no moments of "
                f"centred keys: calibrate with --collect {','.join(request.recipe.collect)}"
            )
    check_reachable(request)
    if request.recipe.perplexity_grid and not request.model.family.causal:
        raise UserError("lambda_by: perplexity is for causal language models: choose by folds, or fix lambda")
    if request.plan is not None:
        check_planned(request.model, request.plan)
        _plan(request, request.plan)
    check_enough_samples(request)
    _recovery(request)


def check_again(model: Model, recipe: Recipe) -> None:
    """Refuse what does not go with an output that carries code of its own: all but masks.

    Raises:
        UserError: with the reason.
    """
    if recipe.mask is None:
        check_stock(model, "units are counted alike in every block, and its blocks may differ; masks alone go into it")
    elif recipe.rotation is not None:
        check_stock(model, "rotations are absorbed by blocks of the stock shape; masks without them go into it")
    else:
        check_one_basis(model)


def check_one_basis(model: Model) -> None:
    """Refuse an output whose residual stream changes its basis from block to block.

    Raises:
        UserError: it is one.
    """
    if any(getattr(model.config, key, None) is not None for key in (CONFIG_KEY, SLICING_KEY)):
        check_stock(model, "its residual stream turns between blocks, which only the run that made it knew")


def check_data(request: Request) -> None:
    """Refuse a request with too little to measure on for its recipe.

    Raises:
        UserError: with what it needs.
    """
    if request.lacks_moments:
        data = DATA_OPTIONS[request.model.family.modality]
        if request.recipe.recovery is not None:
            raise UserError(f"recipe {request.recipe.name} needs samples to be measured and recovered on: give {data}")
        raise UserError(f"recipe {request.recipe.name} needs statistics: give --statistics, or {data} to measure them")
    mask = request.recipe.mask
    if mask is not None and mask.allocation == "divergence" and request.live is None:
        data = DATA_OPTIONS[request.model.family.modality]
        raise UserError(
            f"recipe {request.recipe.name} shares a mask's zeros out by what they do to the model itself: give {data} "
            "in place of --statistics"
        )
    folds = request.live.folds if request.live else request.statistics.index.folds if request.statistics else 0
    # Maps of whole blocks are fitted on live samples alone, also where a plan or statistics choose the blocks.
    maps_later = request.recipe.depth is not None and request.live is None
    if request.recipe.needs_folds and folds < 2 and request.plan is None and not maps_later:
        chosen = {own.compensation.method for own in request.recipe.spaces.values() if own.compensation.by_folds}
        what = "method auto" if AUTO in chosen else "lambda_by: folds"
        remedy = "calibrate with --folds 4"
        if request.live is not None:
            remedy = "say --folds 4" if len(request.live.samples) > 1 else "give at least two samples"
        raise UserError(f"{what} needs at least two folds: {remedy}")
    if (
        request.recipe.weighed_by_effect
        and request.statistics is not None
        and request.plan is None
        and request.ranked is None
    ):
        check_effects(request, request.statistics)
    if request.recipe.perplexity_grid and request.live is None and request.plan is None:
        raise UserError("lambda_by: perplexity needs text to measure it on: give --text")


def _mask(request: Request) -> None:
    """What a mask and rotations ask of the model."""
    recipe = request.recipe
    if recipe.mask is None:
        return
    check_widths(request.model, recipe.mask)
    _mask_shares(request)
    if recipe.rotation is not None:
        check_rotatable(request.model, recipe.rotation.kind)
        rotated = unlearned(request)
        assert rotated is not None
        rotated.check_final_norm()
        if recipe.rotation.kind == "per-layer" and recipe.container not in ("auto", "any", "remote"):
            raise UserError(
                f"rotation per-layer turns the residual stream between blocks, which container {recipe.container} "
                "cannot: leave container out for remote code, or choose rotation kind shared"
            )


def _low_rank(request: Request) -> None:
    """What factors ask of the model."""
    family = request.model.family
    if request.recipe.low_rank is not None and family.experts is not None:
        raise UserError(
            f"recipe {request.recipe.name} factors linear modules, and experts of a {family.model_type} have none of "
            "their own in transformers: prune their columns (spaces.mlp)"
        )
    if request.recipe.low_rank is not None and request.recipe.low_rank.update and request.live is None:
        data = DATA_OPTIONS[family.modality]
        raise UserError(
            f"recipe {request.recipe.name} fits factors to what reaches them behind factored blocks: give {data} in "
            "place of --statistics"
        )


def _mask_shares(request: Request) -> None:
    """What sharing the zeros of a mask out over blocks asks of the model."""
    mask = request.recipe.mask
    if mask is None or mask.allocation != "divergence":
        return
    if request.model.family.experts is not None:
        raise UserError(
            f"recipe {request.recipe.name} tries masks on whole blocks, whose experts may see none of a few samples: "
            "say mask.allocation=owl or alpha"
        )


def _recovery(request: Request) -> None:
    """Which blocks a recipe with recovery trains, and on what where that is known: a plan is made without."""
    if request.recipe.recovery is not None:
        request.recipe.recovery.blocks(request.model.blocks)
    if request.training is not None:
        check_trainable(len(request.training.samples))


def _taylor(request: Request) -> None:
    """What scores by gradients of the loss ask of the model and of statistics."""
    if "taylor" not in request.recipe.collect:
        return
    what = f"recipe {request.recipe.name} ranks units by gradients of the loss"
    if not request.model.family.causal:
        raise UserError(
            f"{what} of next tokens, which is for causal language models, and this one is for "
            f"{request.model.family.purpose}: choose another score"
        )
    if request.model.family.experts is not None:
        raise UserError(f"{what}, which are not gathered for experts: choose another score")
    if request.statistics is not None and "taylor" not in request.statistics.index.collect:
        raise UserError(f"{what}, and {request.statistics.folder} has none: run `{request.recipe.calibration}`")


def _experts(request: Request) -> None:
    """What refitting the experts that stay asks for."""
    if request.recipe.refits_experts and not request.sequential and not request.lacks_moments:
        raise UserError(
            f"recipe {request.recipe.name} refits experts on the tokens that reach them once others are gone, which "
            "statistics of the dense model do not tell: give --text instead of --statistics, or say --set "
            "spaces.experts.compensation.method=none"
        )


def check_together(request: Request, job: str) -> None:
    """Refuse what several processes cannot do together, and processes that are not at the same job.

    Args:
        request: of this process.
        job: digest of all that the output depends on.

    Raises:
        UserError: the recipe is for one process, or model, data or job differ.
    """
    group, recipe = here(), request.recipe
    mask = None if recipe.mask is None or recipe.mask.allocation == "uniform" else recipe.mask
    alone = {
        "rotates": recipe.rotation,
        "drops whole blocks": recipe.depth,
        "slices the residual stream": recipe.hidden,
        "shares a mask's zeros out": mask,
    }
    for what, asked in alone.items():
        if group.size > 1 and asked is not None:
            raise UserError(f"recipe {recipe.name} {what}, which one process does alone: start it without torchrun")
    seen = [each.samples for each in (request.live, request.training) if each is not None]
    for samples in seen:
        group.check_enough(len(samples))
    data = "text" if request.model.family.modality == "text" else "set of images"
    group.agree(
        {
            "model": request.model.checkpoint.fingerprint,
            data: [samples.fingerprint for samples in seen],
            "recipe": recipe.digest,
            "job": job,
        }
    )


def check_trained(request: Request) -> None:
    """Refuse to prune without samples by a recipe with recovery, or one that fits maps on the model itself.

    Raises:
        UserError: there are none.
    """
    depth = request.recipe.depth
    settled = request.statistics is not None or request.plan is not None
    if depth is not None and depth.runs_model and settled and request.live is None:
        data = DATA_OPTIONS[request.model.family.modality]
        what = "compares numbers of blocks by running" if depth.auto else "fits maps on"
        raise UserError(f"recipe {request.recipe.name} {what} the model itself: give {data} as well")
    if request.recipe.recovery is not None and request.training is None:
        data = DATA_OPTIONS[request.model.family.modality]
        raise UserError(f"recipe {request.recipe.name} recovers on samples, beside any statistics: give {data}")


def check_trainable(samples: int) -> None:
    """Refuse too few samples to train on and hold some out.

    Raises:
        UserError: fewer than two.
    """
    if samples < 2:
        raise UserError(f"recovery needs samples to train on and others to hold out: give at least 2, not {samples}")


def _linears(request: Request, statistics: Statistics) -> None:
    """Statistics that a mask or rotations can use."""
    lacking = [kind for kind in request.recipe.collect if kind not in statistics.index.collect]
    if lacking and request.recipe.needs_moments:
        raise UserError(
            f"recipe {request.recipe.name} needs {' and '.join(request.recipe.collect)}, and {statistics.folder} has "
            f"no {' and no '.join(lacking)}: calibrate with --collect {','.join(request.recipe.collect)}"
        )


def check_enough_samples(request: Request) -> None:
    """Refuse a strength of 0 with little data: nothing else determines a fit then.

    Raises:
        UserError: with the samples that are needed.
    """
    index = request.statistics.index if request.statistics else None
    live = request.live.samples if request.live else None
    tokens = index.window if index else live.tokens if live else 0
    samples = index.samples if index else len(live) if live else 0
    if not samples or (request.recipe.size is not None and request.recipe.allocation == "uniform"):
        return  # a size is checked again at its ratio
    what = "images" if request.model.family.modality == "image" else f"windows of {tokens} tokens"
    for space, own in request.recipe.spaces.items():
        method = own.compensation.method
        bare = own.compensation.lam == 0 and not own.compensation.lambda_grid
        if not bare or not kind_of(space).methods[method].uses_strength:
            continue
        # A ranking over blocks may leave a block whole.
        uniform = request.recipe.allocation == "uniform"
        kept = keep_count(request.model, request.recipe, space) if uniform else request.model.units(space)
        needed, unknowns = solver_of(request.model, request.recipe, space, request.device).samples_needed(kept, tokens)
        if samples < needed:
            raise UserError(
                f"{method} with lambda 0 needs at least {needed} {what} for the {unknowns}, and there are "
                f"{samples}: give more, or a lambda above 0"
            )


def _plan(request: Request, plan: Plan) -> None:
    """Every pruned space of every block once, its kept units ascending and among those there are."""
    expected = [Site(block, space) for block in request.model.spaced for space in request.recipe.spaces]
    if Counter(each.site for each in plan.sites) != Counter(expected):
        raise UserError("the plan does not list every space of every block once: plan again instead of editing it")
    for site in plan.sites:
        space = site.site.space
        units, copies = request.model.site_units(space), request.model.copies(space)
        if request.model.family.spaces[space].ends == "experts":
            copies = request.model.expert_groups
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


def check_planned(model: Model, plan: Plan) -> None:
    """Refuse a plan of another model.

    Raises:
        UserError: it is one.
    """
    if plan.model != model.checkpoint.fingerprint:
        raise UserError(f"the plan was made for another model ({plan.model_path}), not {model.checkpoint.path}")


def check_plannable(recipe: Recipe) -> None:
    """Refuse to plan what a plan cannot say.

    Raises:
        UserError: a mask, factors, a sliced stream, blocks that the loss chooses, or blocks or a stream beside spaces.
    """
    if recipe.low_rank is not None:
        raise UserError(
            f"recipe {recipe.name} factors linears, which a plan does not list: `ckpt-prune prune` applies it, with "
            "--dry-run to see sizes"
        )
    if recipe.joint:
        parts = [
            ("drops blocks", "`ckpt-prune prune --recipe depth --set depth.drop=N`", recipe.depth),
            (
                "narrows the residual stream",
                "`ckpt-prune prune --recipe slicegpt-shared --set hidden.drop=N`",
                recipe.hidden,
            ),
        ]
        does, steps = zip(*((what, step) for what, step, own in parts if own is not None), strict=True)
        what = "what is left" if recipe.hidden is not None else "those that stay"
        at_once = "all" if len(steps) > 1 else "both"
        raise UserError(
            f"recipe {recipe.name} {', '.join(does)} and then prunes spaces of {what}, which no statistics are of yet: "
            f"`ckpt-prune prune --text` (or --images) does {at_once} at once; for a plan, {', then '.join(steps)} "
            "first, then calibrate and plan what it has written, by a recipe of spaces alone such as best-uniform"
        )
    if recipe.depth is not None and recipe.hidden is not None:
        raise UserError(
            f"recipe {recipe.name} narrows the residual stream of the blocks that stay, of which a plan says nothing: "
            "`ckpt-prune prune --dry-run` tells its width and size"
        )
    if recipe.depth is not None and recipe.depth.choice == "loss":
        raise UserError(
            f"recipe {recipe.name} chooses blocks by the loss without them, on text: use `ckpt-prune prune --text`"
        )
    if recipe.hidden is not None:
        raise UserError(
            f"recipe {recipe.name} slices the residual stream, of which a plan says nothing: `ckpt-prune prune "
            "--dry-run` tells its width and size"
        )
    if recipe.mask is not None:
        raise UserError(
            f"recipe {recipe.name} zeroes single weights, which a plan does not list: `ckpt-prune prune` applies it"
        )


def check_spaces(family: Family, recipe: Recipe) -> None:
    """Refuse a recipe that prunes what a family has not.

    Raises:
        UserError: a space that the family has not, such as q and k where it rotates them by position, or of which no
            unit can go.
    """
    asked, recipe = recipe, recipe.at(family)
    if asked.spaces and not recipe.spaces:
        raise UserError(
            f"recipe {recipe.name} prunes {' and '.join(asked.spaces)} where there is any, and this "
            f"{family.model_type} has none: nothing is left to do"
        )
    missing = [space for space in recipe.spaces if space not in family.spaces]
    if missing and missing[0] in family.absent:
        remedy = ". --set spaces.heads.optional=true leaves them as they are" if missing[0] == "heads" else ""
        raise UserError(
            f"recipe {recipe.name} prunes {missing[0]}, which {family.model_type} has not "
            f"({family.absent[missing[0]]}){remedy}: it has {', '.join(first_of_experts(family.spaces))}"
        )
    if missing and ENDS[missing[0]] == "logits" and family.rope:
        raise UserError(
            f"recipe {recipe.name} prunes q and k, and {family.model_type} rotates them by position in fixed pairs "
            "(RoPE): the matrix that makes up for dropped dimensions cannot be absorbed there. "
            + ("Whole pairs can go: spaces.rotary. " if family.turned else "")
            + f"Heads and mlp can be pruned: recipes corp-heads and corp-mlp, or leave out spaces.{missing[0]}"
        )
    if missing and ENDS[missing[0]] == "rotary":
        lies = family.unpaired or "its description does not say how they lie"
        found = f"in {family.model_type} none can go: {lies}" if family.rope else f"{family.model_type} has none"
        remedy = "; spaces.qk prunes dimensions of its queries and keys" if family.logits else ""
        raise UserError(f"recipe {recipe.name} prunes {missing[0]}, pairs of rotary positions, and {found}{remedy}")
    if missing and missing[0] in BESIDE and ENDS[missing[0]] == "columns":
        raise UserError(
            f"recipe {recipe.name} prunes {missing[0]}, query heads inside KV groups, and none can go by itself in "
            f"this {family.model_type}: spaces.heads drops them with their keys and values"
        )
    if missing and ENDS[missing[0]] == "values":
        fused = family.attention.query == family.attention.value
        why = "one projection makes queries, keys and values" if fused else "its class knows heads of one width"
        raise UserError(
            f"recipe {recipe.name} prunes {missing[0]}, and values of {family.model_type} stay as wide as they are: "
            f"{why}. Leave out spaces.{missing[0]}"
        )
    if missing:
        raise UserError(
            f"recipe {recipe.name} prunes {missing[0]}, which {family.model_type} has not: it has "
            f"{', '.join(first_of_experts(family.spaces))}"
        )
    gated = [name for name in recipe.spaces if name in family.columns and family.columns[name].gate is not None]
    if gated and recipe.target == "drift":
        raise UserError(
            f"recipe {recipe.name} makes up for drift (target drift) in {gated[0]}, whose output {family.model_type} "
            f"multiplies by another factor for every token: say target: sequential, or leave out spaces.{gated[0]}"
        )
    for name in recipe.spaces:
        if family.spaces[name].whole is not None:
            left = {each: own for each, own in family.spaces.items() if own.whole is None and own.ends != "experts"}
            plain = (each for each, own in left.items() if each in family.columns and own.fixed is None)
            others = list(first_of_experts(plain)) or list(first_of_experts(left))
            alone = " and ".join(f"recipe corp-{other}" for other in others)
            reason = family.spaces[name].whole
            raise UserError(
                f"recipe {recipe.name} prunes {name}, of which none can go in {family.model_type}: {reason}. "
                f"Leave out spaces.{name}: {' and '.join(others)} can be pruned, by itself in {alone}"
            )
