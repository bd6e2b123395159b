"""Messages on units: how many stay, and what is wrong with ratios, sizes and strengths."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import exp
from statistics import fmean

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes, human_count
from ckpt_prune.compensation.methods import COLUMN_METHODS, ENOUGH, FAR_FROM_RULE, derive_strength
from ckpt_prune.job.decisions import keep_count, multiple_of, rounding_of, stock_step
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.containers.choosing import is_pruned
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName, first_expert_spaces, recipe_space
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.sizes import size_words
from ckpt_prune.recipe.space_recipe import SpaceRecipe
from ckpt_prune.scoring.selection import units_kept
from ckpt_prune.show.section import format_span
from ckpt_prune.stages.shared.extremes import nothing_goes, ruined_line
from ckpt_prune.stages.shared.tokens import calibration_tokens, sample_tokens
from ckpt_prune.stages.spaces.ratio_gaps import gap
from ckpt_prune.stages.spaces.size_search import Sized, asked_size_of, dense_size, output_size

_NEAR = 0.005
"""A size that is missed by no more than this share of the dense model is met."""


def units_line(prepared: Prepared) -> str:
    size, model, recipe = asked_size_of(prepared), prepared.model, prepared.recipe
    if prepared.foreseen:
        return _foreseen_line(prepared)
    if size is not None and not any(is_pruned(model, space, prepared.widths) for space in recipe.spaces):
        return f"nothing is dropped: the model is within {size.words} as it is"
    uneven, kept = recipe.allocation == "least-error", []
    for name, space in first_expert_spaces(recipe.spaces).items():
        counts, units = prepared.counts(space), model.unit_counts(space)
        ratio = "" if uneven else f" (ratio {1 - fmean(counts) / fmean(units):.3g})"
        kept.append(f"{name} {format_span(counts)}/{format_span(units)}{ratio}")
    if size is None:
        why = f" (the size of ratio {recipe.ratio:g})" if uneven else ""
    else:
        why = f" ({size.words})" if uneven else f", for {size.words}"
    return f"kept per block: {', '.join(kept)}{why}"


def _foreseen_line(prepared: Prepared) -> str:
    """Say how much one ratio everywhere keeps; measuring will find the widths."""
    recipe = prepared.recipe
    kept = ", ".join(
        f"{name} {format_span(prepared.counts(space))}/{format_span(prepared.model.unit_counts(space))}"
        for name, space in first_expert_spaces(recipe.spaces).items()
    )
    size = f"ratio {recipe.ratio:g}" if recipe.size is None else recipe.size.words
    return (
        f"kept per block at one ratio everywhere: {kept} ({size}); measuring finds widths of that size that lose less"
    )


def extreme_line(prepared: Prepared) -> str | None:
    """Say that nothing goes, or that so little stays that the model is ruined; None of all between."""
    recipe, model = prepared.whole.recipe, prepared.whole.model
    ratios = [recipe.ratio_of(space) for space in recipe.spaces]
    if prepared.plan is None and recipe.size is None and not any(ratios) and (line := nothing_goes(recipe)):
        return line
    shares = {
        space: sum(counts) / sum(model.unit_counts(space))
        for space in recipe.spaces
        if (counts := prepared.counts(space))
    }
    return ruined_line(shares, "Ratios of 0.1 to 0.3 are")


def strength_line(prepared: Prepared) -> str | None:
    """Say with which strengths fits memorise the few tokens that they are fitted to."""
    recipe, tokens = prepared.recipe, calibration_tokens(prepared)
    small = {
        line: inputs
        for space, inputs in _inputs(prepared).items()
        if (line := _small_strength(space, recipe.spaces[space], inputs, tokens)) is not None
    }
    if not small:
        return None
    return (
        f"few calibration tokens: {tokens:,}, which fits memorise with {', '.join(small)}; use more samples "
        f"({ENOUGH * max(small.values()):,} tokens or more) or a larger lambda"
    )


def widest_fit(prepared: Prepared) -> int:
    """Return the most inputs of a fit whose strength does not keep it from memorising few tokens; 0 without one."""
    spaces = prepared.recipe.spaces
    return max((inputs for space, inputs in _inputs(prepared).items() if not _has_strength(spaces[space])), default=0)


def _inputs(prepared: Prepared) -> dict[SpaceName, int]:
    """Return the most inputs of a fit at the sites of each space that loses units, for as many tokens as it sees.

    What pools or merges tokens sees fewer: it counts like a fit of as many times the inputs that sees all.
    """
    model, recipe, tokens = prepared.model, prepared.recipe, sample_tokens(prepared)
    pooling = model.family.pooling.items()
    seen = {name: tokens // model.family.rows_of(space.consumer, tokens) for name, space in pooling}
    return {
        space: max(prepared.counts(space)) * model.copies(space) * model.unit_columns(space) * seen.get(space, 1)
        for space in recipe.spaces
        if recipe.gram_for(space) is not None and is_pruned(model, space, prepared.widths)
    }


def _has_strength(settings: SpaceRecipe) -> bool:
    """Return True if a strength in proportion to the Gram keeps fits from memorising tokens, or there is no fit."""
    method, fit = COLUMN_METHODS[settings.compensation.method], settings.compensation
    return not method.needs_gram or (method.uses_strength and fit.lambda_units == "relative")


def _small_strength(space: SpaceName, settings: SpaceRecipe, inputs: int, tokens: int) -> str | None:
    """Say what a strength would be by the rule, if it is a number far below that, and tokens are few."""
    lam, rule = settings.compensation.lam, derive_strength(inputs, tokens)
    is_small = isinstance(lam, float) and FAR_FROM_RULE * lam < rule and tokens < ENOUGH * inputs
    if not is_small or not _has_strength(settings):
        return None
    key = f"spaces.{recipe_space(space)}.compensation.lambda"
    return f"lambda {lam:g} of {space} (--set {key}=auto takes {rule:.2g})"


def size_lines(prepared: Prepared) -> Iterable[str]:
    """Say if units are too coarse for the requested ratio or size, and name the neighbours."""
    sized = prepared.facts(Sized)
    if sized is None:
        settles_counts = prepared.plan is None and prepared.recipe.size is None
        yield from coarse_lines(prepared.model, prepared.recipe) if settles_counts else ()
        recipe = prepared.recipe.at(prepared.model.family)
        if settles_counts and any(map(recipe.ratio_of, recipe.spaces)) and not _some_go(prepared.model, recipe):
            yield "so nothing of any space goes: ask for more, or for whole experts or blocks (recipes reap, depth)"
        return
    size = sized.recipe.size
    assert size is not None
    dense, reached = dense_size(prepared.whole, size.kind), output_size(prepared, size.kind, prepared.widths)
    if sized.larger is None or (size.of(dense) - reached) / dense <= _NEAR:
        return
    shown: dict[str, Callable[[int], str]] = {"bytes": human_bytes, "latency": partial(size_words, "latency")}
    show = shown.get(size.kind, human_count)
    below, above = (f"{show(each)} ({each / dense:.1%})" for each in (reached, sized.larger))
    yield (
        f"{size.words} lies between two sizes that recipe {prepared.recipe.name} gives: {below}, taken here, "
        f"and {above}"
    )


def untouched_line(prepared: Prepared) -> str | None:
    """Name spaces of which the recipe touches no weights, nor asks for; None if there are none."""
    recipe, spaces = prepared.whole.recipe.at(prepared.model.family), prepared.model.family.spaces
    pruned = [spaces[space] for space in (*recipe.spaces, *prepared.left_whole) if space in spaces]
    modules = {module for space in pruned for module in space.modules}
    left = [name for name, space in first_expert_spaces(spaces).items() if modules.isdisjoint(spaces[space].modules)]
    return f"left whole by this recipe: {', '.join(left)}" if left else None


def coarse_lines(model: Model, recipe: Recipe) -> Iterable[str]:
    """Yield a line for every space whose units are too coarse for its ratio.

    There are none where widths are found by effect, of which ratios only say a size, unless nothing would go.
    """
    recipe = recipe.at(model.family)
    if recipe.allocation != "uniform" and _some_go(model, recipe):
        return
    for name, space in first_expert_spaces(recipe.spaces).items():
        multiple, counts = multiple_of(model, recipe, space), model.unit_counts(space)
        units = min(counts, default=0)  # the fewest are the coarsest
        by_ratio = units > 0 and recipe.spaces[space].keep is None
        mismatch = gap(units, recipe.ratio_of(space), rounding_of(model, recipe, space), multiple) if by_ratio else None
        if mismatch is None:
            continue
        blocks = "each block" if max(counts) == units else "the narrowest block"
        asks = ", as its class asks" if multiple == stock_step(model, recipe, space) else ""
        in_steps = f" in multiples of {multiple}{asks}" if multiple > 1 else ""
        alternative = "no more can go"
        if mismatch.other is not None:
            alternative = f"a ratio of {mismatch.ratio:g} drops {mismatch.other or 'none'}"
        yield (
            f"{name}: a ratio of {mismatch.asked:g} drops {mismatch.dropped or 'none'} of {units} in {blocks}"
            f"{in_steps}; {alternative}"
        )
        inside = "" if mismatch.dropped else _inside(model, recipe, space)
        if inside:
            yield f"{name}: {inside}"


def _some_go(model: Model, recipe: Recipe) -> bool:
    """Return whether any block loses a unit by the ratios of a recipe, which has the spaces of the model's family."""
    return any(
        keep_count(model, recipe, Site(block, space)) < model.units(space, block)
        for space in recipe.spaces
        for block in model.blocks_with(space)
    )


