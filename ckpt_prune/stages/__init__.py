"""All stages, by their keys, in the order in which they work. A new stage is one import and one name here.

What stands beside `keys.py` in its folder is found by name (`stages.folders`). Modules named keys.py import no torch: a
recipe is read, checked and listed without it.
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.stages.bare.keys import Bare
from ckpt_prune.stages.depth.keys import Depth
from ckpt_prune.stages.export.keys import Export
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.low_rank.keys import LowRank
from ckpt_prune.stages.mask.keys import Mask
from ckpt_prune.stages.quantize.keys import Quantize
from ckpt_prune.stages.recovery.keys import Recovery
from ckpt_prune.stages.rotation.keys import Rotation
from ckpt_prune.stages.spaces.keys import Spaces
from ckpt_prune.stages.vocabulary.keys import Vocabulary

STAGES: tuple[type[StageKeys], ...] = (
    *(Vocabulary, Depth, Bare, Hidden, Rotation, Spaces, Mask, LowRank),
    *(Recovery, Quantize, Export),
)

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
