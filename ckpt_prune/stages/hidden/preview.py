"""How many dimensions of the residual stream stay, placeholders for its bases, and what cannot be sliced."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.cost_record import Cost
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.sizes import cost_in
from ckpt_prune.stages.depth.preview import shortest
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.hidden.narrow_stock import embedding_scale, narrow_container, narrow_model
from ckpt_prune.stages.hidden.records import HiddenRecord
from ckpt_prune.stages.hidden.sliced_checkpoint import Bases, SlicedCheckpoint, check_sliceable, not_measured
from ckpt_prune.stages.rotation.absorbing import residual_of
from ckpt_prune.stages.shared.narrowed import Narrowed
from ckpt_prune.stages.shared.output import sliced_output
from ckpt_prune.stages.spaces.size_search import (
    at_own_size,
    check_reachable,
    dense_size,
    fewest_reachable,
    limit_of,
    out_of_reach,
    time_in_stream,
)


def _left_to_do(recipe: Recipe) -> Recipe:
    """Return the recipe without this stage. A size stays if spaces have to meet it."""
    remaining = recipe.without_stages(Hidden.key)
    return remaining if recipe.spaces else remaining.model_copy(update={"size": None, "target": "dense"})


def wanted_width(prepared: Prepared) -> int:
    """Return how many dimensions of the stream are to stay; all if that is still to be measured."""
    model, recipe, hidden = prepared.model, prepared.recipe, prepared.stage(Hidden)
    width, step = model.dimension("hidden"), hidden.multiple_of
    least = least_width(prepared)
    if hidden.drop == "auto":
        return width
    if recipe.size is not None and not recipe.spaces:
        return _width_for_size(prepared, least)
    if hidden.drop is not None and hidden.drop >= width:
        raise UserError(f"recipe {recipe.name} drops {hidden.drop} of {width} dimensions of the residual stream")
    # The share that stays in whole numbers: (1 − 0.3) · 640 is 448, whatever floating point says.
    stay = width - hidden.drop if hidden.drop is not None else round((1 - recipe.ratio) * width, 6)
    kept = width if stay == width else int(stay // step) * step
    if kept < least:
        raise UserError(
            f"recipe {recipe.name} leaves {kept} of {width} dimensions of the residual stream, in multiples of {step}: "
            f"at least {least} have to stay"
        )
    return kept


def possible_widths(prepared: Prepared) -> list[int]:
    """Return the numbers of dimensions that may stay if spaces meet the rest of a size, descending from all of them.

    The last one meets the size by itself, or is the least that a model can have.
    """
    width, step, least = prepared.model.dimension("hidden"), prepared.stage(Hidden).multiple_of, least_width(prepared)
    try:
        last = _width_for_size(prepared, least)
    except UserError:
        last = least
    return [width, *range((width - 1) // step * step, last - 1, -step)]


def least_width(prepared: Prepared) -> int:
    """Return the fewest dimensions that a model can have."""
    step = prepared.stage(Hidden).multiple_of
    least = 2 if prepared.stage(Hidden).kind == "shared" and _is_centred(prepared.model) else 1
    return -(-least // step) * step


def _is_centred(model: Model) -> bool:
    return residual_of(model.family).norm == "layer"


def _width_for_size(prepared: Prepared, least: int) -> int:
    """Return the most dimensions with which a model is within the recipe's size."""
    model, size, step = prepared.model, prepared.recipe.size, prepared.stage(Hidden).multiple_of
    assert size is not None
    dense, width = dense_size(prepared, size.kind), model.dimension("hidden")
    limit = limit_of(prepared)

    def size_at(kept: int) -> int:
        if size.kind == "latency":
            return time_in_stream(prepared, kept)
        return cost_in(size.kind, _cost(prepared, kept))

    if dense <= limit:
        return width
    low, high = least // step, (width - 1) // step
    if low > high or size_at(low * step) > limit:
        reached = size_at(max(low, 1) * step) if low <= high else dense
        raise UserError(out_of_reach(prepared, "which leaves", reached))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size_at(middle * step) <= limit else (low, middle - 1)
    return low * step


def _cost(prepared: Prepared, kept: int) -> Cost:
    model = prepared.model
    return sliced_output(model, view_of(prepared, kept), model.dense_widths).cost


def check_hidden(prepared: Prepared) -> None:
    """Refuse a residual stream that cannot be sliced, before anything is measured."""
    model, recipe, hidden = prepared.model, prepared.recipe, prepared.stage(Hidden)
    if model.checkpoint.within is not None:
        raise UserError(
            f"recipe {recipe.name} slices the residual stream, and what feeds that of --part "
            f"{model.checkpoint.within.part} from elsewhere does not follow: choose a recipe with spaces"
        )
    check_sliceable(model, hidden.kind)
    if hidden.tied is not None and not model.tied:
        raise UserError(f"recipe {recipe.name} says hidden.tied, and the head of this model is not its embedding")
    if hidden.tied == "keep" and _is_centred(model):
        raise UserError(
            f"recipe {recipe.name} says hidden.tied: keep, and the mean that a LayerNorm subtracts leaves no basis in "
            "which embedding and head are one table: leave it out"
        )
    if prepared.statistics is not None:
        _check_statistics(prepared, prepared.statistics)
    # What can be reached is asked once as many blocks are gone as may go.
    shortened = prepared if not recipe.has("depth") or prepared.plan is not None else shortest(prepared)
    if recipe.spaces:
        _check_joint(shortened)
        return
    kept = wanted_width(shortened)
    if recipe.size is None or kept < model.dimension("hidden"):
        _cost(shortened, kept)


