"""Whether final norm and head of an output make the dense model's logits, from the same states."""

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.context import image_size
from ckpt_prune.model.model import Model
from ckpt_prune.stages.hidden.bases import stream_scale
from ckpt_prune.stages.rotation.absorbing import residual_of, subtract_mean
from ckpt_prune.stages.shared.equality import tolerance

_TOKENS = 8


def compare_logits(checkpoint: Checkpoint, model: Model, basis: Tensor, *, tied: bool) -> tuple[bool, str]:
    """Give states that lie in a basis (d, k) to both models.

    The final norm's bias, over its gains, has lost what lies outside the basis. If one table stays embedding and head,
    so has all that the head reads.
    """
    width, kept = basis.shape
    inputs, tokens = _make_inputs(model)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, kept, generator=generator, dtype=torch.float64) @ basis.T
    centred = subtract_mean(states.T).T if residual_of(model.family).norm == "layer" else states
    on_disk = model.family.on_disk
    table, norm = f"{on_disk(model.family.embedding or '')}.weight", on_disk(residual_of(model.family).final)

    def read_projected(names: list[str]) -> dict[str, Tensor]:
        tensors = model.checkpoint.read(names)
        if tied and table in tensors:
            tensors[table] = (tensors[table].double() @ basis @ basis.T).float()
        if f"{norm}.bias" in tensors:
            weight = model.checkpoint.read([f"{norm}.weight"])[f"{norm}.weight"]
            gain = weight.double() + model.family.norm_offset
            shift = torch.where(gain == 0, 0.0, tensors[f"{norm}.bias"] / gain)
            tensors[f"{norm}.bias"] = (gain * (shift @ basis @ basis.T)).float()
        return tensors

    output = Model.of(checkpoint)
    stored = output.checkpoint
    expected = Readout(_make_factory(model), model.checkpoint.tensors, read_projected).outputs(inputs, states[None])
    narrow_states = stream_scale(kept, width) * centred @ basis
    logits = Readout(_make_factory(output), stored.tensors, stored.read).outputs(inputs, narrow_states[None])
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(logits, expected, strict=True))
    detail = f"from the same states final norm and head make logits that are {error:.2g} of the largest away"
    return error <= tolerance(_find_coarsest_dtype(output)), detail


def _find_coarsest_dtype(model: Model) -> torch.dtype:
    """Return the coarsest type outside the blocks: a head may be stored in another one than the embedding."""
    dtypes = {model.checkpoint.tensors[name].dtype for name in model.outside()}
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


def _make_factory(model: Model) -> BlockFactory:
    skeleton = stored_container(model.checkpoint).skeleton() if model.has_remote_code else None
    return BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32, skeleton=skeleton)


def _make_inputs(model: Model) -> tuple[dict[str, Tensor], int]:
    """Return what a model is called with, and how many tokens that makes."""
    if model.family.modality == "text":
        return {"input_ids": torch.arange(_TOKENS)[None]}, _TOKENS
    height, width = image_size(model.family, model.config)
    return {"pixel_values": torch.zeros(1, model.config.num_channels, height, width)}, model.tokens
