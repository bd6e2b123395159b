"""The parts of a recipe that zero single weights: the mask, and the importance rotations learned before it."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from ckpt_prune.planning import names
from ckpt_prune.planning.fields import OneOf, Strict
from ckpt_prune.planning.names import Backbone, RotationKind
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.sparsity.masks import Compare
from ckpt_prune.sparsity.patterns import UNSTRUCTURED, GroupPattern, parse_pattern

RetractionName = Annotated[names.RetractionName, OneOf("retraction", get_args(names.RetractionName))]


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