def _check_statistics(prepared: Prepared, statistics: Statistics) -> None:
    """Refuse statistics from which the bases cannot be computed."""
    recipe = prepared.recipe
    if not prepared.stage(Hidden).basis_from_statistics(recipe):
        data = DATA_OPTIONS[prepared.model.family.modality]
        raise UserError(f"recipe {recipe.name} measures the stream itself: give {data} in place of --statistics")
    lacking = [kind for kind in recipe.collect if kind not in statistics.index.collect]
    if lacking:
        raise UserError(
            f"recipe {recipe.name} needs Grams of what the blocks' norms give, and {statistics.folder} has no "
            f"{' and no '.join(lacking)}: calibrate with --collect {','.join(recipe.collect)}"
        )


def _check_joint(prepared: Prepared) -> None:
    """Refuse a narrower stream beside spaces that no class has, or that leaves more than the size."""
    at_size = at_own_size(prepared) if prepared.stage(Hidden).auto else prepared
    widths = possible_widths(at_size) if prepared.stage(Hidden).auto else [wanted_width(at_size)]
    if len(widths) > 1:
        _cost(at_size, widths[1])
    check_reachable(narrow_jointly(at_size, hidden_record(at_size, widths[-1])))


def narrow_unmeasured(prepared: Prepared) -> Prepared:
    """Return the state with as many dimensions as will stay, in a basis that is not measured yet.

    If measuring also decides how many, all stay, or as few go as let spaces meet the size.
    """
    if not prepared.stage(Hidden).auto:
        return slice_unmeasured(prepared)
    widths = possible_widths(at_own_size(prepared))

    def at_width(step: int) -> Prepared:
        return narrow_jointly(prepared, hidden_record(prepared, widths[step]))

    return replace(at_width(fewest_reachable(len(widths) - 1, at_width)), foreseen=True, shape_known=False)


def slice_unmeasured(prepared: Prepared) -> Prepared:
    """Return the state once the stream is sliced, its bases not yet known."""
    return slice_stream(prepared, not_measured, [])


def slice_stream(prepared: Prepared, bases: Bases, energy: Sequence[float]) -> Prepared:
    """Return the state once the stream is sliced: as it is, if the model is within its size already.

    Args:
        energy: share of the energy of their signals that they keep.
    """
    kept, width = wanted_width(prepared), prepared.model.dimension("hidden")
    record = hidden_record(prepared, kept, energy)
    if prepared.recipe.spaces:
        return narrow_jointly(prepared, record, None if kept == width else view_of(prepared, kept, bases))
    sliced = replace(prepared, start=prepared.whole, recipe=_left_to_do(prepared.recipe)).knowing(record)
    if prepared.recipe.size is not None and kept == width:
        return sliced
    return replace(sliced, basis=view_of(prepared, kept, bases))


def narrow_jointly(prepared: Prepared, record: HiddenRecord, view: SlicedCheckpoint | None = None) -> Prepared:
    """Return the state once the stream has lost dimensions, for spaces that then lose units.

    Args:
        view: the model in the basis that was measured; by default names and shapes alone.
    """
    at_size = at_own_size(prepared) if prepared.stage(Hidden).auto else prepared
    remaining = replace(prepared, start=prepared.whole, recipe=_left_to_do(at_size.recipe), statistics=None)
    narrowed = remaining.knowing(record)
    if record.kept == record.dimensions:
        return narrowed
    sliced = view or view_of(prepared, record.kept)
    model, note = narrow_model(sliced)
    return replace(narrowed, model=model).knowing(Narrowed(prepared.model, sliced.project, note))


def hidden_record(prepared: Prepared, kept: int, energy: Sequence[float] = ()) -> HiddenRecord:
    """Return the record of a stream of which so many dimensions stay.

    Args:
        energy: of their signals that they keep, basis by basis.
    """
    hidden, model = prepared.stage(Hidden), prepared.model
    width = model.dimension("hidden")
    as_it_is = kept == width and (prepared.recipe.size is not None or bool(prepared.recipe.spaces))
    tied = hidden.kind == "shared" and model.tied and not as_it_is
    return HiddenRecord(
        kind=hidden.kind,
        signal=hidden.signal,
        dimensions=width,
        kept=kept,
        tied=not _is_untied(prepared) if tied else None,
        energy=list(energy),
    )


def _is_untied(prepared: Prepared) -> bool:
    """Return whether a head that is the embedding gets a table of its own."""
    hidden = prepared.stage(Hidden)
    return hidden.tied == "untie" or (hidden.tied is None and _is_centred(prepared.model))


def half_stream(prepared: Prepared) -> tuple[int, Callable[[Model], Model]]:
    """Return about half the dimensions, and a function that narrows a model to them (names and shapes only).

    Args:
        prepared: the whole one, of a recipe with one basis for all blocks.
    """
    check_sliceable(prepared.model, prepared.stage(Hidden).kind)
    step = prepared.stage(Hidden).multiple_of
    kept = max(least_width(prepared), prepared.model.dimension("hidden") // 2 // step * step)

    return kept, lambda model: narrow_model(view_of(replace(prepared, model=model), kept))[0]


def view_of(prepared: Prepared, kept: int, bases: Bases = not_measured) -> SlicedCheckpoint:
    """Return the model in bases of so many dimensions."""
    model, hidden = prepared.model, prepared.stage(Hidden)
    view = SlicedCheckpoint(model, hidden.kind, kept, bases, untied=_is_untied(prepared), device=prepared.device)
    if not view.shared:
        return view
    container, _ = narrow_container(view)
    return replace(view, embedding_scale=embedding_scale(model, container))
