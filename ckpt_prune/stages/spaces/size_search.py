"""Meeting a size with one ratio: the least that reaches it, and the finest space as near to it as it goes."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.cost import cost_of
from ckpt_prune.job.decisions import Decisions, keep_count, kept_units, multiple_of, rounding_of
from ckpt_prune.job.latency import Latencies
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.sizes import SizeKind, TargetSize, cost_in, size_words
from ckpt_prune.model.containers.container import Widths
from ckpt_prune.model.spaces import COUPLED, Site, SpaceName, recipe_space
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.output import output_at
from ckpt_prune.stages.spaces.budget import Crossing
from ckpt_prune.stages.spaces.rankings import ranked
from ckpt_prune.stages.spaces.ratio_gaps import allowed_widths, ratio_for

ROUNDS = 5
"""How often a budget is lowered by what the container adds to it, which is biases of a few blocks."""
_RATIO_STEPS = 10_000
"""Ratios that are tried for a size: multiples of one in so many."""

Crossed = Crossing[SpaceName]
"""Spaces of a block that cross (`spaces.COUPLED`)."""
Ranking = Mapping[Site, Tensor]
"""Standardised scores of every unit (`rankings.standardised_scores`)."""


@dataclass(frozen=True)
class _Reached:
    """What meets a budget.

    Attributes:
        recipe: with the ratios that do.
        widths: that these give.
        larger: the widths of the next larger size; None where nothing is dropped.
        moved: units that the finest space keeps more or fewer than the one ratio says.
    """

    recipe: Recipe
    widths: Widths
    larger: Widths | None
    moved: int = 0


def at_size(prepared: Prepared, ranking: Ranking | None = None) -> Prepared:
    """The request with ratios in place of its recipe's size, which they meet from above.

    It is the least ratio that reaches the size, in steps of 1e-4. Where blocks are ranked in one list, that is all.
    Elsewhere a coarse space (three KV groups) may jump past the size at that ratio. So the space whose units are the
    smallest makes up for the difference: it loses more where the jump is not taken, or less where it is, whichever
    moves it less from the one ratio.

    Args:
        prepared: as it was asked for.
        ranking: of `budgets.ranking_of`.

    Raises:
        UserError: no ratio reaches it.
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
        found = Decisions(tried) if ranking is None else kept_units(model, tried, ranked(model, tried, ranking))
        return found.widths(model)

    def cost(found: Widths) -> int:
        return size_at(prepared, kind, found)

    most, budget = _largest_step(prepared), limit
    least = cost(widths(most))
    for _ in range(ROUNDS):
        if least > budget:
            raise UserError(unreachable(prepared, least) if budget == limit else taken_up(prepared))
        step = bisect_left(range(most), True, key=lambda tried: cost(widths(tried)) <= budget)
        reached = _Reached(at(step), widths(step), widths(step - 1) if step else None)
        if ranking is None and step:
            reached = _made_up(prepared, [at(step - 1), at(step)], kind, budget) or reached
        # What the container adds is known only where it is chosen: elsewhere no class might have the shape.
        whole = output_size(prepared, kind, reached.widths)
        if whole <= limit:
            larger = None if reached.larger is None else cost(reached.larger) + whole - cost(reached.widths)
            return replace(prepared, recipe=reached.recipe, unsized=recipe, larger=larger)
        budget = min(budget - 1, limit - (whole - cost(reached.widths)))
    raise UserError(taken_up(prepared))


def _made_up(prepared: Prepared, tried: list[Recipe], kind: SizeKind, budget: float) -> _Reached | None:
    """The recipe whose finest space moves least from its ratio to be just within the budget; None where none can."""
    space = _finest(prepared, kind)
    if space is None:
        return None
    found = [reached for recipe in tried if (reached := _filled(prepared, recipe, space, kind, budget))]
    return min(found, key=lambda reached: reached.moved, default=None)


