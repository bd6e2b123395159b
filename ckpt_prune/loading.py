"""Loading any output of this tool, without running code from its folder."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from ckpt_prune import modeling_pruned
from ckpt_prune.architectures.family import family_of
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
    targets = list(auto_map.values()) if isinstance(auto_map, dict) else []
    for target in targets:
        module, _, name = str(target).partition(".")
        if module == REMOTE_MODULE and isinstance(getattr(modeling_pruned, name, None), type):
            return name
    raise UserError(f"{folder} asks for remote code that is not this tool's (auto_map in config.json): it is not run")


def load(
    path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | str | None = None
) -> PreTrainedModel:
    """Load a checkpoint that this tool wrote, a stock one or one with blocks of different widths.

    The whole model is held in memory. Code in the folder is never run: a checkpoint with remote code is built by the
    same implementation inside this package (`ckpt_prune.modeling_pruned`).

    Args:
        path: the folder.
        device: where the model goes.
        dtype: of the parameters; the checkpoint's own by default.

    Raises:
        UserError: the folder has no config, is of no known family, or its remote code is not this tool's.

    Example:
        >>> import ckpt_prune
        >>> model = ckpt_prune.load("pruned")  # doctest: +SKIP
    """
    folder = Path(path)
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no readable config.json") from error
    name = remote_class(raw, folder)
    if name is None:
        auto: Any = getattr(transformers, family_of(raw).auto_class)
        model = auto.from_pretrained(folder, local_files_only=True, dtype=dtype or "auto")
    else:
        architecture = getattr(modeling_pruned, name)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = architecture.from_pretrained(folder, config=config, local_files_only=True, dtype=dtype or "auto")
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
