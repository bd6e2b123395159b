"""All stages, in the order in which they work. A new stage is one import and one name here.

Modules named stage.py import no torch: a recipe is read, checked and listed without it.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.depth.stage import Depth
from ckpt_prune.stages.export.stage import Export
from ckpt_prune.stages.hidden.stage import Hidden
from ckpt_prune.stages.low_rank.stage import LowRank
from ckpt_prune.stages.mask.stage import Mask
from ckpt_prune.stages.quantize.stage import Quantize
from ckpt_prune.stages.recovery.stage import Recovery
from ckpt_prune.stages.rotation.stage import Rotation
from ckpt_prune.stages.spaces.stage import Spaces

STAGES: tuple[type[Stage], ...] = (Depth, Hidden, Rotation, Spaces, Mask, LowRank, Recovery, Quantize, Export)

_KEYS: dict[str, Any] = {
    stage.key: (stage | None, Field(None, description=stage.summary))
    for stage in STAGES
    if stage.key not in Recipe.model_fields
}


if TYPE_CHECKING:
    RecipeWithKeys = Recipe
else:
    RecipeWithKeys = create_model("RecipeWithKeys", __base__=Recipe, **_KEYS)


class FullRecipe(RecipeWithKeys):
    """A recipe with a key for every stage: what a recipe file holds."""

    kinds = STAGES


Recipe.full = FullRecipe
