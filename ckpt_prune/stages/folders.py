"""What stands in the folder of a stage beside its keys, found by the names of the modules.

A recipe is read with the keys alone. `stage.py` is imported when a job is prepared, `show.py` when a report is shown.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckpt_prune.job.recipe import Recipe, StageKeys
from ckpt_prune.show.section import Section
from ckpt_prune.stages import STAGES

if TYPE_CHECKING:
    from ckpt_prune.job.stage import Stage


def stages_of(recipe: Recipe) -> "list[Stage[Any]]":
    """Return the stages of a recipe, in the order in which they work."""
    return [_stage_class(type(keys))(keys) for keys in recipe.stages]


def stage_sections(report: Any) -> list[Section]:
    """Return what a report says of every stage: `sections` of `show.py` in its folder, where there is one."""
    shows = [_find_module(kind, "show") for kind in STAGES]
    sections: list[Sequence[Section]] = [show.sections(report) for show in shows if show is not None]
    return [section for several in sections for section in several]


def _stage_class(kind: type[StageKeys]) -> "type[Stage[Any]]":
    module = _find_module(kind, "stage")
    found = [each for each in vars(module).values() if isinstance(each, type) and vars(each).get("of") is kind]
    (stage,) = found
    return stage


def _find_module(kind: type[StageKeys], name: str) -> ModuleType | None:
    path = f"{kind.__module__.rpartition('.')[0]}.{name}"
    return import_module(path) if find_spec(path) is not None else None
