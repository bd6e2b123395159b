"""Ratios that reach a size: one for all spaces, and another for the finest space to come nearer to it."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil

from torch import Tensor

from ckpt_prune.budget.curves import Crossing
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.decisions import Decisions, keep_count, kept_units, multiple_of, rounding_of
from ckpt_prune.job.latency import Latencies
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.records import DepthRecord
from ckpt_prune.model.containers.container import Widths
from ckpt_prune.model.cost import cost_of, count_by_part, part_words
from ckpt_prune.model.model import TensorSpecs
from ckpt_prune.model.spaces import COUPLED, Site, SpaceName, recipe_space
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.sizes import SizeKind, TargetSize, cost_in, size_words
from ckpt_prune.stages.hidden.records import HiddenRecord
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.shared.output import output_at, with_kept_bytes
from ckpt_prune.stages.spaces.rankings import keep_ranked
from ckpt_prune.stages.spaces.ratio_gaps import allowed_widths, ratio_for

ROUNDS = 5
"""How often a budget is lowered by what the container adds: biases of a few blocks."""
_RATIO_STEPS = 10_000
"""Ratios that are tried are multiples of one in so many."""

CrossedSpaces = Crossing[SpaceName]
"""Spaces of a block that cross (`model.spaces.COUPLED`)."""
Ranking = Mapping[Site, Tensor]
"""Standardised scores of every unit (`rankings.standardised_scores`)."""


@dataclass(frozen=True)
class Sized:
    """A recipe before its size was turned into ratios.

    Attributes:
        recipe: with the size.
        larger: the next larger size that such ratios could give, in the unit of the size; None if nothing is dropped.
    """

    recipe: Recipe
    larger: int | None


@dataclass(frozen=True)
class _Fit:
    """Ratios that keep to a budget.

    Attributes:
        recipe: with these ratios.
        widths: that they give.
        larger: the widths of the next larger size; None if nothing is dropped.
        moved: units that the finest space keeps more or fewer than the one ratio says.
    """

    recipe: Recipe
    widths: Widths
    larger: Widths | None
    moved: int = 0


def at_size(prepared: Prepared, ranking: Ranking | None = None) -> Prepared:
    """Return the state with ratios in place of its recipe's size, which they reach from above.

    One ratio for all spaces is the least that reaches the size, in steps of 1e-4. If blocks are ranked in one list
    (`widths.ranking_of`), that is all. Else a coarse space (three KV groups) may jump past the size at that ratio. Then
    the space with the smallest units makes up for the difference: it loses more without the jump, or less with it,
    whichever moves it less from the one ratio.
    """
    recipe, model = prepared.recipe, prepared.model
    if recipe.size is None or recipe.allocation == "least-error" or prepared.plan is not None:
        return prepared
    if not prepared.widths_known:
        return prepared
    limit, kind = limit_of(prepared), recipe.size.kind

    def at(step: int) -> Recipe:
        return recipe.with_ratio(step / _RATIO_STEPS)

    def widths(step: int) -> Widths:
        tried = at(step)
        if ranking is None:
            return Decisions(tried).widths(model)
        return kept_units(model, tried, keep_ranked(model, tried, ranking)).widths(model)

    def cost(at_widths: Widths) -> int:
        return size_at(prepared, kind, at_widths)

    most, budget = _largest_step(prepared), limit
    least = cost(widths(most))
    for _ in range(ROUNDS):
        if least > budget:
            raise UserError(unreachable(prepared, least) if budget == limit else taken_up(prepared))
        step = bisect_left(range(most), True, key=lambda tried: cost(widths(tried)) <= budget)
        fit = _Fit(at(step), widths(step), widths(step - 1) if step else None)
        if ranking is None and step and (space := _finest_space(prepared, kind)) is not None:
            fits = [_fill(prepared, tried, space, kind, budget) for tried in (at(step - 1), at(step))]
            fit = min((each for each in fits if each is not None), key=lambda each: each.moved, default=fit)
        # What the container adds is known only once it is chosen: no class might have another shape.
        size = output_size(prepared, kind, fit.widths)
        if size <= limit:
            larger = None if fit.larger is None else cost(fit.larger) + size - cost(fit.widths)
            return replace(prepared, recipe=fit.recipe).knowing(Sized(recipe, larger))
        budget = min(budget - 1, limit - (size - cost(fit.widths)))
    raise UserError(taken_up(prepared))


def _fill(prepared: Prepared, recipe: Recipe, space: SpaceName, kind: SizeKind, budget: float) -> _Fit | None:
    """Return a recipe with one space as wide as the budget allows and the others as they are; None if none fits."""
    model = prepared.model
    counts, pruned = Decisions(recipe).widths(model), recipe.blocks(model.blocks)
    base = next(counts[block][space] for block in pruned if space in counts[block])
    (units,), multiple = set(model.unit_counts(space)), multiple_of(model, recipe, space)
    allowed = allowed_widths(units, multiple)
    alike = [
        name
        for name in recipe.spaces
        if recipe_space(name) == recipe_space(space) or model.share_width_key(name, space)
    ]

    def widths(width: int) -> Widths:
        return [
            {name: width if block in pruned and name in alike else count for name, count in kept.items()}
            for block, kept in enumerate(counts)
        ]

    fitting = bisect_right(allowed, budget, key=lambda width: size_at(prepared, kind, widths(width)))
    if not fitting:
        return None
    width = allowed[fitting - 1]
    larger = widths(allowed[fitting]) if fitting < len(allowed) else None
    if width != base:
        ratio = ratio_for(units, width, rounding_of(model, recipe, space), multiple)
        for name in alike:
            recipe = recipe.with_own_ratio(name, ratio)
    return _Fit(recipe, widths(width), larger, abs(width - base))


def _finest_space(prepared: Prepared, kind: SizeKind) -> SpaceName | None:
    """Return the space, of as many units wherever a block has it, whose width can change in the smallest steps."""
    model, recipe = prepared.model, prepared.recipe
    steps: dict[SpaceName, float] = {}
    for space, cost in unit_costs(prepared, kind).items():
        counts, multiple = set(model.unit_counts(space)), multiple_of(model, recipe, space)
        is_pruned = any(block in recipe.blocks(model.blocks) for block in model.blocks_with(space))
        if is_pruned and len(counts) == 1 and len(allowed_widths(max(counts), multiple)) > 1:
            steps[space] = cost * min(multiple, *counts)
    return min(steps, key=lambda space: steps[space], default=None)


def _largest_step(prepared: Prepared) -> int:
    """Return the largest ratio that leaves a unit of every space, in steps."""
    model = prepared.model
    sites = [Site(block, space) for space in prepared.recipe.spaces for block in model.blocks_with(space)]

    def empties(step: int) -> bool:
        tried = prepared.recipe.with_ratio(step / _RATIO_STEPS)
        try:
            return any(keep_count(model, tried, site) < 1 for site in sites)
        except UserError:
            return True

    return bisect_left(range(_RATIO_STEPS), True, key=empties) - 1


def check_reachable(prepared: Prepared) -> None:
    """Refuse a size that no widths reach, before anything is measured."""
    recipe = prepared.recipe
    # What spaces can reach once blocks or dimensions are gone is checked then.
    looked_at = recipe.size is not None and recipe.allocation == "least-error" and not recipe.changes_model
    if looked_at and not is_reachable(prepared):
        raise UserError(unreachable(prepared, _least_size(prepared)))


def is_reachable(prepared: Prepared) -> bool:
    """Return True if some widths of the spaces reach the recipe's size."""
    return _least_size(prepared) <= limit_of(prepared)


