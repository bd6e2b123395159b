"""Which recipes a plan can be made by."""

from ckpt_prune.common.errors import UserError
from ckpt_prune.recipe.recipe import Recipe


def check_plannable(recipe: Recipe) -> None:
    """Refuse to plan what a plan cannot say."""
    if recipe.joint:
        first = [keys for keys in recipe.stages if keys.changes_model]
        steps = ", then ".join(keys.by_itself for keys in first)
        raise UserError(
            f"recipe {recipe.name} {', '.join(keys.does for keys in first)} and then prunes spaces of what is left, "
            "which no statistics are of yet: `ckpt-prune prune --text` (or --images) does "
            f"{'all' if len(first) > 1 else 'both'} at once; for a plan, {steps} first, "
            "then calibrate and plan what it has written, by a recipe of spaces alone such as best-uniform"
        )
    for keys in recipe.stages:
        keys.check_plannable(recipe)


def is_plannable(recipe: Recipe) -> bool:
    try:
        check_plannable(recipe)
    except UserError:
        return False
    return True
