"""Linear map that makes up for blocks that are gone, from moments (compensation/README.md, section 12)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.fit import Blend, Solution, blend_from_moments, squared_error
from ckpt_prune.compensation.methods import METHODS, absolute_strength
from ckpt_prune.measure.moments.inputs import Moments


@dataclass(frozen=True)
class GapMap:
    """A map T, and a bias b if there is a slot, with y ≈ T z + b. `method` is a name of `METHODS`.

    Attributes:
        strength: relative; None if the form has none.
        weight: T, (hidden, hidden) float64.
        bias: b, (hidden,) float64, to be added to what is there; None without one.
        error_uncompensated, error_compensated: Σ‖y − z‖² and Σ‖y − T z − b‖², over Σ‖y‖².
        error_held_out: the second over folds, each by a map of the others; None with one fold.
    """

    method: str
    strength: float | None
    weight: Tensor
    bias: Tensor | None
    error_uncompensated: float
    error_compensated: float
    error_held_out: float | None

    @property
    def identity(self) -> bool:
        """Whether the stream goes on as it is."""
        return self.method == "none"


def fit_map(
    folds: Sequence[Moments],
    *,
    biased: bool,
    strength: float | None = None,
    grid: Sequence[float] = (),
) -> GapMap:
    """Fit the ridge map from z to y = z + δ that tends to the identity, and a bias if there is a slot.

    Args:
        folds: moments of z with Gram and drift δ, of disjoint tokens.
        biased: whether there is a slot for a bias.
        strength: relative; None to choose strength and form, the identity among them, on held-out folds.
        grid: relative strengths to choose from.
    """
    width = folds[0].width
    identity, kept = torch.eye(width, dtype=torch.float64), torch.arange(width)
    blends = [blend_from_moments(identity, moments, kept) for moments in folds]
    all_tokens = reduce(add, blends)
    method, held_out = "affine" if biased else "ridge", None
    if strength is None:
        forms = ["none", "bias", "ridge", "affine"] if biased else ["none", "ridge"]
        best = choose_form(identity, blends, forms, grid, (1.0,), total=all_tokens).best
        method, strength, held_out = best.method, best.strength, best.error
    fit = all_tokens.at(1.0)
    solution = _solve(method, strength, identity, all_tokens)
    energy = fit.target_energy or 1.0
    if held_out is None and len(folds) > 1:
        held_out = (
            sum(squared_error(_solve(method, strength, identity, all_tokens - fold), fold.at(1.0)) for fold in blends)
            / energy
        )
    return GapMap(
        method,
        strength,
        solution.weight,
        solution.bias,
        squared_error(Solution(identity), fit) / energy,
        squared_error(solution, fit) / energy,
        held_out,
    )


def _solve(method: str, strength: float | None, identity: Tensor, blend: Blend) -> Solution:
    fit = blend.at(1.0)
    absolute = 0.0 if strength is None else absolute_strength(strength, "relative", fit)
    return METHODS[method].fit(identity, fit, absolute)


def absorb_map(gap_map: GapMap, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return T W and the bias that goes with it, float64. The bias that was there is not mapped: y is without it."""
    mapped = gap_map.weight @ weight.double()
    if gap_map.bias is None:
        return mapped, None if bias is None else bias.double()
    return mapped, gap_map.bias if bias is None else bias.double() + gap_map.bias