def same_units_lines(prepared: Prepared) -> Iterable[str]:
    """Say of which spaces every block loses the same units, and why."""
    for name in prepared.recipe.spaces:
        if prepared.model.family.spaces[name].same_units and is_pruned(prepared.model, name, prepared.widths):
            yield (
                f"{name}: every block loses the same ones, those of the lowest scores summed over all blocks, because "
                "the first block has a table for the heads of all"
            )


def multiples_line(prepared: Prepared) -> str | None:
    """Say how much larger the multiples that runtimes want make an output than its ratio asks for, or return None.

    A requested size is kept to with them, so that they cost none there.
    """
    recipe, model = prepared.recipe, prepared.model
    if not recipe.runs_on or asked_size_of(prepared) is not None:
        return None
    if all(settings.multiple_of == 1 or settings.keep is not None for settings in recipe.spaces.values()):
        return None
    more = 0
    for space in (name for name, settings in recipe.spaces.items() if settings.keep is None):
        ratio, rounding = recipe.ratio_of(space), rounding_of(model, recipe, space)
        counts = (units_kept(units, ratio, rounding, model.multiple(space)) for units in model.unit_counts(space))
        more += (sum(prepared.counts(space)) - sum(counts)) * model.unit_weights(space)
    names = ", ".join(recipe.runs_on)
    if more <= 0:
        return f"multiples for {names} make the output no larger than the ratio does"
    dense, stand_in = prepared.before.parameters, " about" if prepared.foreseen else ""
    return (
        f"multiples for {names} leave{stand_in} {human_count(more)} parameters ({more / dense:.1%} of the dense model) "
        "more than the ratio alone: another ratio, or --target-params, makes up for them"
    )


