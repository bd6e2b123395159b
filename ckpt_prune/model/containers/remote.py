"""Remote code: what this tool writes, and what of it a config asks for."""

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.blocks import block_facts
from ckpt_prune.model.descriptions import family_for_config, has_description
from ckpt_prune.model.family import REMOTE_PREFIX
from ckpt_prune.model.runtimes import DECILM, DECILM_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

REMOTE_MODULE = "modeling_pruned"
"""Name, without suffix, of the file of remote code that an output carries."""
MLX_MODULE, MLX_KEY = "mlx_pruned", "model_file"
"""Name, without suffix, of the file that builds an output in MLX-LM, and the config key that names it there."""
RANKS_KEY = "ckpt_prune_ranks"
"""Config key of the ranks of linear modules that two thin ones stand in for."""
BLOCKS_KEY = "ckpt_prune_blocks"
"""Config key of the family's facts about its blocks that remote code needs."""


def is_own_code(path: Path) -> bool:
    """Return True if a file of code has the bytes of this package's file of its name."""
    return path.read_bytes() == (files("ckpt_prune") / path.name).read_bytes()


def carried_code(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return the files of code that an output's config.json names, with their text; none of a stock output.

    UserError if it asks for code that is not this tool's.
    """
    named = [REMOTE_MODULE] if remote_class(config, folder) else []
    if named and config.get(MLX_KEY) == f"{MLX_MODULE}.py":
        named.append(MLX_MODULE)
    return read_code(named)


def read_code(modules: Iterable[str]) -> dict[str, str]:
    """Return the files of modules that outputs carry, with their text."""
    code = [files("ckpt_prune") / f"{module}.py" for module in modules]
    return {file.name: file.read_text(encoding="utf-8") for file in code}


def remote_class(config: dict[str, Any], folder: Path) -> str | None:
    """Return the class of `modeling_pruned` that a config.json's `auto_map` asks for; None if it asks for no code.

    An output with a head asks for two classes: its own, which `architectures` names, and its base model. One may also
    ask for that of its config.
    UserError if it asks for code that is not this tool's.
    """
    auto_map = config.get("auto_map")
    if not auto_map:
        return None
    targets = {str(target) for target in auto_map.values()} if isinstance(auto_map, dict) else set()
    classes = family_for_config(config).classes if has_description(config) else {}
    if DECILM in (config.get("architectures") or []):
        targets -= {f"{REMOTE_MODULE}.{config_class}" for config_class in DECILM_FAMILIES.values()}
    own_classes = {f"{REMOTE_MODULE}.{REMOTE_PREFIX}{name}" for name in classes}
    named = {f"{REMOTE_MODULE}.{name}" for name in config.get("architectures") or []}
    if targets and targets <= own_classes and (len(targets) == 1 or targets & named):
        return min(targets & named or targets).removeprefix(f"{REMOTE_MODULE}.")
    raise UserError(f"{folder} asks for remote code that is not this tool's (auto_map in config.json): it is not run")


def remote_model_class(name: str) -> "type[PreTrainedModel]":
    """Return a class of `modeling_pruned` by the name that `remote_class` returned."""
    from ckpt_prune import modeling_pruned

    model_class: type[PreTrainedModel] = getattr(modeling_pruned, name)
    return model_class


def with_block_facts(config: "PreTrainedConfig", remote_class: str) -> "PreTrainedConfig":
    """Add to the config of an output the facts that outputs of earlier versions had in their code, in place."""
    if getattr(config, BLOCKS_KEY, None) is None:
        family = family_for_config(config.to_dict()).of(remote_class.removeprefix(REMOTE_PREFIX))
        setattr(config, BLOCKS_KEY, block_facts(family, lambda name: family.dimension(config, name)))
    return config
