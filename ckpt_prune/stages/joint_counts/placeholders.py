"""Placeholders for blocks and dimensions that measuring will choose, for dry runs."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.stages.depth.preview import at_depth, depth_of, last_blocks, wanted_depth
from ckpt_prune.stages.hidden.preview import hidden_of, hidden_record, narrow_jointly, open_widths, slice_unmeasured
from ckpt_prune.stages.spaces.size_search import at_own_size, is_reachable


def drop_any_blocks(prepared: Prepared) -> Prepared:
    """Drop as many blocks as will go: the last ones, in place of those that measuring will choose.

    If measuring also decides how many, drop none, or as few as let spaces and the residual stream meet the size.
    """
    if prepared.plan is not None and prepared.plan.depth is not None:
        return at_depth(prepared, prepared.plan.depth)
    depth, most, sliced = depth_of(prepared), wanted_depth(prepared).count, prepared.recipe.has("hidden")

    def is_enough(count: int) -> bool:
        shortened = last_blocks(prepared, count)
        return is_reachable(_at_width(shortened, open_widths(at_own_size(shortened))[-1]) if sliced else shortened)

    shortened = last_blocks(prepared, _first(most, is_enough) if depth.auto else most)
    return replace(shortened, foreseen=shortened.foreseen or prepared.recipe.joint or depth.choice is not None)


def narrow_unmeasured(prepared: Prepared) -> Prepared:
    """Narrow the stream to as many dimensions as will stay, in a basis that is not measured.

    If measuring also decides how many, keep all, or drop as few as let spaces meet the size.
    """
    if not hidden_of(prepared).auto:
        return slice_unmeasured(prepared)
    widths = open_widths(at_own_size(prepared))

    def is_enough(step: int) -> bool:
        return is_reachable(_at_width(prepared, widths[step]))

    narrowed = _at_width(prepared, widths[_first(len(widths) - 1, is_enough)])
    return replace(narrowed, foreseen=True, shape_known=False)


def _at_width(prepared: Prepared, kept: int) -> Prepared:
    return narrow_jointly(prepared, hidden_record(prepared, kept))


def _first(most: int, is_enough: Callable[[int], bool]) -> int:
    """Return the least number that is enough, or `most`. All numbers above one that is enough are enough."""
    return 0 if is_enough(0) else bisect_left(range(most), True, key=is_enough)
