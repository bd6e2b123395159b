"""The keys of `hidden`: dimensions of the residual stream go, in a basis that is measured (SliceGPT)."""

from collections.abc import Mapping, Set
from math import lcm
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.runtimes import Change
from ckpt_prune.recipe.names import SlicingKind, SlicingSignal
from ckpt_prune.recipe.recipe import Recipe, StageKeys


class Hidden(StageKeys):
    """Dimensions of the residual stream go."""

    key = "hidden"
    goal = "hidden"
    summary = "Dimensions of the residual stream that go, in a basis that is measured."
    changes_model = True
    does = "narrows the residual stream"
    by_itself = "`ckpt-prune prune --recipe slicegpt-shared --set hidden.drop=N`"
    unplannable = (
        "narrows the residual stream, which a plan does not cover: `ckpt-prune prune --dry-run` shows its width and "
        "size"
    )
    excludes: ClassVar[Mapping[str, str]] = {
        "mask": "hidden turns the residual stream into another basis: for a mask as well, prune twice, the mask last, "
        "or first where the output needs code of its own (kind: per-block)",
        "low_rank": "low_rank factors linears of the dense model: hidden does not go with it",
        "recovery": "hidden turns the residual stream into another basis, and recovery does not follow it",
    }

    kind: SlicingKind = Field(
        "per-block",
        description="per-block: attention and mlp of every block read the stream in bases of their own, with matrices "
        "on the skip connections (SliceGPT), which needs remote code; shared: one basis for the whole model, absorbed "
        "by its weights, which loads with stock classes.",
    )
    drop: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="Dimensions to drop. Default: the recipe's ratio of them. What stays is rounded down. Beside "
        "spaces: a number, or auto for as many as change the model's output least, what else goes of the same size "
        "included.",
    )
    multiple_of: int = Field(8, ge=1, description="As many dimensions stay as are a multiple of this.")
    signal: SlicingSignal = Field(
        "normed",
        description="What the principal directions are of. normed: what the norms make of the stream, every token as "
        "long as any other (the paper); stream: the stream itself (the released code).",
    )
    tied: Literal["keep", "untie"] | None = Field(
        None,
        description="What kind: shared makes of a head that is the embedding. keep: they stay one table, and the head "
        "loses how the final norm's gains mix dropped dimensions into kept ones; untie: the head gets a table of its "
        "own. Default: keep, where norms are RMSNorms.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Hidden":
        if self.tied is not None and self.kind != "shared":
            raise ValueError(f"kind: {self.kind} leaves embedding and head as they are: leave out tied")
        return self

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.has("depth") and self.kind != "shared":
            raise ValueError(
                "hidden.kind: per-block needs code of its own: for whole blocks as well say kind: shared, or prune "
                "twice, the blocks first"
            )
        if recipe.layers is not None:
            raise ValueError("hidden goes through all blocks: leave out layers")
        if recipe.size is not None and recipe.size.kind == "latency" and self.kind != "shared":
            raise ValueError(
                "a latency is foreseen by a table of stock blocks, and hidden.kind: per-block puts matrices on their "
                "skip connections: give params, bytes or flops with it, or say kind: shared"
            )
        if recipe.spaces:
            self._check_beside_spaces(recipe)
            return
        recipe.refuse_keys_of_spaces("hidden")
        if self.auto:
            raise ValueError("hidden.drop: auto is for recipes with spaces, which lose what the stream does not")
        if recipe.target == "drift":
            raise ValueError("target drift is for spaces, whose consumers are refitted: say sequential with hidden")
        if recipe.target == "sequential" and self.kind == "shared":
            raise ValueError("one basis for all blocks is known before any is sliced: say target: dense")
        if self.drop is not None and recipe.size is not None:
            raise ValueError("size and hidden.drop both say how much goes: leave one out")

    def _check_beside_spaces(self, recipe: Recipe) -> None:
        if self.kind != "shared":
            raise ValueError(
                "hidden.kind: per-block needs code of its own, whose blocks nothing else can prune: with spaces say "
                "kind: shared, or prune twice, the spaces first"
            )
        if self.drop is None:
            raise ValueError(
                "ratio and size mean spaces here: also say how many dimensions go, by hidden.drop (a number, or auto)"
            )
        if self.auto and not recipe.weighed_by_effect:
            raise ValueError(
                "hidden.drop: auto weighs dimensions by what they do to the model's output, as the widths must be: say "
                "allocation: least-error, without weigh_by"
            )

    def changes(self, recipe: Recipe, spaces: Set[str]) -> Set[Change]:
        return {"slicing"} if self.kind == "per-block" else set()

    def in_multiples_of(self, unit: int) -> Self:
        return self.model_copy(update={"multiple_of": lcm(self.multiple_of, unit)})

    def needs_moments(self, recipe: Recipe) -> bool:
        return True

    def collects(self, recipe: Recipe) -> set[Collect]:
        return {"gram", "linears"} if self.kind == "shared" and not recipe.spaces else set()

    def basis_from_statistics(self, recipe: Recipe) -> bool:
        """Return True if moments of what linear modules read give the one basis of the residual stream."""
        return self.kind == "shared" and self.signal == "normed" and not recipe.spaces and not recipe.has("depth")

    def measures_prefix(self, recipe: Recipe) -> bool:
        return True

    def needs_samples(self, recipe: Recipe) -> bool:
        return not self.basis_from_statistics(recipe)

    def needs_own_code(self, recipe: Recipe) -> bool:
        return self.kind == "per-block"

    def alone(self, recipe: Recipe) -> str:
        return "slices the residual stream"

    @property
    def auto(self) -> bool:
        """Whether how many go is found by measuring, beside what goes of spaces."""
        return self.drop == "auto"
