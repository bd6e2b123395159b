"""The kinds of moments, and names that recipes, statistics and the engine share."""

from collections.abc import Mapping
from typing import Any, TypeVar

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.routing import RoutingMoments
from ckpt_prune.measure.statistics.files import Collect as Collect
from ckpt_prune.parallel.group import Group

SpaceMoments = tuple[Moments, ...] | tuple[LogitMoments, ...] | tuple[RotaryMoments, ...] | tuple[RoutingMoments, ...]
"""Moments of one space, one for each fold: of the consumer's input, of queries and keys, of rotary pairs, or of a
router's choices."""

Key = TypeVar("Key", bound=str)
"""Names what is measured in a block: a space, or a linear module for the moments of its input."""


def select_input_moments(folds: SpaceMoments | None) -> tuple[Moments, ...]:
    """Return the moments of an input, one for each fold; an empty tuple for other kinds of moments."""
    return tuple(moments for moments in folds or () if isinstance(moments, Moments))


def pool_moments(group: Group, moments: Mapping[Key, SpaceMoments]) -> dict[Key, SpaceMoments]:
    """Pool the moments of all processes at the first one, all of which observed the same of their own samples.

    Sums are taken in float64 in the order of processes, and Grams of single samples are put one behind the other. The
    other processes get what they gave.
    """
    if group.size == 1:
        return dict(moments)
    pooled: dict[Key, Any] = {key: tuple(fold.pool(group) for fold in folds) for key, folds in moments.items()}
    return pooled
