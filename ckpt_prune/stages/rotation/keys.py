"""The keys of `rotation`: importance rotations, learned before the mask (DenoiseRotator)."""

from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from ckpt_prune.common.fields import OneOf
from ckpt_prune.common.filenames import ROTATIONS
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.runtimes import Change
from ckpt_prune.recipe import names
from ckpt_prune.recipe.names import Backbone, RotationKind
from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP
from ckpt_prune.stages.mask.keys import Mask

RetractionName = Annotated[names.RetractionName, OneOf("retraction", get_args(names.RetractionName))]

DENOISE: Mapping[str, Any] = {
    "kind": "per-layer",
    "retraction": "qr",
    "learning_rate": 0.01,
    "steps": 2000,
    "patience": 2000,
    "tolerance": 0.0,
    "compute_dtype": "bfloat16",
    "measured": "pruned",
}


class Rotation(StageKeys):
    """Importance rotations, learned before a mask. They leave the model's function as it is.

    Its names are `denoise` (DenoiseRotator as published: rotations in every block, learned by Adam through a QR
    decomposition), `cayley` (the same rotations in a tenth of the steps), `shared` (one for all blocks, which the
    weights absorb), `groups` (for the groups of an N:M pattern) and `denoise-code` (denoise, with the importance that
    its authors' code has for SparseGPT).
    """

    key = "rotation"
    summary = (
        "Rotations learned before the mask: its keys, or a name. denoise: as published; cayley: the same in a tenth of "
        "the steps; shared: one for all blocks, which the weights absorb; groups: for the groups of an N:M pattern; "
        "denoise-code: denoise, with the importance of its authors' code."
    )
    prunes = False
    writes = (ROTATIONS,)
    later: ClassVar[Mapping[str, Any]] = {
        "measured": "dense",
        "compute_dtype": "float32",
        "entropy": "lines",
        "damped": "hessian",
    }
    named: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "denoise": DENOISE,
        "cayley": {"kind": "per-layer"},
        "shared": {"kind": "shared"},
        "groups": {"kind": "per-layer", "entropy": "groups"},
        "denoise-code": {**DENOISE, "damped": "inverse-too"},
    }

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
    damped: Literal["hessian", "inverse-too"] = Field(
        "hessian",
        description="For sparsegpt's importance: what the damping is added to. hessian: before it is inverted; "
        "inverse-too: and once more to the inverse, as DenoiseRotator's released code does, so that importance is "
        "nearly that of magnitude.",
    )
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

    @classmethod
    def expand(cls, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a name; magnitude's importance does not see the inputs that `measured` speaks of."""
        mask = values.get("mask")
        unseen = isinstance(mask, dict) and mask.get("method") == "magnitude"
        return {key: value for key, value in cls.named[name].items() if not (unseen and key == "measured")}

    def check_recipe(self, recipe: Recipe) -> None:
        mask = recipe.get(Mask)
        if mask is None:
            raise ValueError("rotation comes before a mask: say mask (with ratio 0 nothing is zeroed)")
        if mask.only is not None:
            raise ValueError("rotation concentrates the importance of all linear weights: leave out mask.only")
        importance = self.importance_for(recipe)
        if self.damp != DAMP and importance != "sparsegpt":
            raise ValueError(f"rotation.damp is for sparsegpt's importance, not {importance}'s: leave it out")
        if self.damped != "hessian" and importance != "sparsegpt":
            raise ValueError(f"rotation.damped is for sparsegpt's importance, not {importance}'s: leave it out")
        if self.entropy == "groups" and mask.groups is None:
            raise ValueError("rotation.entropy groups is of an N:M pattern's groups: say mask.pattern, such as 2:4")
        if not self.in_turn:
            return
        if importance == "magnitude":
            raise ValueError("rotation.measured is of inputs, which magnitude's importance does not see: leave it out")
        if self.kind == "shared":
            raise ValueError(
                "rotation.measured pruned needs rotations that are learned block by block, and kind shared has one of "
                "all blocks before the first is pruned: say kind: per-layer or values"
            )
        if recipe.target != "sequential":
            raise ValueError("rotation.measured pruned is of what is pruned before a block: say target: sequential")

    def importance_for(self, recipe: Recipe) -> Backbone:
        """Return the method whose importance of weights is concentrated: its own, or the mask's."""
        mask = recipe.get(Mask)
        if mask is None:
            raise ValueError("rotation comes before a mask")
        return self.importance or mask.method

    @property
    def in_turn(self) -> bool:
        """Whether every block's rotations are learned on what is pruned before it."""
        return self.measured == "pruned"

    def changes(self, recipe: Recipe, spaces: Set[str]) -> Set[Change]:
        return {"rotations"} if self.kind == "per-layer" else set()

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.importance_for(recipe) != "magnitude"

    def measures_prefix(self, recipe: Recipe) -> bool:
        return self.in_turn

    def collects(self, recipe: Recipe) -> set[Collect]:
        mask = recipe.get(Mask)
        turned = mask is not None and mask.reads_inputs
        return {"gram", "linears"} if turned or self.needs_moments(recipe) else set()

    def measures_dense(self, recipe: Recipe) -> bool:
        return self.kind == "shared" and self.needs_moments(recipe)

    def needs_own_code(self, recipe: Recipe) -> bool:
        return self.kind == "per-layer"

    def alone(self, recipe: Recipe) -> str:
        return "rotates"
