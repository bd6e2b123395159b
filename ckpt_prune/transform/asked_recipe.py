"""The recipe or the plan that options ask for, read before the model is: without transformers, which takes seconds."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_prune.devices import resolve_device
from ckpt_prune.errors import UserError
from ckpt_prune.options import PruneOptions, RecipeOptions, has_data
from ckpt_prune.planning.plan import Plan, read_plan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.recipe_file import load_recipe
from ckpt_prune.planning.recipe_places import RecipeFile, locate_recipe
from ckpt_prune.planning.records import Origin
from ckpt_prune.planning.shipped import DEFAULT_RECIPE
from ckpt_prune.planning.sizes import asked_size


@dataclass(frozen=True)
class AskedRecipe:
    """Options, and what they want done.

    Attributes:
        options: as they were given.
        recipe: with the changes that options make to it.
        plan: where one is to be applied.
        device: where the work is done.
        origin: where the recipe, or that of the plan, was fetched from; None for one that was here.
    """

    options: PruneOptions
    recipe: Recipe
    plan: Plan | None
    device: torch.device
    origin: Origin | None


def read_recipe(options: PruneOptions) -> AskedRecipe:
    """Read recipe or plan.

    Args:
        options: that do not contradict each other by themselves.

    Raises:
        UserError: options that do not go with it, or what cannot be read.
    """
    device = resolve_device(options.device)
    plan = options.plan if options.plan is None or isinstance(options.plan, Plan) else read_plan(Path(options.plan))
    if plan is not None:
        recipe, origin = plan.recipe, plan.origin
    else:
        file, recipe = recipe_of(options)
        origin = file.origin
    if has_data(options, options) and recipe.recovery is None and not runs_model(recipe):
        given = "--text" if options.text else "--images" if options.images is not None else "--audio"
        if plan is not None:
            raise UserError(f"a plan has settled its statistics: {given} does not go with it")
        if options.statistics is not None:
            raise UserError(f"give --statistics or {given}, not both")
    if options.perplexity_after is not None and recipe.recovery is None:
        raise UserError(f"--perplexity-after is for recipes with recovery, which {recipe.name} has not")
    if options.perplexity_after is not None and recipe.recovery is not None and recipe.recovery.method == "scales":
        raise UserError("--perplexity-after is for recovery block by block, and scales are fitted to all at the end")
    return AskedRecipe(options, recipe, plan, device, origin)


def recipe_of(options: RecipeOptions) -> tuple[RecipeFile, Recipe]:
    """A recipe's file, and the recipe with the changes that options make to it.

    Raises:
        UserError: it cannot be read.
    """
    file = locate_recipe(DEFAULT_RECIPE if options.recipe is None else options.recipe)
    changes = options.overrides
    if options.container is not None:
        changes = (*changes, f"container={options.container}")
    return file, load_recipe(file, changes, options.ratio, asked_size(options.sizes, options.ratio))


def runs_model(recipe: Recipe) -> bool:
    """Whether a recipe runs the model itself, beside any statistics that its blocks are chosen by."""
    return recipe.depth is not None and recipe.depth.runs_model
