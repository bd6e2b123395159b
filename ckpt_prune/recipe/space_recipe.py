"""The part of a recipe that says what happens to one space."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ckpt_prune.common.fields import OneOf, Strict
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.compensation.methods import AUTO, CANDIDATES, GRID, METHODS, SHARES
from ckpt_prune.model.spaces import Rounding
from ckpt_prune.recipe.space_kinds import FACTS, FITS_LOGITS, SCORE_NAMES

ScoreName = Annotated[str, OneOf("score", SCORE_NAMES)]
MethodName = Annotated[str, OneOf("method", FACTS)]
CandidateName = Annotated[str, OneOf("candidate", METHODS)]
_RIDGES = [method.name for method in METHODS.values() if method.uses_strength]


class Compensation(Strict):
    """How the weights that stay make up for dropped units."""

    method: MethodName = Field(
        "none",
        description="Closed form that makes up for what goes; the weights that read the space absorb it (logit and "
        "low-rank: q and k do; factors: q does). auto: for each site the one of least error on held-out folds.",
    )
    lam: Annotated[float, Field(ge=0)] | Literal["auto"] | None = Field(
        None,
        alias="lambda",
        description="Ridge strength, for ridge, affine, grail, logit, low-rank, factors. auto, for the first "
        "three, is the default: 1.5 times kept inputs over calibration tokens, and no fit at sites where that loses on "
        "held-out samples. Default of the others: 0.01.",
    )
    lambda_units: Literal["relative", "absolute"] = Field(
        "relative",
        description="relative: times the mean diagonal of the kept Gram; absolute: as it stands, beside sums over all "
        "calibration tokens (of q and k: over samples), so that the same number weighs less the more there are.",
    )
    lambda_grid: list[float] | None = Field(
        None, min_length=2, description="Strengths to choose from; method auto has a grid of its own."
    )
    lambda_by: Literal["folds", "perplexity"] | None = Field(
        None,
        description="How the grid is searched. folds: per site by held-out error, in closed form; "
        "perplexity: one value for the model by calibration perplexity (RCPU 7.1), which needs text.",
    )
    candidates: list[CandidateName] | None = Field(
        None,
        min_length=1,
        description="What method auto chooses among. Default: none, bias, rotation, rotation-scale, ridge, affine; "
        "those with a bias only where the projection has one already.",
    )
    shares: list[float] | None = Field(
        None,
        min_length=1,
        description="With target: drift, shares of the drift to correct, each from 0 (the sequential target) to 1 (the "
        "dense model's own residual stream); of several the best on held-out folds. Default: 0, 0.25, 0.5, 0.75, 1 "
        "for method auto and lambda_by: folds; else 1.",
    )
    centre_keys: bool | None = Field(
        None,
        description="For logit and low-rank: fit with keys less their mean over each sample, to which the softmax is "
        "blind. Default: false, as published.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Compensation":
        uses = FACTS[self.method].uses_strength
        keys = [k for k in ("lam", "lambda_grid", "lambda_by") if getattr(self, k) is not None]
        if keys and not uses:
            raise ValueError(f"method {self.method} has no lambda")
        if self.centre_keys and self.method not in FITS_LOGITS:
            raise ValueError(f"centre_keys is for {' and '.join(FITS_LOGITS)}, not {self.method}")
        if self.method == AUTO and (self.lam is not None or self.lambda_by is not None):
            raise ValueError("method auto chooses lambda on folds: lambda and lambda_by do not go with it")
        if self.lam == AUTO and self.method not in _RIDGES:
            raise ValueError(f"lambda: auto is for {', '.join(_RIDGES)}, not {self.method}: give a number")
        if self.method != AUTO and (self.lambda_grid is None) != (self.lambda_by is None):
            raise ValueError("lambda_grid and lambda_by go together")
        if self.candidates is not None and self.method != AUTO:
            raise ValueError(f"candidates are for method auto, not {self.method}")
        if not all(0 <= share <= 1 for share in self.shares or []):
            raise ValueError("shares of the drift are numbers from 0 to 1")
        if self.shares is not None and len(self.shares) > 1 and not self.by_folds:
            raise ValueError("several shares of the drift are chosen from by method auto or lambda_by: folds")
        if self.lambda_grid is not None and self.lam is not None:
            raise ValueError("give lambda or lambda_grid, not both")
        if self.lambda_units == "absolute" and self.by_rule:
            raise ValueError("lambda_units: absolute says what a lambda or lambda_grid is in: give one")
        if self.lambda_grid is not None and min(self.lambda_grid) < 0:
            raise ValueError("lambda_grid holds a negative strength")
        return self

    @property
    def by_rule(self) -> bool:
        """True if each site's strength is `methods.derive_strength`, and a fit is left out where it does not win."""
        return self.method in _RIDGES and self.lam in (None, AUTO) and self.lambda_by is None

    @property
    def strength(self) -> float:
        """The strength if it is fixed, and not by the rule."""
        return self.lam if isinstance(self.lam, float) else 0.01

    @property
    def by_folds(self) -> bool:
        """True if something is chosen on held-out folds."""
        return self.method == AUTO or self.lambda_by == "folds"

    @property
    def grid(self) -> list[float]:
        return list(GRID) if self.lambda_grid is None else self.lambda_grid

    @property
    def drift_shares(self) -> list[float]:
        """Shares of the drift to choose from; one alone is no choice."""
        if self.shares is not None:
            return self.shares
        return list(SHARES) if self.by_folds else [1.0]

    def methods(self, *, biased: bool) -> list[str]:
        """Return closed forms to choose from, for a projection with or without a bias in the source."""
        if self.method != AUTO:
            return [self.method]
        if self.candidates is not None:
            return list(dict.fromkeys(self.candidates))
        return [name for name in CANDIDATES if biased or not METHODS[name].adds_bias]

    @property
    def opens_bias(self) -> bool:
        """True if a projection without a bias may get one."""
        return any(FACTS[name].adds_bias for name in self.methods(biased=False))


