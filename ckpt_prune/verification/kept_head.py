"""Comparing what stands outside an output's blocks with the dense model: embedding, final norm and head."""

from typing import Any, get_args

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.job.names import RotationKind
from ckpt_prune.job.report import Report
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.runner.recomputing import away
from ckpt_prune.stages.hidden.bases import stream_scale
from ckpt_prune.stages.rotation.absorbing import residual_of, subtract_mean
from ckpt_prune.stages.rotation.learner import RotationSizes, WrittenRotations
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint, not_learned
from ckpt_prune.verification.equality import check_outside_blocks
from ckpt_prune.verification.kept_stream import find_basis, tolerance

_TOKENS = 8


def check_head(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool | None, str]:
    """Check that the output's head computes what the dense model's does; None if that cannot be told.

    If no tensor outside the blocks has absorbed a matrix, all of them are the dense ones. Otherwise random states are
    given to the final norm and the head of both models, and the logits are compared. How the tensors were written plays
    no part in that. A rotated embedding is compared with the dense one, rotated.
    """
    model = Model.of(dense)
    if report.rotation is not None:
        if report.rotation.kind not in get_args(RotationKind):
            return None, f"not compared: the report names a rotation {report.rotation.kind!r}, which is not known"
        kind: Any = report.rotation.kind
        if not RotatedCheckpoint(model, kind, not_learned).absorbs_ends:
            return check_outside_blocks(checkpoint, model)
        rotations = WrittenRotations.of_output(checkpoint.path, RotationSizes.of(kind, model))
        view = RotatedCheckpoint(model, kind, rotations)
        for name in view.starts:
            if away(checkpoint.read([name])[name], view.read([name])[name]) > tolerance(model.dtype):
                return False, f"{name} is not the dense model's, rotated"
        basis = rotations(model.blocks - 1)[0]
        assert basis is not None
        return _compare_logits(checkpoint, model, basis, tied=False)
    hidden = report.hidden
    if hidden is not None and hidden.energy and hidden.kind == "shared":
        stream = find_basis(match_checkpoint(checkpoint)[0], model, hidden)
        if isinstance(stream, str):
            return None, f"not compared: {stream}"
        return _compare_logits(checkpoint, model, stream.directions, tied=bool(hidden.tied))
    return check_outside_blocks(match_checkpoint(checkpoint)[0], model)


def _compare_logits(checkpoint: Checkpoint, model: Model, basis: Tensor, *, tied: bool) -> tuple[bool, str]:
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
            gain = tensors[f"{norm}.weight"].double() + model.family.norm_offset
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
    size = model.family.usual or model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(1, model.config.num_channels, height, width)}, model.tokens
