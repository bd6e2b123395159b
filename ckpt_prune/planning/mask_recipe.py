"""The parts of a recipe that zero single weights: the mask, and the importance rotations learned before it."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from ckpt_prune.planning import names
from ckpt_prune.planning.fields import OneOf, Strict
from ckpt_prune.planning.names import Backbone, RotationKind
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.masks import Compare
from ckpt_prune.sparsity.patterns import UNSTRUCTURED, GroupPattern, parse_pattern

RetractionName = Annotated[names.RetractionName, OneOf("retraction", get_args(names.RetractionName))]


_SPREADS = {"owl": 0.08, "alpha": 0.3, "divergence": 0.08}
"""OWL's and AlphaPruning's of LLaMA-7B at 70 %."""


class MaskRecipe(Strict):
    """Zeros in every linear module of every block (sparsity/README.md). Shapes stay as they are."""

    method: Backbone = Field(
        description="magnitude: |W|; wanda: |W| times the norm of the input; sparsegpt: optimal brain surgeon, which "
        "also rewrites the weights that stay."
    )
    pattern: str = Field(
        UNSTRUCTURED,
        description="unstructured: the recipe's ratio of the weights, anywhere; N:M: of every M consecutive weights "
        "of a row, N stay.",
    )
    compare: Compare | None = Field(
        None,
        description="Among which weights an unstructured mask chooses. Default: row for wanda, matrix for magnitude, "
        "as published; sparsegpt chooses among its blocks of columns.",
    )
    block: int = Field(128, ge=1, description="Columns that sparsegpt prunes together.")
    damp: float = Field(
        DAMP, ge=0, le=MOST_DAMP, description="Added to the diagonal of sparsegpt's Hessian, as a share of its mean."
    )

    allocation: Literal["uniform", "owl", "alpha", "divergence"] = Field(
        "uniform",
        description="How the zeros are shared out over blocks. uniform: as many in each; owl: fewer where more weights "
        "have an outlying score; alpha: fewer where the spectra of the weights have heavier tails (AlphaPruning); "
        "divergence: so that the predicted effect on the model's own output is least, which needs text or images. Of "
        "N:M each block gets its own N.",
    )
    threshold: float | None = Field(
        None, gt=0, description="OWL's M: a score above so many times the block's mean is an outlier. Default: 5."
    )
    spread: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="How far the shares of blocks may lie apart. owl: they span twice this (OWL's lambda); alpha: they "
        "span the ratio times 1 minus this to 1 plus this (AlphaPruning's epsilon, before they are scaled to the "
        "ratio); divergence: none is further from the ratio; not for N:M. Default: 0.08, 0.3 and 0.08.",
    )

    @field_validator("pattern")
    @classmethod
    def _known(cls, value: str) -> str:
        # 02:04 is another way to write 2:4, and means the same recipe.
        return str(parse_pattern(value) or value)

    @model_validator(mode="after")
    def _meant(self) -> "MaskRecipe":
        if self.compare is not None and (self.groups is not None or self.method == "sparsegpt"):
            what = f"pattern {self.pattern}" if self.groups is not None else "method sparsegpt"
            raise ValueError(f"{what} says by itself which weights are compared: leave out compare")
        given = {"block", "damp"} & self.model_fields_set
        if given and self.method != "sparsegpt" and any(getattr(self, k) != _default(self, k) for k in given):
            belong = "belong" if len(given) > 1 else "belongs"
            raise ValueError(f"{' and '.join(sorted(given))} {belong} to method sparsegpt, not {self.method}")
        return self

    @model_validator(mode="after")
    def _shared_out(self) -> "MaskRecipe":
        if self.threshold is not None and self.allocation != "owl":
            raise ValueError(f"threshold belongs to allocation owl, not {self.allocation}")
        if self.spread is not None and self.allocation == "uniform":
            raise ValueError("spread belongs to an allocation that differs between blocks, not to uniform")
        if self.spread is not None and self.allocation == "divergence" and self.groups is not None:
            raise ValueError("spread bounds the shares of an unstructured mask: with divergence and N:M leave it out")
        return self

    @property
    def chosen_threshold(self) -> float:
        """OWL's M."""
        return 5.0 if self.threshold is None else self.threshold

    @property
    def chosen_spread(self) -> float:
        """How far the shares of blocks may lie apart."""
        return _SPREADS[self.allocation] if self.spread is None else self.spread

    @property
    def groups(self) -> GroupPattern | None:
        """The N:M pattern; None for unstructured."""
        return parse_pattern(self.pattern)

    @property
    def compared(self) -> Compare:
        """Among which weights an unstructured mask chooses."""
        return self.compare or ("matrix" if self.method == "magnitude" else "row")


def _default(model: BaseModel, field: str) -> Any:
    return type(model).model_fields[field].default


class RotationRecipe(Strict):
    """Importance rotations, learned before a mask. They leave the model's function as it is (rotations/README.md)."""

    kind: RotationKind = Field(
        description="per-layer: the paper's R1 and R2 in every block, with remote code that turns the residual stream "
        "between blocks; shared: one R1 for all blocks and R2, absorbed by the weights; values: R2 alone, absorbed."
    )
    importance: Backbone | None = Field(
        None, description="Whose importance of weights is concentrated. Default: the mask's method."
    )
    steps: int = Field(200, ge=0, description="Optimiser steps at most; 0 leaves the identity.")
    learning_rate: float | None = Field(None, gt=0, description="Of Adam. Default: what suits the retraction.")
    retraction: RetractionName = Field(
        "cayley",
        description="How matrices are kept orthogonal. cayley: Adam on the tangent space, which needs fewer steps; "
        "qr: the paper's, Adam through a QR decomposition.",
    )
    patience: int = Field(100, ge=1, description="Stop early when this many steps have improved too little.")
    tolerance: float = Field(1e-4, ge=0, description="Too little: this share of the entropy. 0 never stops early.")
    jitter: float = Field(
        0.0, ge=0, description="Start this many radians off the identity, at random: where that is a saddle."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of that start; nothing else is random.")
    damp: float = Field(DAMP, ge=0, le=MOST_DAMP, description="For sparsegpt's importance: as in a mask.")
    measured: Literal["dense", "pruned"] = Field(
        "dense",
        description="Inputs that the importance of weights is measured on. dense: those of the dense model; pruned: of "
        "what is pruned before the block, as DenoiseRotator's released code has it, so that rotations are learned and "
        "blocks masked in turn (with target: sequential; given statistics instead, the dense cache is used).",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Type that importances and their gradients are computed in. bfloat16 is the paper's; what is "
        "optimised stays in float32, and a rotation is kept only where it is better in float64.",
    )
    entropy: Literal["lines", "groups"] = Field(
        "lines",
        description="Among which weights importance is concentrated. lines: all of a row, and of a column where the "
        "rows turn, as in the paper; groups: the M weights of a row that an N:M pattern chooses among, each group "
        "counted by its share of the row.",
    )
