"""Moments of the samples of several processes, put together."""

from collections.abc import Mapping
from typing import Any

from ckpt_prune.measure.moments.kinds import Key, SpaceMoments
from ckpt_prune.parallel.group import Group


def pooled(group: Group, found: Mapping[Key, SpaceMoments]) -> dict[Key, SpaceMoments]:
    """Moments of the samples of all processes at the first one; the others get what they gave.

    Sums are taken in float64 in the order of processes, and Grams of single samples are put one behind the other.

    Args:
        group: the processes, all of which observed the same of their own samples.
        found: of this process's samples, one for each fold.
    """
    if group.size == 1:
        return dict(found)
    complete: dict[Key, Any] = {key: tuple(each.pooled(group) for each in folds) for key, folds in found.items()}
    return complete
