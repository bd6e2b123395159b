"""What `recipe list` prints: lines, and the same for JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from ckpt_prune.job.names import Goal
from ckpt_prune.recipe.catalogue import GOALS, Entry, Loads
from ckpt_prune.recipe.shipped import DEFAULT_RECIPE


def recipe_lines(groups: Mapping[Goal, Sequence[Entry]]) -> Iterable[str]:
    """Recipes by what they are for: a heading and a table for each goal, then what the columns say."""
    named = max(len(entry.recipe.name) for entries in groups.values() for entry in entries)
    loads = max(map(len, get_args(Loads)))
    needs = max(len(entry.needs) for entries in groups.values() for entry in entries)
    for goal, entries in groups.items():
        yield f"{GOALS[goal]}:"
        yield f"  {'recipe':<{named}}  {'time':>5}  {'loads with':<{loads}}  {'data':<{needs}}  what it does"
        for entry in entries:
            recipe = entry.recipe
            default = " (the default)" if recipe.name == DEFAULT_RECIPE else ""
            time = "-" if recipe.time is None else f"{recipe.time:g}"
            yield (
                f"  {recipe.name:<{named}}  {time:>5}  {entry.loads:<{loads}}  {entry.needs:<{needs}}  "
                f"{recipe.summary}{default}"
            )
        yield ""
    yield "time: of pruning, as a multiple of ridge. stock: classes of transformers; own code: ckpt_prune.load, or"
    yield "remote code. data: any one of those named will do (--text, --images for a vision model, --statistics)."


def recipe_data(entry: Entry) -> dict[str, Any]:
    """A recipe of the list, for JSON."""
    recipe = entry.recipe
    return {
        "name": recipe.name,
        "goal": entry.goal,
        "summary": recipe.summary,
        "source": recipe.source,
        "target": recipe.target,
        "loads": entry.loads,
        "data": list(entry.data),
        "calibration": entry.calibration,
        "time": recipe.time,
        "default": recipe.name == DEFAULT_RECIPE,
    }