class SpaceRecipe(Strict):
    @model_validator(mode="before")
    @classmethod
    def _rank_nothing(cls, values: Any) -> Any:
        """Take any score where no unit goes."""
        stays_whole = isinstance(values, dict) and values.get("ratio") == 0 and "score" not in values
        return {**values, "score": "magnitude"} if stays_whole else values

    @field_validator("keep", mode="before")
    @classmethod
    def _for_each_block(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(f"a list has a number for each block, such as [{value}, {value}]")
        return value

    score: ScoreName = Field(
        description="How units are ranked: those with the highest score stay. auto: of "
        "several scores the one whose units lose least."
    )
    ratio: Ratio | None = Field(None, ge=0, lt=1, description="Share of units to drop; the recipe's ratio by default.")
    keep: list[int] | None = Field(
        None,
        min_length=1,
        description="How many units stay of every block, a number for each, in place of a ratio.",
    )
    rounding: Rounding | None = Field(
        None,
        description="Of units x ratio to units dropped. Default: floor for heads, dimensions and rotary pairs, "
        "nearest for query heads, ceil for columns.",
    )
    multiple_of: int = Field(
        1,
        ge=1,
        description="Round the kept width up to a multiple of this many units; by default of mlp export.block_size "
        "where that is given, and of an expert's columns 8, which transformers' products of experts want. In a part of "
        "a model whose config states columns as a multiple of its width, the nearest such multiple stays.",
    )
    optional: bool | None = Field(
        None,
        description="true: left out where a model has no such space, or none of its units can go. By default true of "
        "heads and mlp, and of all spaces of encoder-decoders and of models in stages.",
    )
    compensation: Compensation = Field(
        default_factory=lambda: Compensation.model_validate({}),
        description="How the weights that stay make up for what goes; none by default.",
    )
