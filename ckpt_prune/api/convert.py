"""`ckpt_prune.convert`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.types import AnyModel, AnyPath
from ckpt_prune.common.progress import show_progress
from ckpt_prune.options import path_of

if TYPE_CHECKING:
    from ckpt_prune.conversion.convert import Conversion


def convert(model: AnyModel, *, output: AnyPath, overwrite: bool = False, progress: bool = True) -> "Conversion":
    """Write a checkpoint as the stock class that computes the same, as `ckpt-prune convert` does.

    Args:
        model: a folder or Hub id of a plain vit, deit or deit3 of timm, or of a vit_mae.
        output: folder to write.
        overwrite: replace an existing output.
        progress: show bars on stderr.

    Raises:
        UserError: no stock class is known to compute the same, or the output may not be written.
    """
    from ckpt_prune.checkpoint.checkpoint import Checkpoint
    from ckpt_prune.conversion.convert import convert_checkpoint

    with show_progress(progress):
        return convert_checkpoint(Checkpoint.open(path_of(model)), Path(output), overwrite=overwrite)
