"""The keys of `mask`: zeros in the weights of every block. Shapes stay as they are."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.zero_patterns import UNSTRUCTURED, Compare, GroupPattern, parse_pattern
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.options.training import Part
from ckpt_prune.recipe.names import Backbone
from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP

_SPREADS = {"owl": 0.08, "alpha": 0.3, "divergence": 0.08}
"""OWL's and AlphaPruning's of LLaMA-7B at 70 %."""


class Mask(StageKeys):
    """Zeros in every linear module of every block."""

    key = "mask"
    goal = "zeros"
    asks = frozenset({"zeros"})
    doing = "masked"
    summary = "Zeros in the weights of every block, instead of spaces."
    unplannable = "zeroes single weights, which a plan does not list: `ckpt-prune prune` applies it"
    excludes: ClassVar[Mapping[str, str]] = {
        "spaces": "a recipe has either spaces, which lose units, or a mask, which zeroes weights; for both, prune "
        "twice, the mask last",
        "low_rank": "low_rank factors linears of the dense model: mask does not go with it",
    }
    later: ClassVar[Mapping[str, Any]] = {"allocation": "uniform", "threshold": None, "spread": None, "only": None}

    method: Backbone = Field(
        description="magnitude: |W|; wanda: |W| times the norm of the input; sparsegpt: optimal brain surgeon, which "
        "also rewrites the weights that stay."
    )
    pattern: str = Field(
        UNSTRUCTURED,
        description="unstructured: the recipe's ratio of the weights, anywhere; N:M: of every M consecutive weights "
        "of a row, N stay.",
    )
    only: Part | None = Field(
        None, description="Mask these linear modules alone; ratio and pattern are of them. Default: all."
    )
    compare: Compare | None = Field(
        None,
        description="Among which weights an unstructured mask chooses. Default: row for wanda, matrix for magnitude, "
        "as published; sparsegpt chooses among its blocks of columns.",
    )
    block: int = Field(128, ge=1, description="Columns that sparsegpt prunes together.")
    damp: Annotated[float, Field(ge=0, le=MOST_DAMP)] | Literal["auto"] = Field(
        DAMP,
        description="Added to the diagonal of sparsegpt's Hessian, as a share of its mean. auto: 1.5 times the weights "
        "of a row that stay over calibration tokens.",
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
        description="How far the ratios of blocks may differ. owl: they span twice this (OWL's lambda). alpha: they "
        "range from ratio*(1-spread) to ratio*(1+spread) (AlphaPruning's epsilon), and are then scaled so that their "
        "mean is the ratio. divergence: none is further than this from the ratio; not for N:M. "
        "Default: 0.08, 0.3 and 0.08.",
    )

    @field_validator("pattern")
    @classmethod
    def _known(cls, value: str) -> str:
        # 02:04 is another way to write 2:4, and means the same recipe.
        return str(parse_pattern(value) or value)

    @model_validator(mode="after")
    def _meant(self) -> "Mask":
        if self.compare is not None and (self.groups is not None or self.method == "sparsegpt"):
            what = f"pattern {self.pattern}" if self.groups is not None else "method sparsegpt"
            raise ValueError(f"{what} says by itself which weights are compared: leave out compare")
        set_keys = {"block", "damp"} & self.model_fields_set
        if (
            set_keys
            and self.method != "sparsegpt"
            and any(getattr(self, k) != type(self).model_fields[k].default for k in set_keys)
        ):
            belong = "belong" if len(set_keys) > 1 else "belongs"
            raise ValueError(f"{' and '.join(sorted(set_keys))} {belong} to method sparsegpt, not {self.method}")
        return self

    @model_validator(mode="after")
    def _shared_out(self) -> "Mask":
        if self.threshold is not None and self.allocation != "owl":
            raise ValueError(f"threshold belongs to allocation owl, not {self.allocation}")
        if self.spread is not None and self.allocation == "uniform":
            raise ValueError("spread belongs to an allocation that differs between blocks, not to uniform")
        if self.spread is not None and self.allocation == "divergence" and self.groups is not None:
            raise ValueError("spread bounds the shares of an unstructured mask: with divergence and N:M leave it out")
        return self

    @classmethod
    def fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        mask = values.get("mask")
        text = mask.get("pattern", UNSTRUCTURED) if isinstance(mask, dict) else UNSTRUCTURED
        try:
            groups = parse_pattern(text)
        except (TypeError, ValueError):  # the field says why
            return values
        if groups is None:
            return values
        if values.get("ratio", groups.ratio) != groups.ratio:
            raise ValueError(
                f"pattern {groups} zeroes {groups.ratio:g} of the weights by itself: leave out ratio, or set it to that"
            )
        return values | {"ratio": groups.ratio}

    @classmethod
    def check_ratio(cls, values: Mapping[str, Any], ratio: float) -> None:
        pattern = str(values.get("pattern", UNSTRUCTURED))
        if pattern != UNSTRUCTURED:
            raise UserError(
                f"--ratio {ratio:g} does not go with pattern {pattern}, which already says how much is zeroed: "
                f"take a recipe without one, or say --set mask.pattern={UNSTRUCTURED} as well"
            )

    @classmethod
    def check_size(cls, name: str) -> None:
        raise UserError(
            f"recipe {name} has a mask, which leaves every size as it is: leave the size out, or take a recipe that "
            "makes matrices narrower, such as --recipe ridge"
        )

    @classmethod
    def settles_ratio(cls, keys: tuple[str, ...], values: Mapping[str, Any]) -> bool:
        return keys == ("mask", "pattern") and values["pattern"] != UNSTRUCTURED

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.layers is not None:
            raise ValueError("layers is for spaces: a mask zeroes weights of every block")
        if (recipe.allocation, recipe.widths, recipe.size) != ("uniform", "uniform", None):
            raise ValueError("allocation, widths and size are about units: they do not go with a mask")
        if recipe.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with a mask")
        if recipe.container == "padded":
            raise ValueError("container padded is for spaces: a mask leaves every shape as it is")
        if "ratio" not in recipe.model_fields_set:
            raise ValueError("an unstructured mask needs ratio, the share of weights to zero; N:M patterns do not")

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.reads_inputs or self.allocation in ("owl", "divergence")

    def measures_prefix(self, recipe: Recipe) -> bool:
        return self.reads_inputs

    def collects(self, recipe: Recipe) -> set[Collect]:
        return {"gram", "linears"} if self.method == "sparsegpt" else {"linears"}

    def alone(self, recipe: Recipe) -> str | None:
        return None if self.allocation == "uniform" else "shares a mask's zeros out"

    @property
    def reads_inputs(self) -> bool:
        """Whether weights are chosen by what reaches them."""
        return self.method != "magnitude"

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
