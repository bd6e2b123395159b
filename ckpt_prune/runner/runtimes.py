"""Whether an output runs where its recipe says, and the multiples of widths that it needs there."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from math import gcd, lcm

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.composites import head_of_whole
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import Change, Target, changes_of_class, changes_of_config, read_target, refusal
from ckpt_prune.model.spaces import recipe_space
from ckpt_prune.recipe.recipe import Recipe


def fit_to_runtimes(recipe: Recipe, model: Model, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with the multiples of widths that the runtimes of `runs_on` and groups of columns want.

    Raises:
        UserError: one of them does not take the output.
    """
    _check(_targets(recipe), model, model.family.model_type, changes_of_recipe(recipe, model))
    named = [read_target(text) for text in recipe.runs_on or []]
    if any(target.name == "llama.cpp" for target in named) and find_spec("gguf") is not None:
        from ckpt_prune.gguf.file_plan import check_file

        check_file(model)  # what llama.cpp does not compute or read, no output of it computes or reads
    columns = {recipe_space(name): model.unit_columns(name) for name in model.family.columns}
    groups = {keys.key: keys.column_group for keys in recipe.stages if keys.column_group > 1}

    def multiple(unit: int) -> int:
        column_groups = (group // gcd(group, unit) for group in groups.values())
        return lcm(*column_groups, *(target.multiple(unit) for target in named))

    # Whole experts are no part of a row: any number of them may stay.
    multiples = {space: 1 if space == "experts" else multiple(columns.get(space, 1)) for space in recipe.spaces}
    rows = multiple(1)
    if rows == 1:
        return recipe
    spaces = {
        space: settings.model_copy(update={"multiple_of": lcm(settings.multiple_of, multiples[space])})
        for space, settings in recipe.spaces.items()
    }
    changed = recipe.model_copy(update={"spaces": spaces})
    stages = {keys.key: (keys, keys.in_multiples_of(rows)) for keys in recipe.stages}
    changed = changed.model_copy(update={key: new for key, (old, new) in stages.items() if new is not old})
    rounded = ", ".join(f"{multiple} ({space})" for space, multiple in multiples.items() if multiple > 1)
    if rounded:
        names = " and ".join([*(recipe.runs_on or []), *groups])
        but = f", but allocation {recipe.allocation} does not keep to them: take another" if recipe.ranks_blocks else ""
        say(f"for {names}, widths {'should be' if but else 'are'} multiples of {rounded}{but}")
    return changed


def check_stored(prepared: Prepared) -> None:
    """Refuse an output whose container one of its recipe's runtimes does not take, as soon as it is known."""
    targets = _targets(prepared.recipe)
    if targets and prepared.container_known:
        config = prepared.output.container.config
        _check(targets, prepared.model, str(config["model_type"]), changes_of_config(config))
        if any(target.name == "llama.cpp" for target in targets) and find_spec("gguf") is not None:
            from ckpt_prune.gguf.layout import check_settings

            check_settings(prepared.model, config)


def _targets(recipe: Recipe) -> list[Target]:
    """Return the runtimes that an output is for: those that the recipe names, and those of what it exports."""
    named = [read_target(text) for text in recipe.runs_on or []]
    return named + [Target(name) for keys in recipe.stages for name in keys.runtimes]


def _check(targets: Iterable[Target], model: Model, model_type: str, changes: set[Change]) -> None:
    family = model.family
    for target in targets:
        generates = family.causal or head_of_whole(model.checkpoint) is not None
        # Decoders whose last hidden states are embeddings, too, but for types that are encoders there.
        generates |= target.name == "llama.cpp" and family.used_for == "sentence-similarity" and family.has_causal
        generates &= model_type not in target.runtime.encoders or family.causal
        reason = refusal(target.name, model_type, changes, generates=generates)
        if reason is not None:
            raise UserError(reason)


def changes_of_recipe(recipe: Recipe, model: Model) -> set[Change]:
    """Return what an output of a recipe will have, as far as that is known before anything is measured."""
    spaces = {recipe_space(name) for name in recipe.at(model.family).spaces}
    of_class = changes_of_class(model.checkpoint.config)
    changes = {change for keys in recipe.stages for change in keys.changes(recipe, spaces)} | of_class
    return changes | {"latent blocks"} if of_class and changes & {"widths", "heads"} else changes
