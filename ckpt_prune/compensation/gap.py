"""The linear map that makes up for blocks that are gone: a pure function of moments (README.md, section 12)."""

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
    """A map T, and a bias b where there is a slot, with y ≈ T z + b.

    Attributes:
        method: its form, of `METHODS`.
        strength: relative; None where the form has none.
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
    """The ridge map of z to y = z + δ that tends to the identity, on means where a bias restores them.

    Args:
        folds: moments of z with Gram and drift δ, of disjoint tokens.
        biased: whether there is a slot for a bias.
        strength: relative; None to choose strength and form, the identity among them, on held-out folds.
        grid: relative strengths to choose from.

    Raises:
        ValueError: a choice without two folds that have tokens.
    """
    width = folds[0].width
    identity, kept = torch.eye(width, dtype=torch.float64), torch.arange(width)
    blends = [blend_from_moments(identity, each, kept) for each in folds]
    whole = reduce(add, blends)
    method, held_out = "affine" if biased else "ridge", None
    if strength is None:
        forms = ["none", "bias", "ridge", "affine"] if biased else ["none", "ridge"]
        best = choose_form(identity, blends, forms, grid, (1.0,), total=whole).best
        method, strength, held_out = best.method, best.strength, best.error
    fit = whole.at(1.0)
    solution = _solved(method, strength, identity, whole)
    energy = fit.target_energy or 1.0
    if held_out is None and len(folds) > 1:
        held_out = (
            sum(squared_error(_solved(method, strength, identity, whole - own), own.at(1.0)) for own in blends) / energy
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


def _solved(method: str, strength: float | None, identity: Tensor, blend: Blend) -> Solution:
    fit = blend.at(1.0)
    absolute = 0.0 if strength is None else absolute_strength(strength, "relative", fit)
    return METHODS[method].fit(identity, fit, absolute)


def absorb_map(solved: GapMap, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """T W and the bias that goes with it, in float64. The bias that was there is not mapped: y is without it.

    Args:
        solved: the map.
        weight: W, (hidden, d_in), any floating dtype.
        bias: of the projection, (hidden,), or None.
    """
    mapped = solved.weight @ weight.double()
    if solved.bias is None:
        return mapped, None if bias is None else bias.double()
    return mapped, solved.bias if bias is None else bias.double() + solved.bias
