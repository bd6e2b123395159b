"""How many dimensions of the residual stream stay, what stands in for its bases, and what cannot be sliced."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpt_prune.architectures.family import DATA_OPTIONS
from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.errors import UserError
from ckpt_prune.planning.hidden_recipe import HiddenRecipe
from ckpt_prune.planning.records import Cost, Hidden
from ckpt_prune.planning.sizes import cost_in, size_words
from ckpt_prune.rotations.absorbing import residual_of
from ckpt_prune.rotations.sliced import Bases, SlicedCheckpoint, check_sliceable, not_measured
from ckpt_prune.transform.narrow_stock import embedding_scale, narrow_container, narrow_model
from ckpt_prune.transform.output import sliced_output
from ckpt_prune.transform.request import Narrowed, Request
from ckpt_prune.transform.shortening import shortest
from ckpt_prune.transform.sizing import at_own_size, check_reachable, dense_size, limit_of, time_in_stream


def hidden_of(request: Request) -> HiddenRecipe:
    """What the recipe says of the residual stream."""
    assert request.recipe.hidden is not None
    return request.recipe.hidden


def wanted_width(request: Request) -> int:
    """How many dimensions of the stream are to stay; all, where that is still to be measured.

    Raises:
        UserError: none would, or more are to go than there are, or the size is out of reach.
    """
    model, recipe, hidden = request.model, request.recipe, hidden_of(request)
    width, step = model.dimension("hidden"), hidden.multiple_of
    least = least_width(request)
    if hidden.drop == "auto":
        return width
    if recipe.size is not None and not recipe.spaces:
        return _width_for_size(request, least)
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


def possible_widths(request: Request) -> list[int]:
    """Numbers of dimensions that may stay where spaces meet the rest of a size, descending: from all of them on.

    The last one meets the size by itself, or is the least that a model can have.
    """
    width, step, least = request.model.dimension("hidden"), hidden_of(request).multiple_of, least_width(request)
    try:
        last = _width_for_size(request, least)
    except UserError:
        last = least
    return [width, *range((width - 1) // step * step, last - 1, -step)]


def open_widths(request: Request) -> list[int]:
    """Numbers of dimensions that may stay, descending: those that are measured, or the one that the recipe says."""
    return possible_widths(request) if hidden_of(request).auto else [wanted_width(request)]


def least_width(request: Request) -> int:
    """The fewest dimensions that a model can have."""
    step = hidden_of(request).multiple_of
    least = 2 if hidden_of(request).kind == "shared" and _centred(request.model) else 1
    return -(-least // step) * step


def _centred(model: Model) -> bool:
    return residual_of(model.family).norm == "layer"


def _width_for_size(request: Request, least: int) -> int:
    """The most dimensions with which a model is within the recipe's size."""
    model, size, step = request.model, request.recipe.size, hidden_of(request).multiple_of
    assert size is not None
    dense, width = dense_size(request, size.kind), model.dimension("hidden")
    limit = limit_of(request)

    def reached(kept: int) -> int:
        if size.kind == "latency":
            return time_in_stream(request, kept)
        return cost_in(size.kind, _cost(request, kept))

    if dense <= limit:
        return width
    low, high = least // step, (width - 1) // step
    if low > high or reached(low * step) > limit:
        raise UserError(
            f"{size.words}: out of reach of recipe {request.recipe.name}, which leaves "
            f"{size_words(size.kind, reached(max(low, 1) * step) if low <= high else dense)} at the least, of "
            f"{size_words(size.kind, dense)}{size.share_meant}"
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reached(middle * step) <= limit else (low, middle - 1)
    return low * step


def _cost(request: Request, kept: int) -> Cost:
    """What the output of some width costs.

    Raises:
        UserError: no container can hold it.
    """
    model = request.model
    widths = [{space: model.units(space) for space in model.family.spaces}] * model.blocks
    return sliced_output(model, view_of(request, kept), widths).cost


def check_hidden(request: Request) -> None:
    """Refuse to slice a residual stream where that cannot be, before anything is measured.

    Raises:
        UserError: with the first thing that does not fit.
    """
    model, recipe, hidden = request.model, request.recipe, hidden_of(request)
    if model.checkpoint.within is not None:
        raise UserError(
            f"recipe {recipe.name} slices the residual stream, and what feeds that of --part "
            f"{model.checkpoint.within.part} from elsewhere does not follow: choose a recipe with spaces"
        )
    check_sliceable(model, hidden.kind)
    if hidden.tied is not None and not model.tied:
        raise UserError(f"recipe {recipe.name} says hidden.tied, and the head of this model is not its embedding")
    if hidden.tied == "keep" and _centred(model):
        raise UserError(
            f"recipe {recipe.name} says hidden.tied: keep, and the mean that a LayerNorm subtracts leaves no basis in "
            "which embedding and head are one table: leave it out"
        )
    if request.statistics is not None:
        _check_statistics(request, request.statistics)
    # What can be reached is asked once as many blocks are gone as may go.
    left = request if recipe.depth is None or request.plan is not None else shortest(request)
    if recipe.spaces:
        _check_joint(left)
        return
    kept = wanted_width(left)
    if recipe.size is None or kept < model.dimension("hidden"):
        _cost(left, kept)


def _check_statistics(request: Request, statistics: Statistics) -> None:
    """Refuse statistics that do not tell the bases of a recipe."""
    recipe = request.recipe
    if not recipe.basis_from_statistics:
        data = DATA_OPTIONS[request.model.family.modality]
        raise UserError(f"recipe {recipe.name} measures the stream itself: give {data} in place of --statistics")
    lacking = [kind for kind in recipe.collect if kind not in statistics.index.collect]
    if lacking:
        raise UserError(
            f"recipe {recipe.name} needs Grams of what the blocks' norms give, and {statistics.folder} has no "
            f"{' and no '.join(lacking)}: calibrate with --collect {','.join(recipe.collect)}"
        )


def _check_joint(request: Request) -> None:
    """Refuse a narrower stream beside spaces that no class has, or that leaves more than the size."""
    own = at_own_size(request) if hidden_of(request).auto else request
    widths = open_widths(own)
    if len(widths) > 1:
        _cost(own, widths[1])
    check_reachable(jointly_narrowed(own, hidden_record(own, widths[-1])))


def unmeasured(request: Request) -> Request:
    """The request as it goes on once the stream is sliced, its bases not yet known."""
    return narrowed(request, not_measured, [])


def narrowed(request: Request, bases: Bases, energy: Sequence[float]) -> Request:
    """The request for what is left to do once the stream is sliced: nothing, where it is within its size as it is.

    Args:
        request: the whole one.
        bases: of every block.
        energy: of their signals that they keep.
    """
    kept, width = wanted_width(request), request.model.dimension("hidden")
    record = hidden_record(request, kept, energy)
    if request.recipe.spaces:
        return jointly_narrowed(request, record, None if kept == width else view_of(request, kept, bases))
    whole = request.recipe.size is not None and kept == width
    view = None if whole else view_of(request, kept, bases)
    return replace(request, recipe=request.recipe.after_hidden, narrowed=Narrowed(request, record, view))


def jointly_narrowed(request: Request, record: Hidden, view: SlicedCheckpoint | None = None) -> Request:
    """The request for what is left to do to spaces once the stream has lost dimensions.

    Args:
        request: the whole one.
        record: of the stream.
        view: the model in the basis that was measured; by default names and shapes alone.
    """
    own = at_own_size(request) if hidden_of(request).auto else request
    model, into, note = request.model, None, None
    if record.kept < record.dimensions:
        into = view or view_of(request, record.kept)
        model, note = narrow_model(into)
    whole = Narrowed(request, record, None, into, note)
    return replace(request, model=model, recipe=own.recipe.after_hidden, statistics=None, narrowed=whole)


def hidden_record(request: Request, kept: int, energy: Sequence[float] = ()) -> Hidden:
    """What is left of a stream of which so many dimensions stay.

    Args:
        request: the whole one.
        kept: how many.
        energy: of their signals that they keep, basis by basis.
    """
    hidden, model = hidden_of(request), request.model
    width = model.dimension("hidden")
    as_it_is = kept == width and (request.recipe.size is not None or bool(request.recipe.spaces))
    tied = hidden.kind == "shared" and model.tied and not as_it_is
    return Hidden(
        kind=hidden.kind,
        signal=hidden.signal,
        dimensions=width,
        kept=kept,
        tied=not _untied(request) if tied else None,
        energy=list(energy),
    )


def _untied(request: Request) -> bool:
    """Whether a head that is the embedding gets a table of its own."""
    hidden = hidden_of(request)
    return hidden.tied == "untie" or (hidden.tied is None and _centred(request.model))


def half_stream(request: Request) -> tuple[int, Callable[[Model], Model]]:
    """About half the dimensions, and a model with all of them → with so many; for names and shapes alone.

    Args:
        request: the whole one, of a recipe with one basis for all blocks.

    Raises:
        UserError: no stock class has such a stream.
    """
    check_sliceable(request.model, hidden_of(request).kind)
    step = hidden_of(request).multiple_of
    kept = max(least_width(request), request.model.dimension("hidden") // 2 // step * step)

    return kept, lambda model: narrow_model(view_of(replace(request, model=model), kept))[0]


def view_of(request: Request, kept: int, bases: Bases = not_measured) -> SlicedCheckpoint:
    """The model in bases of so many dimensions.

    Args:
        request: the whole one.
        kept: how many.
        bases: of every block.
    """
    model, hidden = request.model, hidden_of(request)
    view = SlicedCheckpoint(model, hidden.kind, kept, bases, untied=_untied(request), device=request.device)
    if not view.shared:
        return view
    container, _ = narrow_container(view)
    return replace(view, embedding_scale=embedding_scale(model, container))
