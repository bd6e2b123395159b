"""The keys of `scale`: multiply the up projections of blocks by a number."""

from pydantic import Field

from ckpt_prune.recipe.recipe import StageKeys


class Scale(StageKeys):
    """One factor for the up projection of every mlp."""

    key = "scale"
    summary = "Multiply the up projection of every mlp by a number."
    prunes = False

    factor: float = Field(2.0, gt=0, description="What it is multiplied by.")

    @property
    def beside_plan(self) -> str:
        return f"the mlp is scaled by {self.factor:g} afterwards, of which a plan says nothing"
