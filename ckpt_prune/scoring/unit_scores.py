"""Scores of whole units that are no sum over the columns of an output projection: higher = keep. Pure functions.

Each takes the consumer's weight (d_out, d), the moments of its input (d,) and the number of adjacent columns that make
a unit. `centred` says whether the kept columns may get a bias, which makes up for every mean. `count` says how many
units will go, if that is all the scores are for: those of the others may be rough. Each returns (d / per_unit,)
float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_prune.scoring.scores import Score

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.measure.moments.inputs import Moments, Taylor


def obs(weight: Tensor, moments: Moments, per_unit: int, *, centred: bool, count: int | None = None) -> Tensor:
    """Error per token of dropping a unit and all cheaper ones, once the others are refitted (`scoring.obs`).

    Sorted they are the cost curve J(k).
    """
    from ckpt_prune.scoring.obs import remove_greedily

    if moments.gram is None:
        raise ValueError("score obs needs second moments: collect statistics with a Gram")
    gram = centre_gram(moments.gram, moments) if centred else moments.gram
    return remove_greedily(weight, gram, per_unit, count=count).scores / moments.count


def centre_gram(gram: Tensor, moments: Moments) -> Tensor:
    """Σ (x − μ)(x − μ)ᵀ from a Gram Σ x xᵀ, (d, d) float64: the Gram that counts if a bias makes up for every mean."""
    return gram.double().addr(moments.mean, moments.mean, alpha=-moments.count)


def taylor1(weight: Tensor, moments: Moments, per_unit: int, *, centred: bool, count: int | None = None) -> Tensor:
    """Σ |g w| over a unit's weights, LLM-Pruner's first order, as the statistics hold it."""
    return _taylor(moments).first


def taylor2(weight: Tensor, moments: Moments, per_unit: int, *, centred: bool, count: int | None = None) -> Tensor:
    """Σ |g w − ½ Σ_s (g_s w)²|, LLM-Pruner's second order, as the statistics hold it."""
    return _taylor(moments).second


def _taylor(moments: Moments) -> Taylor:
    if moments.taylor is None:
        raise ValueError("scores taylor1 and taylor2 need gradients of the loss: collect statistics with taylor")
    return moments.taylor


UNIT_SCORES: dict[str, Score] = {
    "obs": Score(obs, needs_gram=True),
    "taylor1": Score(taylor1, needs_taylor=True),
    "taylor2": Score(taylor2, needs_taylor=True),
}
