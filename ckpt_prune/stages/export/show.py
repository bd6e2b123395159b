"""Show in a report the files that a recipe exported."""

from collections.abc import Mapping
from typing import Any

from ckpt_prune.model.runtimes import types_exported
from ckpt_prune.stages.report import Report


def exported_types(report: Report, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types of what the recipe has exported; `config` is that of the output."""
    return types_exported(config, getattr(report.recipe, "export", None))
