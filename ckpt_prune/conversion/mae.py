"""The encoder of a masked autoencoder as a ViT that reads every patch."""

from typing import Any

from transformers import ViTConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.conversion.plain import Plain, same

_ENCODER = ("embeddings.", "encoder.", "layernorm.")


def plain_of_mae(checkpoint: Checkpoint) -> Plain:
    """The encoder of a `vit_mae`, with a decoder or without.

    The order of the patches is another, which a transformer without a mask does not see.

    Raises:
        UserError: it has tensors of something else.
    """
    known = set(ViTConfig().to_dict()) - {"transformers_version", "architectures", "model_type"}
    config: dict[str, Any] = {key: value for key, value in checkpoint.config.items() if key in known}
    config |= {"model_type": "vit", "architectures": ["ViTModel"]}
    tensors, left = {}, 0
    for name, info in checkpoint.tensors.items():
        own = name.removeprefix("vit.")
        if own.startswith(_ENCODER):
            tensors[own] = same(name, info.stored_shape)
        elif name.startswith("decoder."):
            left += 1
        else:
            raise UserError(f"{checkpoint.path} has tensor {name}, which is none of a masked autoencoder's")
    notes = ["its encoder, which here reads every patch"]
    if left:
        notes.append(f"{left} tensors of the decoder are left out")
    return Plain(config, tensors, notes=tuple(notes))
