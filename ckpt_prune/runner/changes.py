"""List the keys in which the recipe that is run differs from the one that was asked for, each with the reason."""

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_prune.job.prepared import Prepared, begin
from ckpt_prune.job.report import RecipeChange
from ckpt_prune.model.containers.choosing import unprunable_spaces
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import ALIKE, recipe_space

_MULTIPLE = "multiple_of"


def changes_of(prepared: Prepared) -> list[RecipeChange]:
    """Return what the model, the data and the runtimes make another of than the recipe says.

    A size that becomes ratios, and what is chosen by measuring, are what the recipe asks for, and not among them.
    """
    whole, job = prepared.whole, prepared.job
    written, used = job.written or job.recipe, begin(job).recipe
    if used.target != "dense" and whole.statistics is not None and not whole.sequential and whole.plan is None:
        used = used.model_copy(update={"target": "dense"})
    before, after = (recipe.model_dump(mode="json", by_alias=True) for recipe in (written, used))
    return [
        RecipeChange(key=key, asked=old, used=new, why=_explain(key, old, new, whole.model))
        for key, old, new in _differences(before, after)
    ]


def change_lines(prepared: Prepared) -> Iterator[str]:
    """Say what is not as the recipe says, but what other lines tell: spaces without a stock class, and multiples."""
    left_whole = {f"spaces.{name}" for name in prepared.whole.left_whole}
    for change in changes_of(prepared):
        if change.key not in left_whole and not change.key.endswith(_MULTIPLE):
            yield change.words


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys of which two recipes have other values; a space that one of them lacks is one key."""
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{above}{key}.")
        else:
            yield f"{above}{key}", before, after


def _share_width_key(model: Model, space: str) -> bool:
    """Return whether one config key says how wide a space and the one are that it is pruned as, also of experts."""
    first = {recipe_space(name): name for name in reversed(model.family.spaces)}
    one, other = first.get(space), first.get(ALIKE[space])
    return one is not None and other is not None and model.share_width_key(one, other)


def _explain(key: str, old: Any, new: Any, model: Model) -> str:
    space = key.removeprefix("spaces.")
    if key.endswith(_MULTIPLE):
        return "that is what runs_on, export or quantize want"
    if key == "target":
        if new == "dense":
            return "statistics are of the dense model alone; give --text or --images for the other"
        return "a norm follows the layers that are fitted to the drift, and would enlarge their corrections"
    if old is None and space in ALIKE and not _share_width_key(model, space):
        return f"it is pruned as {ALIKE[space]} is; --set spaces.{space}.ratio=0 leaves it whole"
    if old is None:
        return f"{model.family.model_type} has one width for it and another space of the recipe"
    refused = unprunable_spaces(model)
    if space in refused:
        return refused[space]
    described = model.family.spaces.get(space)
    if described is not None and described.whole is not None:
        return f"{space} stay whole: {described.whole}"
    found = model.family.found
    if found is not None and space in found.whole:
        return f"{space} stay whole: {found.whole[space].partition(': ')[0]}"
    return "its ratio is 0" if isinstance(old, dict) and old.get("ratio") == 0 else "this model has none of its units"
