"""Opening a model that is to be measured or pruned."""

from dataclasses import replace

from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.containers.remote import remote_class
from ckpt_prune.errors import UserError


def open_checkpoint(model: str, *, trust: bool = False) -> Checkpoint:
    """Open a checkpoint to be measured or pruned.

    Args:
        model: a folder or a Hub id.
        trust: accept one that asks for code of its own; the code is not run.

    Raises:
        UserError: not a checkpoint, or it asks for remote code and is not trusted.
    """
    checkpoint = Checkpoint.open(model)
    try:
        remote_class(checkpoint.config, checkpoint.path)
    except UserError as error:
        if not trust:
            raise UserError(f"{error}; where you have read and trust it, say --trust-remote-code") from error
        config = {key: value for key, value in checkpoint.config.items() if key != "auto_map"}
        return replace(checkpoint, config=config)
    return checkpoint


def open_model(model: str, *, trust: bool = False) -> Model:
    """Open a checkpoint to be measured or pruned, with its family and config.

    Raises:
        UserError: also where the family is not known.
    """
    return Model.of(open_checkpoint(model, trust=trust))
