"""Scores of input columns of an output projection: higher = keep (scoring/README.md, section 1). Pure functions.

Each takes the consumer's weight (d_out, d_in) and the moments of its input (width d_in) and returns (d_in,) float64.
Scores are listed without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.measure.moments.inputs import Moments


def column_norms(weight: Tensor) -> Tensor:
    """Return ‖W_:j‖₂, (d_in,) float64, summed in row chunks so that no float64 copy of the whole weight is made."""
    squares = weight.new_zeros(weight.shape[1]).double()
    for rows in weight.split(1024):  # type: ignore[no-untyped-call]
        squares += rows.double().square().sum(0)
    return squares.sqrt()


def magnitude(weight: Tensor, moments: Moments | None) -> Tensor:
    """‖W_:j‖₂. It needs no moments."""
    return column_norms(weight)


def activation_energy(weight: Tensor, moments: Moments) -> Tensor:
    """E[x_j²]."""
    return moments.energy


def active_probability(weight: Tensor, moments: Moments) -> Tensor:
    """P(|x_j| > ε), ε being `ACTIVE_THRESHOLD`."""
    return moments.active / moments.count


def variance(weight: Tensor, moments: Moments) -> Tensor:
    """Var(x_j), the score of VBP."""
    return moments.variance


def wanda_sp(weight: Tensor, moments: Moments) -> Tensor:
    """‖W_:j‖₂ ‖X_j‖₂, the score of Wanda-sp, the structured form of Wanda in the FLAP paper."""
    return column_norms(weight) * moments.square.sqrt()


def wanda_sp_code(weight: Tensor, moments: Moments) -> Tensor:
    """mean_i |W_ij| ‖X_j‖₂, which the code released with FLAP computes for Wanda-sp."""
    sums = weight.new_zeros(weight.shape[1]).double()
    for rows in weight.split(1024):  # type: ignore[no-untyped-call]
        sums += rows.double().abs().sum(0)
    return sums / len(weight) * moments.square.sqrt()


def rcpu(weight: Tensor, moments: Moments) -> Tensor:
    """‖W_:j‖ ‖X_j‖ Var(x_j) (RCPU eq. 10)."""
    return wanda_sp(weight, moments) * moments.variance


def rcpu_code(weight: Tensor, moments: Moments) -> Tensor:
    """‖W_:j‖ E|x_j| Var(x_j), which RCPU's released code computes in place of eq. 10."""
    return column_norms(weight) * (moments.absolute / moments.count) * moments.variance


def flap(weight: Tensor, moments: Moments) -> Tensor:
    """Var(x_j) ‖W_:j‖², FLAP's WIFV."""
    return moments.variance * column_norms(weight).square()


def flap_squared(weight: Tensor, moments: Moments) -> Tensor:
    """(Var(x_j) ‖W_:j‖²)²: FLAP's released code squares the metric of attention before heads add up their columns."""
    return flap(weight, moments).square()


def corp(weight: Tensor, moments: Moments) -> Tensor:
    """E[x_j²] ‖W_:j‖₂, CORP's combined score."""
    return moments.energy * column_norms(weight)


@dataclass(frozen=True)
class Score:
    """A score and the statistics that it needs.

    Attributes:
        function: takes what the docstring of its module says, and returns the scores.
        needs_taylor: whether statistics must hold gradients of the loss.
    """

    function: Callable[..., Tensor]
    needs_moments: bool = True
    needs_gram: bool = False
    needs_taylor: bool = False


SCORES: dict[str, Score] = {
    "magnitude": Score(magnitude, needs_moments=False),
    "activation-energy": Score(activation_energy),
    "active-probability": Score(active_probability),
    "variance": Score(variance),
    "wanda-sp": Score(wanda_sp),
    "wanda-sp-code": Score(wanda_sp_code),
    "rcpu": Score(rcpu),
    "rcpu-code": Score(rcpu_code),
    "flap": Score(flap),
    "flap-squared": Score(flap_squared),
    "corp": Score(corp),
}
