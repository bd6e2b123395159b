"""Read the recipe or the plan that options name, before the model: without transformers, which takes seconds.

torch takes seconds, too, and comes when the recipe is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.plan import Plan, read_plan
from ckpt_prune.model.runtimes import read_target
from ckpt_prune.options.commands import PruneOptions, RecipeOptions
from ckpt_prune.options.data import given_data
from ckpt_prune.recipe.origin import Origin
from ckpt_prune.recipe.places import locate_recipe
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE, RecipeFile
from ckpt_prune.recipe.sizes import asked_size
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.recovery.keys import Recovery
from ckpt_prune.stages.vocabulary.keys import VOCABULARY_ALONE, vocabulary_changes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChosenRecipe:
    """The recipe that options ask for.

    Attributes:
        recipe: with the changes that options make to it.
        plan: to be applied, or None.
        device: where the work is done.
        origin: where the recipe, or that of the plan, was fetched from; None if it was here.
        written: the recipe before runtimes wanted other widths of it.
    """

    recipe: Recipe
    plan: Plan | None
    device: "torch.device"
    origin: Origin | None
    written: Recipe


def read_recipe(options: PruneOptions) -> ChosenRecipe:
    """Read recipe or plan.

    Args:
        options: that do not contradict each other by themselves.
    """
    plan = options.plan if options.plan is None or isinstance(options.plan, Plan) else read_plan(Path(options.plan))
    if plan is not None and options.vocabulary is not None:
        raise UserError("a plan is of a model with all its tokens: --vocabulary does not go with it")
    if plan is not None:
        recipe, origin = plan.recipe, plan.origin
    else:
        file, recipe = recipe_of(options, options.mask_changes, options.vocabulary)
        origin = file.origin
    data_option = given_data(options)
    if data_option is not None and not any(keys.trains or keys.runs_model for keys in recipe.stages):
        if plan is not None:
            raise UserError(f"a plan has settled its statistics: {data_option} does not go with it")
        if options.statistics is not None:
            raise UserError(f"give --statistics or {data_option}, not both")
    recovery = recipe.get(Recovery)
    if options.perplexity_after is not None and recovery is None:
        raise UserError(f"--perplexity-after is for recipes with recovery, which {recipe.name} has not")
    if options.perplexity_after is not None and recovery is not None and recovery.at_the_end:
        raise UserError("--perplexity-after is for recovery block by block, and scales are fitted to all at the end")
    from ckpt_prune.parallel.devices import resolve_device

    return ChosenRecipe(recipe, plan, resolve_device(options.device), origin, recipe)


def recipe_of(
    options: RecipeOptions,
    mask_changes: Mapping[str, tuple[str, str | None]] | None = None,
    tokens: str | None = None,
) -> tuple[RecipeFile, Recipe]:
    """Return a recipe's file, and the recipe with the changes of the options; `tokens` are those of --vocabulary."""
    vocabulary = vocabulary_changes(tokens)
    default = VOCABULARY_ALONE if vocabulary and options.ratio is None else DEFAULT_RECIPE
    file = locate_recipe(default if options.recipe is None else options.recipe)
    changes = (*vocabulary, *options.overrides)
    if options.runs_on is not None:
        _check_runtimes(options.runs_on)
        changes = (*changes, f"runs_on=[{options.runs_on}]")
    if options.container is not None:
        changes = (*changes, f"container={options.container}")
    size = asked_size(options.sizes, options.ratio)
    return file, load_recipe(file, changes, options.ratio, size, mask_changes)


def _check_runtimes(runtimes: str) -> None:
    for text in runtimes.split(","):
        try:
            read_target(text)
        except UserError as error:
            raise UserError(f"--for {runtimes}: {error}") from error
