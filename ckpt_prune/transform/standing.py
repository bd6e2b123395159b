"""What stands in for blocks and dimensions that are chosen by measuring, for what is told before that."""

from bisect import bisect_left
from collections.abc import Callable

from ckpt_prune.transform.narrowing import hidden_of, hidden_record, jointly_narrowed, open_widths, unmeasured
from ckpt_prune.transform.request import Request
from ckpt_prune.transform.shortening import at_depth, depth_of, last_blocks, wanted_depth
from ckpt_prune.transform.sizing import at_own_size, is_reachable


def standing_in(request: Request) -> Request:
    """The request as it goes on once blocks and dimensions are gone.

    Blocks that are chosen by measuring are the last ones in their place. Where how many go is measured too, none do:
    what spaces lose makes up the size. Where spaces cannot, as few dimensions go as let them, and as few blocks as let
    both.

    Args:
        request: of a recipe with `depth`, `hidden` or both.
    """
    recipe = request.recipe
    if recipe.depth is None:
        return _narrowed(request)
    if request.plan is not None and request.plan.depth is not None:
        return at_depth(request, request.plan.depth)
    most = wanted_depth(request).count
    if not depth_of(request).auto:
        return _narrowed(last_blocks(request, most))

    def enough(count: int) -> bool:
        left = last_blocks(request, count)
        return is_reachable(left if recipe.hidden is None else _at_width(left, open_widths(at_own_size(left))[-1]))

    return _narrowed(last_blocks(request, _first(most, enough)))


def _narrowed(request: Request) -> Request:
    """The request once dimensions are gone; as it is where none are to go."""
    if request.recipe.hidden is None:
        return request
    if not hidden_of(request).auto:
        return unmeasured(request)
    widths = open_widths(at_own_size(request))
    return _at_width(
        request, widths[_first(len(widths) - 1, lambda step: is_reachable(_at_width(request, widths[step])))]
    )


def _at_width(request: Request, kept: int) -> Request:
    return jointly_narrowed(request, hidden_record(request, kept))


def _first(most: int, enough: Callable[[int], bool]) -> int:
    """The least number from 0 that is enough, or `most`; all above one that is are."""
    return 0 if enough(0) else bisect_left(range(most), True, key=enough)