def _inside(model: Model, recipe: Recipe, space: SpaceName) -> str:
    """Say what could be dropped inside the units of a space that loses none; empty if nothing."""
    inner = next((name for name, each in model.family.columns.items() if each.part_of == space), None)
    if inner is None or inner in recipe.spaces:
        return ""
    units, definition = max(model.unit_counts(inner)), model.family.spaces[inner]
    with suppress(UserError):  # a ratio that leaves none
        dropped = units - units_kept(units, recipe.ratio_of(space), definition.rounding)
        if dropped:
            in_each = f"{dropped} of {units} {definition.unit}s in each"
            return f"a recipe with spaces.{inner} can drop {in_each} instead of whole ones"
    return f"a recipe with spaces.{inner} can drop {definition.unit}s instead of whole ones"


SECOND_ORDER = "a second-order estimate, too low where many units go or samples are few"
"""The words that follow a predicted divergence."""


def predicted_line(model: Model, plan: Plan) -> str | None:
    """Say what a plan is predicted to do to the model's output; None if that is unknown or nothing."""
    divergence = plan.divergence
    if not divergence:
        return None
    if not model.family.gives_logits:
        return f"predicted: the last hidden states are off by {divergence:.4f} of their energy, or more"
    line = f"predicted: a divergence (KL) of {divergence:.4f} nats from the dense model's output"
    if model.family.causal:
        line += f", about {exp(divergence):.2f} times its perplexity"
    return f"{line}; {SECOND_ORDER}"
