"""Scores of whole units that are no sum over the columns of an output projection: higher = keep. Pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.measure.moments.inputs import Moments, Taylor
from ckpt_prune.scoring.obs import remove_greedily


def obs(weight: Tensor, moments: Moments, per_unit: int, *, centred: bool) -> Tensor:
    """Error of dropping a unit and all cheaper ones, once the others are refitted (`scoring.obs`).

    Args:
        weight: of the consumer, (d_out, d), any floating dtype.
        moments: of its input (d,), with a Gram, on the same device.
        per_unit: adjacent columns that make a unit.
        centred: whether the kept columns may get a bias, which makes up for every mean.

    Returns:
        (d / per_unit,) float64, per token. Sorted they are the cost curve J(k).

    Raises:
        ValueError: `moments` has no Gram.
    """
    if moments.gram is None:
        raise ValueError("score obs needs second moments: collect statistics with a Gram")
    gram = moments.gram
    if centred:
        gram = centre_gram(gram, moments)
    return remove_greedily(weight, gram, per_unit).scores / moments.count


def centre_gram(gram: Tensor, moments: Moments) -> Tensor:
    """Σ (x − μ)(x − μ)ᵀ of a Gram Σ x xᵀ, (d, d) float64: what is left where a bias makes up for every mean."""
    return torch.addr(gram.double(), moments.mean, moments.mean, alpha=-moments.count)


def taylor1(weight: Tensor, moments: Moments, per_unit: int, *, centred: bool) -> Tensor:
    """Σ |g w| over a unit's weights, LLM-Pruner's first order; (units,) float64. All was measured before."""
    return _taylor(moments).first


def taylor2(weight: Tensor, moments: Moments, per_unit: int, *, centred: bool) -> Tensor:
    """Σ |g w − ½ Σ_s (g_s w)²|, LLM-Pruner's second order; (units,) float64. All was measured before."""
    return _taylor(moments).second


def _taylor(moments: Moments) -> Taylor:
    if moments.taylor is None:
        raise ValueError("scores taylor1 and taylor2 need gradients of the loss: collect statistics with taylor")
    return moments.taylor


@dataclass(frozen=True)
class Score:
    """The function of a score, and the statistics that it needs."""

    function: Callable[..., Tensor]
    needs_moments: bool = True
    needs_gram: bool = True
    needs_taylor: bool = False


UNIT_SCORES: dict[str, Score] = {
    "obs": Score(obs),
    "taylor1": Score(taylor1, needs_gram=False, needs_taylor=True),
    "taylor2": Score(taylor2, needs_gram=False, needs_taylor=True),
}
"""Scores by name. Each takes the arguments of `obs`."""