def fewest_reachable(most: int, without: Callable[[int], Prepared]) -> int:
    """Return the least amount without which spaces reach the size, or `most`; all larger ones reach it, too.

    Args:
        without: an amount of blocks or dimensions → the state once that is gone.
    """
    return 0 if is_reachable(without(0)) else bisect_left(range(most), True, key=lambda n: is_reachable(without(n)))


def _least_size(prepared: Prepared) -> int:
    recipe, model = prepared.recipe, prepared.model
    assert recipe.size is not None
    smallest = [
        {name: min(units, multiple_of(model, recipe, name)) for name, units in block.items() if name in recipe.spaces}
        for block in model.dense_widths
    ]
    return size_at(prepared, recipe.size.kind, smallest)


def unreachable(prepared: Prepared, least: float) -> str:
    """Return the message for a size below the least that can be reached."""
    gone = {"blocks": prepared.facts(DepthRecord), "stream": prepared.facts(HiddenRecord)}
    parts = [name for name, record in gone.items() if record is not None]
    what = " and ".join(filter(None, [", ".join(parts), "spaces"]))
    return out_of_reach(prepared, f"whose {what} leave", least)


def out_of_reach(prepared: Prepared, what: str, least: float) -> str:
    """Return the message for a size below the least that a recipe can reach: `what` leaves so much."""
    size = prepared.recipe.size
    assert size is not None
    dense, parts = dense_size(prepared.whole, size.kind), ""
    if size.kind in ("params", "bytes"):
        parts = f" (parameters: {part_words(count_by_part(prepared.whole.model))})"
    causal, runs_on = prepared.whole.model.family.causal, prepared.recipe.runs_on or ()
    in_file = size.kind == "bytes" and causal and any(name.startswith("llama.cpp") for name in runs_on)
    hint = "; for a GGUF file of that size: `ckpt-prune frontier MODEL --target-bytes …`" if in_file else ""
    return (
        f"{size.words}: out of reach of recipe {prepared.recipe.name}, {what} {size_words(size.kind, least)} at the "
        f"least, {ceil(1000 * least / dense) / 10:g}% of {size_words(size.kind, dense)}{parts}{size.share_meant}{hint}"
    )


