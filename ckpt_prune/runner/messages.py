"""Messages about a job for the user, one line each."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from math import exp

from pydantic import ValidationError

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes, human_count, plural
from ckpt_prune.common.progress import Notices
from ckpt_prune.common.zero_patterns import describe_mask
from ckpt_prune.compensation.methods import COLUMN_METHODS, FAR_FROM_RULE, derive_strength
from ckpt_prune.job.decisions import multiple_of, rounding_of
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.selection import units_kept
from ckpt_prune.job.sizes import TargetSize, size_words
from ckpt_prune.job.space_recipe import SpaceRecipe
from ckpt_prune.measure.samples.choose import DEFAULT_WINDOWS, MOST_IMAGES
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.containers.choosing import unprunable_spaces
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName, first_expert_spaces, recipe_space
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE, WIDER_CHOICE
from ckpt_prune.runner.changes import change_lines
from ckpt_prune.runner.runtimes import fit_to_runtimes
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.low_rank.keys import LowRank
from ckpt_prune.stages.mask.keys import Mask
from ckpt_prune.stages.report import find_report
from ckpt_prune.stages.spaces.ratio_gaps import gap
from ckpt_prune.stages.spaces.size_search import dense_size, output_size

_NEAR = 0.005
"""A size that is missed by no more than this share of the dense model is met."""
_NAMED = 3
"""So many of a list are named."""
_RUINED, _RUINED_TOGETHER = 0.1, 0.25
"""A model is ruined with so small a share of one kind of its units, or of all kinds."""
_ALIKE = 0.005
"""Predicted losses that differ by less than this share are told to be the same."""


def messages(prepared: Prepared) -> list[str]:
    """Return the messages about a job, besides its sizes."""
    lines = []
    recipe = prepared.recipe
    within = prepared.model.checkpoint.within
    if within is not None:
        composite = load_composite(str(within.whole.config["model_type"]))
        lines.append(
            f"all figures are of the {within.part} part of this {composite.model_type}: "
            f"{composite.part(within.part).note}"
        )
    lines += change_lines(prepared)
    first, family = prepared.model.spaced_blocks.start, prepared.model.family
    if recipe.has("mask") and first:
        lines.append(
            f"the mask leaves {plural(first, 'block')} before the others as they are ({family.leading} in "
            "config.json): one mlp stands there in place of experts"
        )
    refused = unprunable_spaces(prepared.model)
    lines += [refused[space] for space in prepared.left_whole if space in refused]
    if prepared.output.container.note:
        lines.append(prepared.output.container.note)
    if prepared.model.checkpoint.ignored:
        lines.append(
            f"{ignored_words(prepared.model)}: they are left out, and the output's config.json no longer speaks of them"
        )
    lines += filter(None, [tied_words(prepared.model)])
    source_report = find_report(prepared.model.checkpoint.path)
    if source_report is not None and source_report.mask is not None:
        masked = describe_mask(source_report.mask.method, source_report.mask.pattern)
        lines.append(
            f"this model was masked before ({masked}): what is rewritten now loses those zeros, and another mask "
            "chooses anew; see `ckpt-prune inspect OUT --sparsity`"
        )
    lines += size_lines(prepared)
    others = [few_tokens(prepared), wider_choice(prepared), multiples_line(prepared)]
    lines += filter(None, others)
    return lines


def extreme_line(prepared: Prepared) -> str | None:
    """Say that nothing goes, or that so little stays that the model is ruined; None of all between."""
    recipe, model = prepared.whole.recipe, prepared.whole.model
    ratios, mask = [recipe.ratio_of(space) for space in recipe.spaces], recipe.get(Mask)
    if mask is not None:  # an N:M pattern says how much
        ratios = [recipe.ratio] if mask.groups is None else []
    if prepared.plan is None and recipe.size is None and ratios and not any(ratios):
        others = [key for key in ("depth", "hidden", "low_rank", "quantize", "rotation", "recovery") if recipe.has(key)]
        if not others:
            return (
                "a ratio of 0 takes nothing away, and the output is the dense model again: say a larger --ratio, such "
                "as 0.2, or how large the output may be, such as --target-params 80%"
            )
    shares = {
        space: sum(counts) / (len(counts) * model.units(space))
        for space in recipe.spaces
        if (counts := [widths[space] for widths in prepared.widths if space in widths])
    }
    if mask is not None:
        shares = {"the weights": 1 - ratios[0]} if ratios else {}
    if shares and (min(shares.values()) <= _RUINED or max(shares.values()) <= _RUINED_TOGETHER):
        stays = " and ".join(f"{share:.1%} of {name}" for name, share in shares.items())
        return (
            f"{stays} would stay: the model is ruined then, whatever makes up for it. "
            f"{'Ratios of 0.1 to 0.3 are' if mask is None else 'A ratio of 0.5 is'} usual; where a model has to be "
            "that small, take fewer bits (`ckpt-prune quantize`) or one trained at that size"
        )
    return None


def ignored_words(model: Model) -> str:
    """Say how many tensors of a checkpoint its class does not load, and name some."""
    names = sorted(model.checkpoint.ignored)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    numbers = sum(info.numel for info in model.checkpoint.ignored.values())
    return (
        f"transformers' {model.family.architecture} does not load {plural(len(names), 'tensor')} "
        f"({human_count(numbers)} numbers; {', '.join(names[:_NAMED])}{more})"
    )


def tied_words(model: Model) -> str | None:
    """Say how stored tensors differ from what the config ties; None if they do not."""
    seen = model.checkpoint
    if seen.stated:
        return (
            f"config.json ties tensors that are stored and differ: transformers' {model.family.architecture} takes "
            "them as they are stored, and outputs say tie_word_embeddings: false"
        )
    lines = [
        f"{new} is stored as {old}, which config.json ties to it: outputs store {new}"
        for new, old in seen.copies.items()
    ]
    twice = sorted(seen.shadowed.keys() - seen.copies.values())
    if twice:
        names = ", ".join(twice)
        lines.append(f"config.json ties {names} to a tensor that is stored with the same values: outputs store one")
    return "; ".join(lines) or None


def few_tokens(prepared: Prepared) -> str | None:
    """Warn if a fit only memorises so few calibration tokens, or its strength does not suit their number."""
    model, recipe = prepared.model, prepared.recipe
    if prepared.lacks_moments:
        return None
    tokens = prepared.statistics.index.tokens if prepared.statistics else 0
    if prepared.live is not None and not tokens:
        tokens = len(prepared.live.samples) * prepared.live.samples.tokens
    inputs = {
        space: max(width[space] for width in prepared.spaced_widths) * model.copies(space) * model.unit_columns(space)
        for space in recipe.spaces
        if recipe.gram_for(space) is not None
        and any(width[space] < model.units(space) for width in prepared.spaced_widths)
    }
    far = [_far_strength(space, recipe.spaces[space], inputs[space], tokens) for space in inputs]
    if far := list(filter(None, far)):
        return (
            f"recipe {recipe.name} keeps its own strength: {'; '.join(far)}. The rule's, 1.5 x kept inputs / "
            "calibration tokens, mostly loses less on other samples"
        )
    widths = [width for space, width in inputs.items() if not _has_strength(recipe.spaces[space])]
    depth, hidden = prepared.whole.recipe.get(Depth), prepared.whole.recipe.get(Hidden)
    if hidden is not None and not recipe.spaces:
        width = model.dimension("hidden")
        if tokens >= 2 * width:
            return None
        return (
            f"few calibration tokens: {tokens:,} for {width:,} dimensions of the residual stream, whose principal "
            f"directions are then those of these tokens; use more samples ({2 * width:,} tokens or more)"
        )
    if depth is not None and depth.compensation.linear and prepared.whole.live is not None:
        widths = [model.dimension("hidden")]
    low_rank, mask = recipe.get(LowRank), recipe.get(Mask)
    if (low_rank is not None and low_rank.whitens) or (mask is not None and mask.method == "sparsegpt"):
        weights = chain.from_iterable(map(model.weights, range(model.blocks)))
        widths = [model.checkpoint.tensors[name].shape[1] for name in weights]
    if not widths or tokens >= 2 * max(widths):
        return None
    return (
        f"few calibration tokens: {tokens:,} for {max(widths):,} inputs of a projection, so errors are those of a fit, "
        f"not a prediction; use more samples ({2 * max(widths):,} tokens or more)"
    )


def _has_strength(own: SpaceRecipe) -> bool:
    """Return True if a strength in proportion to the Gram keeps fits from memorising tokens, or there is no fit."""
    method, fit = COLUMN_METHODS[own.compensation.method], own.compensation
    return not method.needs_gram or (method.uses_strength and fit.lambda_units == "relative")


def _far_strength(space: SpaceName, own: SpaceRecipe, inputs: int, tokens: int) -> str | None:
    """Say what a strength would be by the rule, if it is a number far from it."""
    given, rule = own.compensation.lam, derive_strength(inputs, tokens)
    if not _has_strength(own) or not isinstance(given, float) or max(rule, given) <= FAR_FROM_RULE * min(rule, given):
        return None
    key = f"spaces.{recipe_space(space)}.compensation.lambda"
    return f"lambda {given:g} of {space}, by the rule {rule:.2g} (--set {key}=auto)"


def asked_size_of(prepared: Prepared) -> TargetSize | None:
    """Return the requested size, even if it was turned into ratios."""
    unsized = prepared.unsized
    return prepared.recipe.size or (None if unsized is None else unsized.size)


def size_lines(prepared: Prepared) -> Iterable[str]:
    """Say if units are too coarse for the requested ratio or size, and name the neighbours."""
    if prepared.unsized is None:
        settles_counts = prepared.plan is None and prepared.recipe.size is None
        yield from coarse_lines(prepared.model, prepared.recipe) if settles_counts else ()
        return
    size = prepared.unsized.size
    assert size is not None
    dense, reached = dense_size(prepared.whole, size.kind), output_size(prepared, size.kind, prepared.widths)
    if prepared.larger is None or (size.of(dense) - reached) / dense <= _NEAR:
        return
    shown: dict[str, Callable[[int], str]] = {"bytes": human_bytes, "latency": partial(size_words, "latency")}
    show = shown.get(size.kind, human_count)
    below, above = (f"{show(each)} ({each / dense:.1%})" for each in (reached, prepared.larger))
    yield (
        f"{size.words} lies between two sizes that recipe {prepared.recipe.name} gives: {below}, taken here, "
        f"and {above}"
    )


def coarse_lines(model: Model, recipe: Recipe) -> Iterable[str]:
    """Yield a line for every space whose units are too coarse for its ratio."""
    if recipe.has("mask") or recipe.allocation != "uniform":
        return
    recipe = recipe.at(model.family)
    for name, space in first_expert_spaces(recipe.spaces).items():
        units, multiple = model.units(space), multiple_of(model, recipe, space)
        mismatch = gap(units, recipe.ratio_of(space), rounding_of(model, recipe, space), multiple)
        if mismatch is None:
            continue
        in_steps = f" in multiples of {multiple}" if multiple > 1 else ""
        alternative = "no more can go"
        if mismatch.other is not None:
            alternative = f"a ratio of {mismatch.ratio:g} drops {mismatch.other or 'none'}"
        yield (
            f"{name}: a ratio of {mismatch.asked:g} drops {mismatch.dropped or 'none'} of {units} in each block"
            f"{in_steps}; {alternative}"
        )
        inside = "" if mismatch.dropped else _inside(model, recipe, space)
        if inside:
            yield f"{name}: {inside}"


def multiples_line(prepared: Prepared) -> str | None:
    """Say how much larger the multiples that runtimes want make an output than its ratio asks for, or return None.

    A requested size is kept to with them, so that they cost none there.
    """
    recipe, model = prepared.recipe, prepared.model
    if not recipe.runs_on or recipe.has("mask") or asked_size_of(prepared) is not None:
        return None
    if all(settings.multiple_of == 1 for settings in recipe.spaces.values()):
        return None
    units, ratio = model.units, recipe.ratio_of
    asked_widths = {
        space: units_kept(units(space), ratio(space), rounding_of(model, recipe, space), model.multiple(space))
        for space in recipe.spaces
    }
    kept = (
        (space, count) for widths in prepared.spaced_widths for space, count in widths.items() if space in asked_widths
    )
    more = sum((count - asked_widths[space]) * model.unit_weights(space) for space, count in kept)
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
    inner = next((name for name, each in model.family.columns.items() if each.within == space), None)
    if inner is None or inner in recipe.spaces:
        return ""
    units, own = model.units(inner), model.family.spaces[inner]
    with suppress(UserError):  # a ratio that leaves none
        dropped = units - units_kept(units, recipe.ratio_of(space), own.rounding)
        if dropped:
            in_each = f"{dropped} of {units} {own.unit}s in each"
            return f"a recipe with spaces.{inner} can drop {in_each} instead of whole ones"
    return f"a recipe with spaces.{inner} can drop {own.unit}s instead of whole ones"


def unmeasured_lines(prepared: Prepared) -> Iterable[str]:
    """Say what a dry run cannot know because it is measured, on which data, and which command shows it earlier."""
    model, recipe = prepared.model, prepared.recipe
    depth, hidden = prepared.whole.recipe.get(Depth), prepared.whole.recipe.get(Hidden)
    if not prepared.foreseen and not prepared.whole.lacks_moments:
        return
    images = model.family.modality == "image"
    what = "the inputs of every block's layers"
    if depth is not None or hidden is not None:
        unmeasured = ["how far blocks move the residual stream"] if depth is not None else []
        unmeasured += ["the residual stream, wherever a block reads it"] if hidden is not None else []
        what = ", and then ".join([*unmeasured, *([what] if recipe.spaces else [])])
    if recipe.weighed_by_effect:
        what += ", and what pruning each does to the model's output"
    if prepared.live is None:
        most = f"up to {MOST_IMAGES} images" if images else f"{DEFAULT_WINDOWS} windows of {model.tokens} tokens"
        option = "--images DIR" if images else "--text FILE"
        others = ", or --statistics STATS" if depth is None and hidden is None else ""
        yield f"to be measured: {what}; give {option} for it ({most}, unless you say --samples){others}"
    else:
        samples = prepared.live.samples
        windows = f"{plural(len(samples), 'window')} of {samples.tokens} tokens"
        count = plural(len(samples), "image") if images else windows
        yield f"to be measured first: {what}, on {count} of {prepared.live.source}"
    if prepared.foreseen and depth is None and hidden is None and not recipe.has("low_rank"):
        yield (
            f"`{recipe.calibration}` and then `ckpt-prune plan --statistics STATS` tell the widths and the predicted "
            "error of every layer before anything is pruned"
        )


def wider_choice(prepared: Prepared) -> str | None:
    """Say what widths per block would gain, if no recipe was named and all blocks got the same widths; or None."""
    recipe = prepared.recipe
    if not prepared.job.by_default or (recipe.name, recipe.widths) != (DEFAULT_RECIPE, "uniform"):
        return None
    try:
        wider = type(recipe).model_validate(prepared.whole.recipe.model_dump(by_alias=True) | {"widths": "per_layer"})
        fit_to_runtimes(wider, prepared.model, Notices())
    except (ValidationError, UserError):
        return None  # what else was asked for, such as quantize, refuses it
    losses = prepared.decisions.losses
    beginning = f"widths per block (--recipe {WIDER_CHOICE}) would lose"
    if losses is None:
        return f"{beginning} less, and need remote code"
    if losses.chosen - losses.per_block <= _ALIKE * losses.chosen:
        return f"{beginning} as much, as predicted"
    saved = 1 - losses.per_block / losses.chosen
    return f"{beginning} less (predicted: {saved:.0%} less), and need remote code"


SECOND_ORDER = "a second-order estimate, too low where many units go or samples are few"
"""Of a predicted divergence."""


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
