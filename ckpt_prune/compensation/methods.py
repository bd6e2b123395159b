"""Every way to make an output projection make up for its dropped inputs, by name.

See compensation/README.md, section 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ckpt_prune.compensation import least_squares as ls
from ckpt_prune.compensation import rotation as rot
from ckpt_prune.compensation.fit import Fit, Solution

Units = Literal["relative", "absolute"]


@dataclass(frozen=True)
class MethodFacts:
    """What a recipe must know of a compensation.

    Attributes:
        name: as written in a recipe.
        summary: one line for a listing.
        source: paper and equation.
        needs_gram: whether it needs the Gram of a consumer's input.
        uses_strength: whether the strength changes the result.
        adds_bias: whether the result has a bias that the dense module may lack.
    """

    name: str
    summary: str
    source: str
    needs_gram: bool
    uses_strength: bool
    adds_bias: bool


@dataclass(frozen=True)
class Method(MethodFacts):
    """One closed form of an output projection.

    Attributes:
        fit: W_K (d_out, k) float64, the fit and the absolute strength → the solution. Methods without a strength
            ignore it.
        ridge_towards: where the weight is ridge regression towards W_K or towards zero (`least_squares.shrunk`), on
            centred moments and with the bias that matches the means where it adds one. The choice on folds then scores
            every strength from one decomposition. None for any other form, with a strength or without: it is scored by
            its own fit, strength by strength.
        best_of_form: whether, without a strength, it is dear to fit and nothing of its form has a smaller error on the
            tokens it is fitted to. Then that error tells the choice on folds whether it can win at all.
        freedom: outputs d_out and kept inputs k → how many numbers of the result it is free to choose (RCPU, section
            4.2). None for a form that chooses every weight, and the bias where it adds one (`shift.freedom`).
    """

    fit: Callable[[Tensor, Fit, float], Solution]
    ridge_towards: Literal["kept", "zero"] | None = None
    best_of_form: bool = False
    freedom: Callable[[int, int], int] | None = None


def _turns(outputs: int) -> int:
    """Numbers that say how a rotation of so many outputs turns: one for each pair of axes."""
    return outputs * (outputs - 1) // 2


def _none(weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
    return Solution(weight_kept)


def _bias(weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
    return Solution(weight_kept, fit.target_mean - weight_kept @ fit.mean)


def _plain(form: Callable[[Tensor, Fit], Solution]) -> Callable[[Tensor, Fit, float], Solution]:
    """Gives a form without a strength the signature of those that have one."""
    return lambda weight_kept, fit, strength: form(weight_kept, fit)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "none",
            "keep the surviving weights as they are",
            "no compensation",
            False,
            False,
            False,
            _none,
            freedom=lambda outputs, kept: 0,
        ),
        Method(
            "bias",
            "restore the mean output",
            "FLAP; VBP",
            False,
            False,
            True,
            _bias,
            freedom=lambda outputs, kept: outputs,
        ),
        Method(
            "rotation",
            "rotate the output",
            "RCPU eq. 5-7",
            True,
            False,
            False,
            _plain(rot.rotation),
            best_of_form=True,
            freedom=lambda outputs, kept: _turns(outputs),
        ),
        Method(
            "rotation-scale",
            "rotate and scale the output",
            "RCPU eq. 8-9",
            True,
            False,
            False,
            _plain(rot.scaled_rotation),
            best_of_form=True,
            freedom=lambda outputs, kept: _turns(outputs) + 1,
        ),
        Method(
            "centred-rotation",
            "rotate the output about its mean, and restore the mean",
            "this project, from RCPU eq. 5-7",
            True,
            False,
            True,
            _plain(rot.centred_rotation),
            best_of_form=True,
            freedom=lambda outputs, kept: _turns(outputs) + outputs,
        ),
        Method(
            "least-squares",
            "map the pruned output linearly onto the dense one",
            "RCPU v1 eq. 3-4",
            True,
            False,
            False,
            _plain(ls.least_squares),
            best_of_form=True,
            freedom=lambda outputs, kept: outputs**2,
        ),
        Method(
            "ridge",
            "refit the weights, shrunk towards the surviving ones",
            "RCPU eq. 4",
            True,
            True,
            False,
            ls.ridge,
            "kept",
        ),
        Method(
            "affine",
            "refit weights and bias, shrunk towards the surviving weights",
            "CORP eq. 7-9",
            True,
            True,
            True,
            ls.affine,
            "kept",
        ),
        Method("grail", "refit the weights, shrunk towards zero", "GRAIL", True, True, False, ls.grail, "zero"),
    )
}


AUTO = "auto"
CHOSEN = MethodFacts(AUTO, "whichever is best on held-out folds, site by site", "this project", True, True, False)
"""Stands for a choice among `METHODS` (`compensation.choice`). The recipe says which, so whether any adds a bias."""
COLUMN_METHODS: dict[str, MethodFacts] = {**METHODS, AUTO: CHOSEN}
"""Every compensation that a recipe may name for an output projection."""
CANDIDATES = ("none", "bias", "rotation", "rotation-scale", "ridge", "affine")
"""What `auto` chooses among unless a recipe says otherwise. Those with a bias are for projections that have one."""
GRID = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Relative strengths that are tried where a recipe does not list its own."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the drift that are tried where a recipe does not list its own."""


def absolute_strength(value: float, units: Units, fit: Fit) -> float:
    """A strength on the scale of Gram sums. An absolute one is so already; a relative one is times mean(diag(G_KK)).

    Papers use absolute strengths on Grams of different scales. A relative one means the same for every layer and N.

    Raises:
        ValueError: the strength is negative or not a number, or is relative and `fit` has no second moments.
    """
    if not value >= 0:
        raise ValueError(f"lambda must be zero or more, not {value}")
    if units == "absolute":
        return value
    return value * float(fit.second_moments()[0].diagonal().mean())