def _filled(prepared: Prepared, recipe: Recipe, space: SpaceName, kind: SizeKind, budget: float) -> _Reached | None:
    """A recipe with one space as wide as the budget lets it be, the others as they are."""
    model = prepared.model
    given, pruned = Decisions(recipe).widths(model), recipe.blocks(model.blocks)
    base = given[max(pruned.start, model.spaced_blocks.start)]
    multiple = multiple_of(model, recipe, space)
    allowed = allowed_widths(model.units(space), multiple)
    alike = [
        name
        for name in recipe.spaces
        if recipe_space(name) == recipe_space(space) or model.share_width_key(name, space)
    ]

    def widths(width: int) -> Widths:
        own = dict.fromkeys(alike, width)
        return [{**kept, **own} if block in pruned and kept else kept for block, kept in enumerate(given)]

    fitting = bisect_right(allowed, budget, key=lambda width: size_at(prepared, kind, widths(width)))
    if not fitting:
        return None
    width = allowed[fitting - 1]
    larger = widths(allowed[fitting]) if fitting < len(allowed) else None
    if width != base[space]:
        ratio = ratio_for(model.units(space), width, rounding_of(model, recipe, space), multiple)
        for name in alike:
            recipe = recipe.with_own_ratio(name, ratio)
    return _Reached(recipe, widths(width), larger, abs(width - base[space]))


def _finest(prepared: Prepared, kind: SizeKind) -> SpaceName | None:
    """The space whose width can change in the smallest steps; None where no width can."""
    model, recipe = prepared.model, prepared.recipe
    steps = {
        space: cost * min(multiple_of(model, recipe, space), model.units(space))
        for space, cost in unit_costs(prepared, kind).items()
        if len(allowed_widths(model.units(space), multiple_of(model, recipe, space))) > 1
    }
    return min(steps, key=lambda space: steps[space], default=None)


def _largest_step(prepared: Prepared) -> int:
    """The largest ratio that leaves a unit of every space."""

    def empties(step: int) -> bool:
        tried = prepared.recipe.with_ratio(step / _RATIO_STEPS)
        try:
            return any(keep_count(prepared.model, tried, space) < 1 for space in tried.spaces)
        except UserError:
            return True

    return bisect_left(range(_RATIO_STEPS), True, key=empties) - 1


def check_reachable(prepared: Prepared) -> None:
    """Refuse a size that no widths reach, before anything is measured.

    Raises:
        UserError: with the least size there is.
    """
    recipe = prepared.recipe
    if recipe.size is None or recipe.allocation != "least-error" or recipe.changes_model:
        return  # what spaces can reach once blocks or dimensions are gone is looked at then
    if not is_reachable(prepared):
        raise UserError(unreachable(prepared, _least_size(prepared)))


def is_reachable(prepared: Prepared) -> bool:
    """Whether some widths of the spaces of a recipe with a size reach it."""
    return _least_size(prepared) <= limit_of(prepared)


def _least_size(prepared: Prepared) -> int:
    recipe, model = prepared.recipe, prepared.model
    assert recipe.size is not None
    smallest = {space: min(model.units(space), multiple_of(model, recipe, space)) for space in recipe.spaces}
    return size_at(prepared, recipe.size.kind, [smallest] * model.blocks)


def unreachable(prepared: Prepared, least: float) -> str:
    """What to say of a size below the least there is."""
    size = prepared.recipe.size
    assert size is not None
    dense = dense_size(prepared.whole, size.kind)
    parts = ["blocks"] if prepared.depth is not None else []
    parts += ["stream"] if prepared.hidden is not None else []
    what = " and ".join([*([", ".join(parts)] if parts else []), "spaces"])
    return (
        f"{size.words}: out of reach of recipe {prepared.recipe.name}, whose {what} leave "
        f"{size_words(size.kind, least)} at the least, of {size_words(size.kind, dense)}{size.share_meant}"
    )


def taken_up(prepared: Prepared) -> str:
    """What to say where a container's biases are more than what is saved."""
    assert prepared.recipe.size is not None
    return f"{prepared.recipe.size.words} cannot be met: the biases that the container needs take up what is saved"


def unit_costs(prepared: Prepared, kind: SizeKind) -> dict[SpaceName, float]:
    """What one unit of a space costs in one block: all sizes are linear in the widths of a block."""
    model = prepared.model
    units = {space: model.units(space) for space in prepared.recipe.spaces}
    found: dict[SpaceName, float] = {}
    whole = dense_size(prepared, kind)
    for space in units:
        first = next(name for name in units if recipe_space(name) == recipe_space(space))
        if first != space:
            found[space] = found[first]  # one expert is as large as the next
            continue
        if units[space] == 1:
            found[space] = 1.0  # it stays whatever it costs
            continue
        widths = [dict(units) for _ in range(model.blocks)]
        widths[model.spaced_blocks.start][space] -= 1
        found[space] = float(whole - size_at(prepared, kind, widths))
    return found


