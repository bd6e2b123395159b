"""What can be collected, and what one space's moments are: names that recipes, statistics and the engine share."""

from typing import Literal

from ckpt_prune.calibration.logits import LogitMoments
from ckpt_prune.calibration.moments import Moments

Collect = Literal["moments", "gram", "logits"]
"""Vectors and Grams of consumers' inputs; moments of queries and keys."""

SpaceMoments = tuple[Moments, ...] | tuple[LogitMoments, ...]
"""Moments of one space, one for each fold: of the consumer's input, or of queries and keys."""
