"""Remote code: what this tool writes, and what of it a config asks for."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ckpt_prune import modeling_pruned
from ckpt_prune.errors import UserError

REMOTE_MODULE = "modeling_pruned"
"""Name, without suffix, of the file of remote code that an output carries."""


def remote_class(config: dict[str, Any], folder: Path) -> str | None:
    """The class of `modeling_pruned` that a config.json's `auto_map` asks for; None where it asks for no code.

    Raises:
        UserError: it asks for code that is not this tool's.
    """
    auto_map = config.get("auto_map")
    if not auto_map:
        return None
    targets = {str(target) for target in auto_map.values()} if isinstance(auto_map, dict) else set()
    names = {target.removeprefix(f"{REMOTE_MODULE}.") for target in targets}
    if len(targets) == 1 and targets == {f"{REMOTE_MODULE}.{name}" for name in names if _is_ours(name)}:
        return names.pop()
    raise UserError(f"{folder} asks for remote code that is not this tool's (auto_map in config.json): it is not run")


def _is_ours(name: str) -> bool:
    found = getattr(modeling_pruned, name, None)
    return (
        isinstance(found, type)
        and issubclass(found, modeling_pruned.PrunedMixin)
        and issubclass(found, PreTrainedModel)
    )