def taken_up(prepared: Prepared) -> str:
    """Return the message for a container whose biases take up what is saved."""
    assert prepared.recipe.size is not None
    return f"{prepared.recipe.size.words} cannot be met: the biases that the container needs take up what is saved"


def unit_costs(prepared: Prepared, kind: SizeKind) -> dict[SpaceName, float]:
    """Return the cost of one unit of each space in one block: all sizes are linear in the widths of a block."""
    costs: dict[SpaceName, float] = {}
    dense = dense_size(prepared, kind)
    for space in prepared.recipe.spaces:
        first = next(name for name in prepared.recipe.spaces if recipe_space(name) == recipe_space(space))
        if first != space:
            costs[space] = costs[first]  # one expert is as large as the next
        elif _holding(prepared, [space]) is None:
            costs[space] = 1.0  # it stays whatever it costs
        else:
            costs[space] = float(dense - _size_without(prepared, kind, [space]))
    return costs


def _holding(prepared: Prepared, spaces: Iterable[SpaceName]) -> int | None:
    """Return the first block that can lose a unit of each of these spaces."""
    blocks = enumerate(prepared.model.dense_widths)
    return next((block for block, units in blocks if all(units.get(space, 1) > 1 for space in spaces)), None)


def _size_without(prepared: Prepared, kind: SizeKind, spaces: Sequence[SpaceName]) -> int:
    """Return the size without one unit of each of these spaces in one block."""
    widths = [dict(units) for units in prepared.model.dense_widths]
    block = _holding(prepared, spaces)
    assert block is not None
    for space in spaces:
        widths[block][space] -= 1
    return size_at(prepared, kind, widths)


def crossed_spaces(prepared: Prepared, kind: SizeKind) -> list[CrossedSpaces]:
    spaces = prepared.recipe.spaces
    pairs = [pair for pair in COUPLED if spaces.keys() >= {*pair} and _holding(prepared, pair) is not None]
    crossed: list[CrossedSpaces] = []
    while pairs:
        linked = set(pairs[0])
        for _ in pairs:
            linked |= {space for pair in pairs if linked & set(pair) for space in pair}
        inside = [pair for pair in pairs if linked & set(pair)]
        pairs = [pair for pair in pairs if pair not in inside]
        crossed.append(Crossing(inside, _in_common(prepared, kind, [space for space in spaces if space in linked])))
    return crossed


