"""Find the modules in the folder of a stage by their names.

A recipe is read with the keys alone. `stage.py` is imported when a job is prepared, `show.py` when a report is shown.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckpt_prune.recipe.recipe import Recipe, StageKeys
from ckpt_prune.show.section import Section
from ckpt_prune.stages import STAGES

if TYPE_CHECKING:
    from ckpt_prune.job.stage import Stage


def stages_of(recipe: Recipe) -> "list[Stage[Any]]":
    """Return the stages of a recipe, in the order in which they work."""
    return [_stage_class(type(keys))(keys) for keys in recipe.stages]


def stage_sections(report: Any) -> list[Section]:
    """Return the sections of a report, by the function `sections` of each stage that has a `show.py`."""
    return [section for show in find_functions("sections", "show") for section in show(report)]


def source_lines(report: Any) -> list[str]:
    """Return what whoever changes an output further must know of it: `source_lines` of the stages' `show.py`."""
    return [line for tell in find_functions("source_lines", "show") for line in tell(report)]


def _stage_class(kind: type[StageKeys]) -> "type[Stage[Any]]":
    module = _find_module(kind, "stage")
    (stage,) = [each for each in vars(module).values() if isinstance(each, type) and vars(each).get("of") is kind]
    return stage


def find_functions(name: str, module: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a name that stages have in the module of a name, in the order of the stages."""
    for kind in STAGES:
        function = getattr(_find_module(kind, module), name, None)
        if function is not None:
            yield function


def _find_module(kind: type[StageKeys], name: str) -> ModuleType | None:
    path = f"{kind.__module__.rpartition('.')[0]}.{name}"
    return import_module(path) if find_spec(path) is not None else None
