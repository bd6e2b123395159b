"""What can be collected, and what one space's moments are: names that recipes, statistics and the engine share."""

from typing import Literal, TypeVar

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.moments.logits import LogitMoments
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.measure.moments.routing import RoutingMoments

Collect = Literal["moments", "gram", "logits", "centred", "rotary", "linears", "fisher", "taylor"]
"""Vectors and Grams of consumers' inputs; moments of queries and keys, and with keys less their mean over each sample;
moments of rotary pairs; those of consumers' inputs for every other linear's; the Fisher metric at the outputs of
consumers and of queries; Taylor importances of units, by gradients of the loss."""

SpaceMoments = tuple[Moments, ...] | tuple[LogitMoments, ...] | tuple[RotaryMoments, ...] | tuple[RoutingMoments, ...]
"""Moments of one space, one for each fold: of the consumer's input, of queries and keys, of rotary pairs, or of a
router's choices."""

Key = TypeVar("Key", bound=str)
"""Names what is measured in a block: a space, or a linear module for the moments of its input."""


def select_input_moments(folds: SpaceMoments | None) -> tuple[Moments, ...]:
    """Moments of an input, one for each fold; nothing of what is measured otherwise."""
    return tuple(each for each in folds or () if isinstance(each, Moments))