def crossed_spaces(prepared: Prepared, kind: SizeKind) -> list[Crossed]:
    """Which of a recipe's spaces cross, and what units of them have in common, in one block."""
    units = {space: prepared.model.units(space) for space in prepared.recipe.spaces}
    pairs = [pair for pair in COUPLED if all(units.get(space, 1) > 1 for space in pair)]
    found: list[Crossed] = []
    while pairs:
        linked = set(pairs[0])
        for _ in pairs:
            linked |= {space for pair in pairs if linked & set(pair) for space in pair}
        inside = [pair for pair in pairs if linked & set(pair)]
        pairs = [pair for pair in pairs if pair not in inside]
        found.append(Crossing(inside, _in_common(prepared, kind, [space for space in units if space in linked])))
    return found


def _in_common(prepared: Prepared, kind: SizeKind, spaces: Sequence[SpaceName]) -> dict[tuple[SpaceName, ...], float]:
    """Two spaces or more → what lies in one unit of each in one block, by inclusion and exclusion."""
    model = prepared.model
    units = {space: model.units(space) for space in prepared.recipe.spaces}
    whole = dense_size(prepared, kind)
    known: dict[tuple[SpaceName, ...], float] = {}
    for size in range(1, len(spaces) + 1):
        for own in combinations(spaces, size):
            widths = [dict(units) for _ in range(model.blocks)]
            for space in own:
                widths[model.spaced_blocks.start][space] -= 1
            gone = whole - size_at(prepared, kind, widths)
            parts = (part for less in range(1, size) for part in combinations(own, less))
            rest = gone - sum((-1) ** (len(part) + 1) * known[part] for part in parts)
            known[own] = (-1) ** (size + 1) * rest
    return {own: common for own, common in known.items() if len(own) > 1 and common}


def limit_of(prepared: Prepared) -> int:
    """The size to keep to, of the recipe's kind. A share is of the model with all its blocks."""
    size = prepared.recipe.size
    assert size is not None
    return size.of(dense_size(prepared.whole, size.kind))


def at_own_size(prepared: Prepared) -> Prepared:
    """The request with a size in place of a ratio: the parameters that one ratio leaves of all spaces."""
    recipe = prepared.recipe
    if recipe.size is not None:
        return prepared
    plain = replace(prepared, recipe=recipe.spaces_alone.at_one_ratio)
    left = size_at(plain, "params", Decisions(plain.recipe).widths(prepared.model))
    return replace(prepared, recipe=recipe.with_size(TargetSize.model_validate({"params": left})))


def dense_size(prepared: Prepared, kind: SizeKind) -> int:
    """The size of a request's own model before anything goes."""
    if kind == "latency":
        return _latencies(prepared).of(prepared.model.blocks)
    return cost_in(kind, cost_of(prepared.model))


def size_at(prepared: Prepared, kind: SizeKind, widths: Widths) -> int:
    """The size at some widths, before the container adds biases."""
    if kind == "latency":
        return _latencies(prepared).at(prepared.model.units, widths)
    return cost_in(kind, cost_of(prepared.model, prepared.model.shapes_at(widths)))


def output_size(prepared: Prepared, kind: SizeKind, widths: Widths) -> int:
    """The size of the output at some widths; biases take no time that a table of a machine could tell."""
    output = output_at(prepared, widths)
    return size_at(prepared, kind, widths) if kind == "latency" else cost_in(kind, output.cost)


def time_in_stream(prepared: Prepared, kept: int) -> int:
    """What a request's own model takes in a residual stream of so many dimensions, before anything else goes."""
    assert prepared.job.latencies is not None
    return prepared.job.latencies.narrowed(kept).of(prepared.model.blocks)


def _latencies(prepared: Prepared) -> Latencies:
    """The table of this machine at the width that a request's residual stream has."""
    assert prepared.job.latencies is not None
    if prepared.job.latencies.stream is None:
        return prepared.job.latencies
    sliced = prepared.basis if isinstance(prepared.basis, SlicedCheckpoint) else None
    return prepared.job.latencies.narrowed(prepared.model.dimension("hidden") if sliced is None else sliced.kept)