def _in_common(prepared: Prepared, kind: SizeKind, spaces: Sequence[SpaceName]) -> dict[tuple[SpaceName, ...], float]:
    """Return two spaces or more → what one unit of each has in common in one block, by inclusion and exclusion."""
    dense = dense_size(prepared, kind)
    common: dict[tuple[SpaceName, ...], float] = {}
    for size in range(1, len(spaces) + 1):
        for subset in combinations(spaces, size):
            saved = dense - _size_without(prepared, kind, subset) if _holding(prepared, subset) is not None else 0
            parts = (part for less in range(1, size) for part in combinations(subset, less))
            remainder = saved - sum((-1) ** (len(part) + 1) * common[part] for part in parts)
            common[subset] = (-1) ** (size + 1) * remainder
    return {subset: value for subset, value in common.items() if len(subset) > 1 and value}


def limit_of(prepared: Prepared) -> int:
    """Return the size to keep to, of the recipe's kind. A share is of the model with all its blocks."""
    size = prepared.recipe.size
    assert size is not None
    dense, source = dense_size(prepared.whole, size.kind), prepared.whole.model.checkpoint
    # Its weights may have few bits, and those of the output more.
    few = size.kind == "bytes" and source.quantisation is not None
    return size.of(min(dense, source.nbytes) if few else dense)


def at_own_size(prepared: Prepared) -> Prepared:
    """Return the state with a size in place of a ratio: the parameters that one ratio leaves of all spaces."""
    recipe = prepared.recipe
    if recipe.size is not None:
        return prepared
    plain = replace(prepared, recipe=recipe.spaces_alone.at_one_ratio)
    size = size_at(plain, "params", Decisions(plain.recipe).widths(prepared.model))
    return replace(prepared, recipe=recipe.with_size(TargetSize.model_validate({"params": size})))


def dense_size(prepared: Prepared, kind: SizeKind) -> int:
    """Return the size of the state's model before any units go."""
    if kind == "latency":
        return _latencies(prepared).of(prepared.model.blocks)
    return _cost_in(prepared, kind, prepared.model.shapes)


def size_at(prepared: Prepared, kind: SizeKind, widths: Widths) -> int:
    """Return the size at some widths, before the container adds biases."""
    if kind == "latency":
        return _latencies(prepared).at(prepared.model.dense_widths, widths)
    return _cost_in(prepared, kind, prepared.model.shapes_at(widths))


def _cost_in(prepared: Prepared, kind: SizeKind, shapes: TensorSpecs) -> int:
    return cost_in(kind, with_kept_bytes(prepared, cost_of(prepared.model, shapes), shapes))


def output_size(prepared: Prepared, kind: SizeKind, widths: Widths) -> int:
    """Return the size of the output at some widths. Biases take no time that a table of a machine could show."""
    output = output_at(prepared, widths)
    return size_at(prepared, kind, widths) if kind == "latency" else cost_in(kind, output.cost)


def time_in_stream(prepared: Prepared, kept: int) -> int:
    """Return the time of the state's model with a residual stream of so many dimensions, before anything else goes."""
    assert prepared.job.latencies is not None
    return prepared.job.latencies.narrow(kept).of(prepared.model.blocks)


def _latencies(prepared: Prepared) -> Latencies:
    """Return the table of this machine for the state's residual stream."""
    latencies = prepared.job.latencies
    assert latencies is not None
    sliced = prepared.basis if isinstance(prepared.basis, SlicedCheckpoint) else None
    return latencies.narrow(prepared.model.dimension("hidden") if sliced is None else sliced.kept)


def asked_size_of(prepared: Prepared) -> TargetSize | None:
    """Return the requested size, even if it was turned into ratios."""
    sized = prepared.facts(Sized)
    return prepared.recipe.size or (None if sized is None else sized.recipe.size)
