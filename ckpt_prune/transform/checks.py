"""What has to fit together before a job writes its first byte."""

from typing import TYPE_CHECKING

from ckpt_prune.architectures.family import Family
from ckpt_prune.calibration.measure import (
    checkpoint_dtype,
    consumer_widths,
    linear_widths,
    query_heads,
    reader_fingerprint,
)
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.compensation.methods import AUTO
from ckpt_prune.containers.checking import check_source
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import Plan
from ckpt_prune.planning.recipe import Recipe, methods_of
from ckpt_prune.rotations.rotated import check_rotatable
from ckpt_prune.transform.budgets import check_effects, check_reachable
from ckpt_prune.transform.masking import check_widths

if TYPE_CHECKING:
    from ckpt_prune.transform.job import Job


def check_job(job: "Job") -> None:
    """Check a job's names, shapes, statistics, plan and recipe against each other.

    Raises:
        UserError: with the first thing that does not fit.
    """
    check_source(job.checkpoint, job.family)
    check_spaces(job.family, job.recipe)
    _mask(job)
    if job.recipe.needs_moments and job.statistics is None and job.live is None:
        data = "--images" if job.family.modality == "image" else "--text"
        raise UserError(f"recipe {job.recipe.name} needs statistics: give --statistics, or {data} to measure them")
    if job.statistics is not None:
        job.statistics.check_model(
            model=job.checkpoint.fingerprint,
            tokenizer=reader_fingerprint(job.checkpoint, job.family),
            dtype=checkpoint_dtype(job.checkpoint),
            blocks=job.blocks,
            consumers=consumer_widths(job.family, job.config),
            queries=query_heads(job.family, job.config),
            linears=linear_widths(job.family, job.config),
        )
        if job.recipe.mask is not None:
            _linears(job, job.statistics)
        elif "gram" not in job.statistics.index.collect:
            lacking = [job.recipe.gram_for(space) for space in job.recipe.spaces if job.recipe.needs_gram(space)]
            if lacking:
                raise UserError(
                    f"{lacking[0]} needs Grams, and {job.statistics.folder} has none: "
                    f"calibrate with --collect {','.join(job.recipe.collect)}"
                )
        if "logits" in job.recipe.collect and "logits" not in job.statistics.index.collect:
            raise UserError(
                f"recipe {job.recipe.name} prunes q and k, and {job.statistics.folder} has no moments of them: "
                f"calibrate with --collect {','.join(job.recipe.collect)}"
            )
    folds = job.live.folds if job.live else job.statistics.index.folds if job.statistics else 0
    if job.recipe.needs_folds and folds < 2 and job.plan is None:
        chosen = {own.compensation.method for own in job.recipe.spaces.values() if own.compensation.by_folds}
        what = "method auto" if AUTO in chosen else "lambda_by: folds"
        remedy = "calibrate with --folds 4" + (" --effects" if job.recipe.weighed_by_effect else "")
        if job.live is not None:
            remedy = "say --folds 4" if len(job.live.samples) > 1 else "give at least two samples"
        raise UserError(f"{what} needs at least two folds: {remedy}")
    check_reachable(job)
    if job.recipe.weighed_by_effect and job.statistics is not None and job.plan is None and job.scores is None:
        check_effects(job.statistics)
    if job.recipe.perplexity_grid and not job.family.causal:
        raise UserError("lambda_by: perplexity is for causal language models: choose by folds, or fix lambda")
    if job.recipe.perplexity_grid and job.live is None and job.plan is None:
        raise UserError("lambda_by: perplexity needs text to measure it on: give --text")
    if job.plan is not None:
        check_planned(job.checkpoint, job.plan)
        _plan(job, job.plan)
    _samples(job)
    _recovery(job)


def _mask(job: "Job") -> None:
    """What a mask and rotations ask of the model."""
    recipe = job.recipe
    if recipe.mask is None:
        return
    shapes = {name: info.shape for name, info in job.checkpoint.tensors.items()}
    check_widths(job.family, recipe.mask, shapes)
    if recipe.rotation is not None:
        check_rotatable(job.family, job.config, recipe.rotation.kind)
        assert job.rotated is not None
        job.rotated.check_final_norm()
        if recipe.rotation.kind == "per-layer" and recipe.container not in ("auto", "any", "remote"):
            raise UserError(
                f"rotation per-layer turns the residual stream between blocks, which container {recipe.container} "
                "cannot: leave container out for remote code, or choose rotation kind shared"
            )


def _recovery(job: "Job") -> None:
    """Which blocks a recipe with recovery trains, and on what where that is known: a plan is made without."""
    if job.recipe.recovery is not None:
        job.recipe.recovery.blocks(job.blocks)
    if job.training is not None:
        check_trainable(len(job.training.samples))


