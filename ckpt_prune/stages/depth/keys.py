"""The keys of `depth`: whole blocks go, before anything else is done to those that stay."""

from collections.abc import Mapping, Set
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ckpt_prune.common.block_range import checked_blocks
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.fields import Strict
from ckpt_prune.compensation.methods import GRID
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.runtimes import Change
from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.recipe.sizes import SizeKind

Choice = Literal["influence", "cosine", "divergence", "loss"]
"""How blocks are chosen where they are not given."""
DepthPart = Literal["block", "attention", "mlp"]
"""The part of a block that goes."""


class DepthCompensation(Strict):
    """Compensation for a run of blocks that go."""

    method: Literal["none", "linear"] = Field(
        "none",
        description="linear: a linear map takes the place of the blocks that go. It acts on the output of the MLP "
        "before them, whose last projection absorbs it (ReplaceMe). As lambda grows it tends to the identity.",
    )
    lam: float | None = Field(
        None,
        alias="lambda",
        ge=0,
        description="Ridge strength of the map, in units of its Gram's mean diagonal. Default: 0.001.",
    )
    lambda_grid: list[float] | None = Field(
        None, min_length=2, description="Strengths to choose from with lambda_by: folds. Default: a grid around 0.001."
    )
    lambda_by: Literal["folds"] | None = Field(
        None,
        description="folds: for each gap the strength of least held-out error, or no map if none lowers the error.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "DepthCompensation":
        strengths = [self.lam, self.lambda_grid, self.lambda_by]
        if self.method == "none" and strengths != [None, None, None]:
            raise ValueError("method none has no lambda")
        if self.lambda_by is not None and self.lam is not None:
            raise ValueError("lambda_by: folds chooses lambda: give one of them")
        if self.lambda_grid is not None and self.lambda_by is None:
            raise ValueError("lambda_grid goes with lambda_by: folds")
        if self.lambda_grid is not None and min(self.lambda_grid) < 0:
            raise ValueError("lambda_grid holds a negative strength")
        return self

    @property
    def linear(self) -> bool:
        return self.method == "linear"

    @property
    def strength(self) -> float:
        return 0.001 if self.lam is None else self.lam

    @property
    def grid(self) -> list[float]:
        """Strengths to choose from on folds."""
        return list(GRID) if self.lambda_grid is None else self.lambda_grid


class Depth(StageKeys):
    """Whole blocks go, or the attention or mlp of some."""

    key = "depth"
    goal = "depth"
    summary = "Whole blocks that go, before anything else is done to those that stay."
    changes_model = True
    does = "drops whole blocks"
    by_itself = "`ckpt-prune prune --recipe depth --set depth.drop=N`"
    excludes: ClassVar[Mapping[str, str]] = {
        "mask": "depth does not go with mask: prune twice, first the blocks and then the mask, because the mask must "
        "be chosen on the shorter model",
        "low_rank": "low_rank factors linears of the dense model: depth does not go with it",
    }

    part: DepthPart = Field(
        "block",
        description="What goes of a block: all of it, or its attention or MLP. The last projection of an attention or "
        "MLP that goes becomes zeros: the output loads with a stock class, but is no smaller. With container: remote "
        "blocks have no attention at all, and no norm before it.",
    )
    drop: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="Blocks to drop. Default: the recipe's ratio of them, rounded. If spaces are pruned too: a number, "
        "or auto for the number with which the whole output, at the size that is asked for, changes least.",
    )
    under: list[SizeKind] | None = Field(
        None,
        min_length=1,
        description="Drop blocks only if the recipe's size is of one of these kinds: params, bytes, flops, latency. "
        "Default: always.",
    )
    blocks: list[int] | None = Field(
        None, min_length=1, description="These blocks go, counted from 0; nothing is chosen."
    )
    choose: Choice | None = Field(
        None,
        description="influence: the blocks whose input and output have the largest cosine, one by one (ShortGPT); "
        "cosine: runs of blocks whose first input and last output have the largest cosine (ReplaceMe); divergence: "
        "runs that are predicted to change the model's own "
        "output least, by its gradients; loss: one after the other, the one without which the loss is least (SLEB). "
        "Default: cosine; influence for a part.",
    )
    runs: int | None = Field(
        None, ge=1, description="Runs of consecutive blocks at most, with choose: cosine or divergence. Default: 1."
    )
    compensation: DepthCompensation = Field(
        default_factory=lambda: DepthCompensation.model_validate({}),
        description="What makes up for blocks that go; none by default.",
    )

    @field_validator("blocks")
    @classmethod
    def _ascending(cls, value: list[int] | None) -> list[int] | None:
        blocks = checked_blocks(value)
        return None if blocks is None else sorted(blocks)

    @model_validator(mode="after")
    def _consistent(self) -> "Depth":
        others = [key for key in ("drop", "choose", "runs") if getattr(self, key) is not None]
        if self.blocks is not None and others:
            raise ValueError(f"blocks says which go: {others[0]} does not go with it")
        if self.part != "block" and self.compensation.linear:
            raise ValueError(
                f"part: {self.part} has no map: take recipe shortgpt, or say 'depth.compensation={{method: none}}'"
            )
        if self.part != "block" and (self.runs is not None or self.choose == "cosine"):
            raise ValueError(f"part: {self.part} goes one by one: choose influence, divergence or loss, without runs")
        if self.runs is not None and self.choice in ("influence", "loss"):
            raise ValueError(f"choose: {self.choice} takes blocks one by one: runs is for cosine and divergence")
        if self.auto and self.part != "block":
            raise ValueError(f"part: {self.part} saves nothing: drop: auto is for part: block")
        if self.auto and self.choice == "loss":
            raise ValueError("drop: auto compares numbers of blocks: choose influence, cosine or divergence")
        return self

    def check_recipe(self, recipe: Recipe) -> None:
        if self.auto and recipe.has("hidden") and self.applies(recipe):
            raise ValueError(
                "depth.drop: auto compares numbers of blocks beside spaces alone: with hidden, say a number of blocks, "
                "depth.drop=N, or leave depth out (depth=null)"
            )
        if recipe.spaces:
            self._check_beside_spaces(recipe)
            return
        if self.auto or self.under is not None:
            key = "drop: auto" if self.auto else "under"
            raise ValueError(f"depth.{key} is for recipes with spaces, which lose what the blocks do not")
        if recipe.has("hidden"):
            if self.part != "block":
                raise ValueError(f"depth.part: {self.part} leaves zeros: beside hidden whole blocks go")
            if self.drop is None and self.blocks is None:
                raise ValueError(
                    "ratio and size mean the residual stream here: also say which blocks go, by depth.drop (a "
                    "number) or depth.blocks"
                )
            return
        recipe.refuse_keys_of_spaces("depth alone", containers=("auto", "remote") if self.part == "attention" else ())
        if self.blocks is not None and recipe.size is not None:
            raise ValueError("size and depth.blocks both say how much goes: leave one out")
        if self.drop is not None and recipe.size is not None:
            raise ValueError("size and depth.drop both say how much goes: leave one out")
        if self.blocks is not None and recipe.layers is not None:
            raise ValueError("layers says among which blocks to choose, and depth.blocks chooses: leave one out")

    def _check_beside_spaces(self, recipe: Recipe) -> None:
        if self.part != "block":
            raise ValueError(f"depth.part: {self.part} leaves zeros: beside spaces whole blocks go")
        if self.drop is None and self.blocks is None:
            raise ValueError(
                "ratio and size mean spaces here: also say how many blocks go, by depth.drop (a number, or auto) "
                "or depth.blocks"
            )
        if recipe.layers is not None:
            raise ValueError("layers could mean the blocks that may go or those that are pruned: leave it out")
        if self.auto and not recipe.weighed_by_effect and self.applies(recipe):
            raise ValueError(
                "depth.drop: auto weighs blocks by what they do to the model's output, as the widths must be: say "
                "allocation: least-error, without weigh_by"
            )

    def leaves_out(self, recipe: Recipe) -> bool:
        """Return whether attentions that go are left out, which takes remote code, and not replaced by zeros."""
        return self.part == "attention" and recipe.container == "remote"

    def changes(self, recipe: Recipe, spaces: Set[str]) -> Set[Change]:
        if not self.leaves_out(recipe):
            return set()
        return {"attention", "first attention"} if 0 in (self.blocks or ()) else {"attention"}

    def check_plannable(self, recipe: Recipe) -> None:
        if self.choice == "loss":
            raise UserError(
                f"recipe {recipe.name} chooses blocks by the loss without them, on text: use `ckpt-prune prune --text`"
            )

    def applies(self, recipe: Recipe) -> bool:
        return self.under is None or (recipe.size is not None and recipe.size.kind in self.under)

    def needs_moments(self, recipe: Recipe) -> bool:
        return self.measures

    def needs_folds(self, recipe: Recipe) -> bool:
        return self.compensation.lambda_by == "folds"

    def collects(self, recipe: Recipe) -> set[Collect]:
        return set() if self.choice in (None, "loss") else {"fisher"}

    def measures_prefix(self, recipe: Recipe) -> bool:
        return True

    def needs_samples(self, recipe: Recipe) -> bool:
        return True

    def needs_text(self, recipe: Recipe) -> bool:
        return self.choice == "loss"

    def alone(self, recipe: Recipe) -> str:
        return "drops whole blocks"

    @property
    def auto(self) -> bool:
        """Whether how many go is found by measuring, beside what goes of spaces."""
        return self.drop == "auto"

    @property
    def choice(self) -> Choice | None:
        """How blocks are chosen; None where they are given."""
        usual: Choice = "cosine" if self.part == "block" else "influence"
        return None if self.blocks is not None else self.choose or usual

    @property
    def most_runs(self) -> int:
        return 1 if self.runs is None else self.runs

    @property
    def runs_model(self) -> bool:
        """Whether the model itself is run: maps are fitted to its states, numbers of blocks compared by its output."""
        return self.compensation.linear or self.auto

    @property
    def measures(self) -> bool:
        return self.choice is not None or self.compensation.linear
