"""Facts about a statistics folder that need no torch, which takes seconds to import."""

from pathlib import Path
from typing import Literal

from ckpt_prune.checkpoint.folder_kinds import FolderKind
from ckpt_prune.common.errors import UserError

INDEX = "statistics.json"
STATISTICS = FolderKind(INDEX, "a statistics folder", unfinished="dropped")
"""The folder that `calibrate` writes."""

Collect = Literal["moments", "gram", "logits", "centred", "rotary", "linears", "fisher", "taylor"]
"""Kinds of statistics: vectors and Grams of consumers' inputs; moments of queries and keys, and with keys less their
mean over each sample; moments of rotary pairs; moments of the inputs of all other linear modules; the Fisher metric at
the outputs of consumers and of queries; Taylor importances of units, from gradients of the loss."""


def check_statistics(folder: Path) -> None:
    """Refuse a folder that holds no statistics."""
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} holds no {INDEX}: statistics are written by `ckpt-prune calibrate`")
