"""Every way to make an output projection make up for its dropped inputs, by name. Methods are listed without torch.

See compensation/README.md, section 2. A new method is one closed form and one entry of `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from ckpt_prune.compensation.fit import Fit, Solution

Units = Literal["relative", "absolute"]


@dataclass(frozen=True)
class MethodFacts:
    """Facts about a compensation that a recipe needs.

    Attributes:
        name: in recipes.
        summary: one line for a listing.
        source: paper and equation.
        needs_gram: whether it needs the Gram of a consumer's input.
        uses_strength: whether the strength changes the result.
        adds_bias: whether the result has a bias that the dense module may lack.
    """

    name: str
    summary: str
    source: str
    needs_gram: bool = False
    uses_strength: bool = False
    adds_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Method(MethodFacts):
    """One closed form of an output projection.

    Attributes:
        form: W_K (d_out, k) float64, the fit and, if it uses one, the absolute strength → the solution.
        ridge_towards: set if the weight is ridge regression towards W_K or towards zero (`least_squares.shrink`), on
            centred moments and with the bias that matches the means if it adds one. Then the choice on folds scores
            every strength from one decomposition. Any other form is fitted for every strength.
        best_of_form: whether, without a strength, it is expensive to fit and nothing of its form has a smaller error on
            the tokens it is fitted to. Then that error tells the choice on folds whether it can win at all.
    """

    form: Callable[..., Solution]
    ridge_towards: Literal["kept", "zero"] | None = None
    best_of_form: bool = False

    def fit(self, weight_kept: Tensor, fit: Fit, strength: float) -> Solution:
        """Solve for a projection; methods without a strength ignore it."""
        return self.form(weight_kept, fit, strength) if self.uses_strength else self.form(weight_kept, fit)


def imported_when_called(name: str) -> Callable[..., Any]:
    """Return a function of this room, `module:function`, that is imported when it is called."""
    return lambda *arguments: resolve_name(f"ckpt_prune.compensation.{name}")(*arguments)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="none",
            summary="keep the surviving weights as they are",
            source="no compensation",
            form=imported_when_called("fit:keep_weights"),
        ),
        Method(
            name="bias",
            summary="restore the mean output",
            source="FLAP; VBP",
            adds_bias=True,
            form=imported_when_called("fit:restore_mean"),
        ),
        Method(
            name="rotation",
            summary="rotate the output",
            source="RCPU eq. 5-7",
            needs_gram=True,
            form=imported_when_called("rotation:rotation"),
            best_of_form=True,
        ),
        Method(
            name="rotation-scale",
            summary="rotate and scale the output",
            source="RCPU eq. 8-9",
            needs_gram=True,
            form=imported_when_called("rotation:scaled_rotation"),
            best_of_form=True,
        ),
        Method(
            name="centred-rotation",
            summary="rotate the output about its mean, and restore the mean",
            source="this project, from RCPU eq. 5-7",
            needs_gram=True,
            adds_bias=True,
            form=imported_when_called("rotation:centred_rotation"),
            best_of_form=True,
        ),
        Method(
            name="least-squares",
            summary="map the pruned output linearly onto the dense one",
            source="RCPU v1 eq. 3-4",
            needs_gram=True,
            form=imported_when_called("least_squares:least_squares"),
            best_of_form=True,
        ),
        Method(
            name="ridge",
            summary="refit the weights, shrunk towards the surviving ones",
            source="RCPU eq. 4",
            needs_gram=True,
            uses_strength=True,
            form=imported_when_called("least_squares:ridge"),
            ridge_towards="kept",
        ),
        Method(
            name="affine",
            summary="refit weights and bias, shrunk towards the surviving weights",
            source="CORP eq. 7-9",
            needs_gram=True,
            uses_strength=True,
            adds_bias=True,
            form=imported_when_called("least_squares:affine"),
            ridge_towards="kept",
        ),
        Method(
            name="grail",
            summary="refit the weights, shrunk towards zero",
            source="GRAIL",
            needs_gram=True,
            uses_strength=True,
            form=imported_when_called("least_squares:grail"),
            ridge_towards="zero",
        ),
    )
}
"""In the order of how much they change the weights, the least first: of equal errors the first wins."""

AUTO = "auto"
CHOSEN = MethodFacts(AUTO, "whichever is best on held-out folds, site by site", "this project", True, True, False)
"""Stands for a choice among `METHODS` (`compensation.choice`). The recipe says which, so whether any adds a bias."""
COLUMN_METHODS: dict[str, MethodFacts] = {**METHODS, AUTO: CHOSEN}
"""Every compensation that a recipe may name for an output projection."""
ROTARY_METHODS: dict[str, MethodFacts] = {
    method.name: method
    for method in (
        MethodFacts("none", "keep the surviving rows of q and k as they are", "no compensation"),
        MethodFacts(
            "factors",
            "scale and turn each rotary pair that stays by a complex factor, absorbed into q",
            "this project",
            uses_strength=True,
        ),
    )
}
"""Every compensation that a recipe may name for rotary pairs (`compensation.rotary`)."""
CANDIDATES = ("none", "bias", "rotation", "rotation-scale", "ridge", "affine")
"""The methods that `auto` tries by default. Those with a bias are for projections that have one."""
GRID = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Relative strengths that are tried if a recipe does not list its own."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the drift that are tried if a recipe does not list its own."""


LEAST_STRENGTH = 1e-3
FAR_FROM_RULE = 3.0
"""A strength that is smaller than the rule's by more than this factor loses more on other samples, of few tokens."""
ENOUGH = 5
"""From so many tokens for each input on, no small strength does much harm: without any a fit loses k / (n - k) more."""


def derive_strength(inputs: int, tokens: int) -> float:
    """Return the strength of a ridge of `inputs` to `tokens`, relative to the mean square of an input: 1.5 k / n.

    At least `LEAST_STRENGTH`. Suppose that inputs have one size, and that the change of the weights has no preferred
    direction. Then the best ridge is the mean of Bayesian regression, λ = (k / n) (1 − ρ²) / ρ². Here ρ² is the share
    of the loss that the kept inputs predict; at 40 % λ is 1.5 k / n (README.md, section 2). Source: this project.
    Hoerl, Kennard and Baldwin 1975 have k σ² / ‖Δ‖² in its place.
    """
    return max(1.5 * inputs / max(tokens, 1), LEAST_STRENGTH)


def absolute_strength(value: float, units: Units, fit: Fit) -> float:
    """Return a strength on the scale of Gram sums: a relative one is multiplied by mean(diag(G_KK)).

    Papers use absolute strengths on Grams of different scales. A relative one means the same for every layer and N.
    """
    if not value >= 0:
        raise ValueError(f"lambda must be zero or more, not {value}")
    if units == "absolute":
        return value
    return value * float(fit.second_moments()[0].diagonal().mean())
