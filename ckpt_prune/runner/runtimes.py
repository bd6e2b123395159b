"""Whether an output runs where its recipe says, and the multiples of widths that it needs there."""

from collections.abc import Callable, Iterable
from math import gcd, lcm

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import Change, Target, changes_of_config, read_target, refusal
from ckpt_prune.model.spaces import recipe_space
from ckpt_prune.stages.export.keys import Export
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.low_rank.keys import LowRank
from ckpt_prune.stages.quantize.keys import Quantize
from ckpt_prune.stages.rotation.keys import Rotation


def fit_to_runtimes(recipe: Recipe, model: Model, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with the multiples of widths that the runtimes of `runs_on` and groups of columns want.

    Raises:
        UserError: one of them does not take the output.
    """
    targets = [read_target(text) for text in recipe.runs_on or []]
    _check([*targets, *_target_of_export(recipe)], model, model.family.model_type, changes_of_recipe(recipe, model))
    columns = {recipe_space(name): model.unit_columns(name) for name in model.family.columns}
    quantize = recipe.get(Quantize)
    group = 1 if quantize is None else quantize.least_group

    def multiple(unit: int) -> int:
        return lcm(group // gcd(group, unit), *(target.multiple(unit) for target in targets))

    multiples, rows = {space: multiple(columns.get(space, 1)) for space in recipe.spaces}, multiple(1)
    if rows == 1:
        return recipe
    spaces = {
        space: settings.model_copy(update={"multiple_of": lcm(settings.multiple_of, multiples[space])})
        for space, settings in recipe.spaces.items()
    }
    changed = recipe.model_copy(update={"spaces": spaces})
    for stage in (recipe.get(Hidden), recipe.get(LowRank)):
        if stage is not None:
            rounded_stage = stage.model_copy(update={"multiple_of": lcm(stage.multiple_of, rows)})
            changed = changed.model_copy(update={stage.key: rounded_stage})
    rounded = ", ".join(f"{space} {multiple}" for space, multiple in multiples.items() if multiple > 1)
    if rounded:
        names = ", ".join([*(recipe.runs_on or []), *(["quantize"] if group > 1 else [])])
        say(f"for {names} widths are multiples of these numbers: {rounded}")
    return changed


def check_stored(prepared: Prepared) -> None:
    """Refuse an output whose container one of its recipe's runtimes does not take, as soon as it is known."""
    targets = [*(read_target(text) for text in prepared.recipe.runs_on or []), *_target_of_export(prepared.recipe)]
    if targets and prepared.container_known:
        config = prepared.output.container.config
        _check(targets, prepared.model, str(config["model_type"]), changes_of_config(config))


def _target_of_export(recipe: Recipe) -> list[Target]:
    """Return the runtime that the recipe's own export is for."""
    export = recipe.get(Export)
    return [Target("llama.cpp")] if export is not None and export.format == "gguf" else []


def _check(targets: Iterable[Target], model: Model, model_type: str, changes: set[Change]) -> None:
    for target in targets:
        reason = refusal(target.name, model_type, changes, generates=model.family.causal)
        if reason is not None:
            raise UserError(reason)


def changes_of_recipe(recipe: Recipe, model: Model) -> set[Change]:
    """Return what an output of a recipe will have, as far as that is known before anything is measured."""
    spaces = {recipe_space(name) for name in recipe.at(model.family).spaces}
    hidden, rotation = recipe.get(Hidden), recipe.get(Rotation)
    found: dict[Change, bool] = {
        "zeros": recipe.has("mask"),
        "few bits": recipe.has("quantize"),
        "low rank": recipe.has("low_rank"),
        "slicing": hidden is not None and hidden.kind == "per-block",
        "rotations": rotation is not None and rotation.kind == "per-layer",
    }
    if recipe.container != "padded":
        differ = recipe.widths == "per_layer"
        found |= {
            "widths": differ and bool(spaces & {"mlp", "shared", "experts"}),
            "heads": differ and bool(spaces & {"heads", "queries"}),
            "qk": "qk" in spaces,
            "rotary": "rotary" in spaces,
            "values": "values" in spaces,
        }
    return {change for change, has in found.items() if has}
