"""The part of a recipe that puts two thin linears in the place of one."""

from typing import Literal

from pydantic import Field

from ckpt_prune.planning.fields import Strict
from ckpt_prune.planning.names import Part


class LowRankRecipe(Strict):
    """Linear modules of every block as products of two (compensation/README.md, section 14)."""

    method: Literal["whitened", "plain"] = Field(
        "whitened",
        description="whitened: the least error of the outputs, by the Grams of the inputs (SVD-LLM); plain: the least "
        "change of the weights, without data.",
    )
    allocation: Literal["uniform", "energy"] = Field(
        "uniform",
        description="uniform: the same share of every weight's parameters, as published; energy: the ranks of least "
        "error, each as a share of its output's energy, for as many parameters in all.",
    )
    only: Part | None = Field(None, description="Factor these linear modules alone. Default: all.")
    multiple_of: int = Field(1, ge=1, description="Round ranks up to a multiple of this.")

    update: bool = Field(
        False,
        description="Then fit the second linear of each again, behind the blocks that are factored already, to what "
        "the dense weight makes of what reaches it (SVD-LLM's closed-form update). It needs target: sequential, and "
        "text or images.",
    )

    @property
    def whitens(self) -> bool:
        """Whether Grams are needed."""
        return self.method == "whitened"
