"""The part of a recipe that says how many dimensions of the residual stream stay, and in which bases."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ckpt_prune.planning.fields import Strict
from ckpt_prune.planning.names import SlicingKind, SlicingSignal


class HiddenRecipe(Strict):
    """Which dimensions of the residual stream go."""

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
    def _consistent(self) -> "HiddenRecipe":
        if self.tied is not None and self.kind != "shared":
            raise ValueError(f"kind: {self.kind} leaves embedding and head as they are: leave out tied")
        return self

    @property
    def auto(self) -> bool:
        """Whether how many go is found by measuring, beside what goes of spaces."""
        return self.drop == "auto"