def check_trained(job: "Job") -> None:
    """Refuse to prune by a recipe with recovery without samples to train on.

    Raises:
        UserError: there are none.
    """
    if job.recipe.recovery is not None and job.training is None:
        data = "--images" if job.family.modality == "image" else "--text"
        raise UserError(f"recipe {job.recipe.name} recovers every block on samples, beside any statistics: give {data}")


def check_trainable(samples: int) -> None:
    """Refuse too few samples to train on and hold some out.

    Raises:
        UserError: fewer than two.
    """
    if samples < 2:
        raise UserError(f"recovery needs samples to train on and others to hold out: give at least 2, not {samples}")


def _linears(job: "Job", statistics: Statistics) -> None:
    """Statistics that a mask or rotations can use."""
    lacking = [kind for kind in job.recipe.collect if kind not in statistics.index.collect]
    if lacking and job.recipe.needs_moments:
        raise UserError(
            f"recipe {job.recipe.name} needs {' and '.join(job.recipe.collect)}, and {statistics.folder} has no "
            f"{' and no '.join(lacking)}: calibrate with --collect {','.join(job.recipe.collect)}"
        )


def _samples(job: "Job") -> None:
    """With λ = 0 nothing but data determines a fit: there must be enough of it."""
    index = job.statistics.index if job.statistics else None
    live = job.live.samples if job.live else None
    tokens = index.window if index else live.tokens if live else 0
    samples = index.samples if index else len(live) if live else 0
    if not samples or (job.recipe.size is not None and job.recipe.allocation == "uniform"):
        return  # a size is checked again at its ratio
    what = "images" if job.family.modality == "image" else f"windows of {tokens} tokens"
    for space, own in job.recipe.spaces.items():
        method = own.compensation.method
        bare = own.compensation.lam == 0 and not own.compensation.lambda_grid
        if not bare or not methods_of(space)[method].uses_lambda:
            continue
        # A ranking over blocks may leave a block whole.
        uniform = job.recipe.allocation == "uniform"
        kept = job.unsettled.keep_count(space) if uniform else job.family.units(job.config, space)
        if space == "qk":
            needed, unknowns = -(-(kept**2) // min(tokens, kept) ** 2), f"{kept} x {kept} unknowns of a head"
        else:
            inputs = kept * job.family.unit_columns(job.config, space)
            needed, unknowns = -(-inputs // tokens), f"{inputs} inputs of a projection"
        if samples < needed:
            raise UserError(
                f"{method} with lambda 0 needs at least {needed} {what} for the {unknowns}, and there are "
                f"{samples}: give more, or a lambda above 0"
            )


def _plan(job: "Job", plan: Plan) -> None:
    """Every pruned space of every block once, its kept units ascending and among those there are."""
    expected = [(block, space) for block in range(job.blocks) for space in job.recipe.spaces]
    if sorted((s.block, s.space) for s in plan.sites) != sorted(expected):
        raise UserError("the plan does not list every space of every block once: plan again instead of editing it")
    for site in plan.sites:
        units = job.family.site_units(job.config, site.space)
        heads = units // job.family.units(job.config, site.space)
        if not site.kept or sorted(set(site.kept) & set(range(units))) != site.kept:
            raise UserError(
                f"the plan's kept units of {site.space} in block {site.block} are not ascending indices "
                f"below {units}: plan again instead of editing it"
            )
        width = units // heads
        if site.space == "qk" and len({sum(r // width == h for r in site.kept) for h in range(heads)}) != 1:
            raise UserError(
                f"the plan keeps different numbers of q and k dimensions in the heads of block {site.block}: "
                "plan again instead of editing it"
            )


def check_planned(checkpoint: Checkpoint, plan: Plan) -> None:
    """Refuse a plan of another model.

    Raises:
        UserError: it is one.
    """
    if plan.model != checkpoint.fingerprint:
        raise UserError(f"the plan was made for another model ({plan.model_path}), not {checkpoint.path}")


def check_plannable(recipe: Recipe) -> None:
    """Refuse to plan what a plan cannot say.

    Raises:
        UserError: a mask.
    """
    if recipe.mask is not None:
        raise UserError(
            f"recipe {recipe.name} zeroes single weights, which a plan does not list: `ckpt-prune prune` applies it"
        )


def check_spaces(family: Family, recipe: Recipe) -> None:
    """Refuse a recipe that prunes what a family has not.

    Raises:
        UserError: q and k of a family that rotates them by position.
    """
    if "qk" in recipe.spaces and family.rope:
        raise UserError(
            f"recipe {recipe.name} prunes q and k, and {family.model_type} rotates them by position in fixed pairs "
            "(RoPE): the matrix that makes up for dropped dimensions cannot be folded there. Heads and mlp "
            "can be pruned: recipes corp-heads and corp-mlp, or leave out spaces.qk"
        )
