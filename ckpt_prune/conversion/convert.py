"""Reads checkpoints of timm and masked autoencoders as the stock class that computes the same."""

from typing import Any

from transformers import ViTConfig

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.conversion.stock_checkpoint import NewTensor, StockCheckpoint
from ckpt_prune.conversion.timm import vit_of_timm
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.containers.remote import carried_code
from ckpt_prune.model.skeleton import stock_names
from ckpt_prune.model.supported import is_timm


def stock_of_checkpoint(checkpoint: Checkpoint) -> StockCheckpoint:
    """Return a checkpoint as the stock class that computes the same, or with its adapter merged."""
    if checkpoint.adapter is not None:
        tensors = {
            name: NewTensor.of(checkpoint, [name], info.stored_shape) for name, info in checkpoint.tensors.items()
        }
        notes = (f"{checkpoint.path} with the adapter merged",)
        code = carried_code(checkpoint.config, checkpoint.path)
        return StockCheckpoint.of(checkpoint, checkpoint.config, tensors, texts=code, notes=notes)
    if is_timm(checkpoint.config):
        stock = vit_of_timm(checkpoint)
    elif checkpoint.config.get("model_type") == "vit_mae":
        stock = _vit_of_mae(checkpoint)
    else:
        model_type = checkpoint.config.get("model_type")
        raise UserError(
            f"{checkpoint.path} is a {model_type}: `convert` takes folders of timm and vit_mae, adapters and GGUF files"
        )
    for name, tensor in stock.tensors.items():
        if tensor.dtype.itemsize == 1:
            raise UserError(
                f"{checkpoint.path} holds {name} in one byte a number; give the checkpoint it was made from"
            )
    shapes, architecture = (
        {name: tensor.shape for name, tensor in stock.tensors.items()},
        stock.config["architectures"][0],
    )
    check_shapes(shapes, stock_names(stock.config, architecture), f"{checkpoint.path} as {architecture}")
    return stock


_ENCODER = ("embeddings.", "encoder.", "layernorm.")


def _vit_of_mae(checkpoint: Checkpoint) -> StockCheckpoint:
    """Return the encoder of a masked autoencoder, with a decoder or without, as a ViT that reads every patch.

    The autoencoder orders patches differently, which makes no difference to a transformer without a mask.
    """
    vit_keys = set(ViTConfig().to_dict()) - {"transformers_version", "architectures", "model_type"}
    config: dict[str, Any] = {key: value for key, value in checkpoint.config.items() if key in vit_keys}
    config |= {"model_type": "vit", "architectures": ["ViTModel"]}
    tensors, left_out = {}, 0
    for name, info in checkpoint.tensors.items():
        vit_name = name.removeprefix("vit.")
        if vit_name.startswith(_ENCODER):
            tensors[vit_name] = NewTensor.of(checkpoint, [name], info.stored_shape)
        elif name.startswith("decoder."):
            left_out += 1
        else:
            raise UserError(f"{checkpoint.path} has tensor {name}, which a masked autoencoder does not have")
    notes = ["its encoder, which here reads every patch"]
    if left_out:
        notes.append(f"{left_out} tensors of the decoder are left out")
    return StockCheckpoint.of(checkpoint, config, tensors, notes=tuple(notes))
