"""Comparing what stands outside an output's blocks with the dense model: embedding, final norm and head."""

from typing import Any, get_args

import torch
from torch import Tensor

from ckpt_prune.architectures.fitting import fitted
from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.readout import Readout
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.progress import track
from ckpt_prune.containers.container import stored_container
from ckpt_prune.job.names import RotationKind
from ckpt_prune.report.model import Report
from ckpt_prune.rotations.absorbing import residual_of, without_mean
from ckpt_prune.rotations.learning import RotationSizes, WrittenRotations
from ckpt_prune.rotations.rotated import RotatedCheckpoint, not_learned
from ckpt_prune.rotations.slicing import scale_of
from ckpt_prune.runner.recomputing import away
from ckpt_prune.verification.kept_stream import allowed, find_basis

_TOKENS = 8


def kept_head(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> tuple[bool | None, str]:
    """Check that the output's head computes what the dense model's does.

    If no tensor outside the blocks has absorbed a matrix, all of them are the dense ones. Otherwise random states are
    given to the final norm and the head of both models, and the logits are compared. How the tensors were written plays
    no part in that. A rotated embedding is compared with the dense one, rotated.

    Args:
        checkpoint: the output.
        dense: what it was made from, without the blocks that are gone.
        report: the output's.

    Returns:
        Whether the two are the same; None if the matrix is not known. And what was compared.
    """
    model = Model.of(dense)
    basis: Tensor | str | None = None
    if report.rotation is not None:
        if report.rotation.kind not in get_args(RotationKind):
            return None, f"not compared: the report names a rotation {report.rotation.kind!r}, which is not known"
        kind: Any = report.rotation.kind
        if RotatedCheckpoint(model, kind, not_learned).absorbs_ends:
            written = WrittenRotations.of_output(checkpoint.path, RotationSizes.of(kind, model))
            basis, view = written(model.blocks - 1)[0], RotatedCheckpoint(model, kind, written)
            for name in view.starts:
                if away(checkpoint.read([name])[name], view.read([name])[name]) > allowed(model.dtype):
                    return False, f"{name} is not the dense model's, rotated"
    elif report.hidden is not None and report.hidden.energy and report.hidden.kind == "shared":
        found = find_basis(fitted(checkpoint)[0], model, report.hidden)
        basis = found if isinstance(found, str) else found[0]
    if isinstance(basis, str):
        return None, f"not compared: {basis}"
    if basis is None:
        return _same_tensors(checkpoint if report.rotation is not None else fitted(checkpoint)[0], model)
    return _same_logits(checkpoint, model, basis, tied=report.hidden is not None and bool(report.hidden.tied))


def _same_tensors(checkpoint: Checkpoint, model: Model) -> tuple[bool, str]:
    prefixes = tuple(model.family.block.format(block=block) for block in range(model.blocks))
    names, dense = [name for name in checkpoint.tensors if not name.startswith(prefixes)], model.outside()
    if strange := set(names) ^ set(dense):
        return False, f"{min(strange)} is outside the blocks of one of the two models alone"
    for name in track(dense, "comparing", unit="tensor"):
        ours, theirs = (each.read([name])[name] for each in (checkpoint, model.checkpoint))
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            return False, f"{name} is outside the blocks and is not the dense model's"
    return True, f"{len(dense)} tensors outside the blocks are the dense ones, bit for bit"


def _same_logits(checkpoint: Checkpoint, model: Model, basis: Tensor, *, tied: bool) -> tuple[bool, str]:
    """Give states that lie in a basis (d, k) to both models.

    The final norm's bias, over its gains, has lost what lies outside the basis. If one table stays embedding and head,
    so has all that the head reads.
    """
    wide, kept = basis.shape
    generator = torch.Generator().manual_seed(0)
    batch, tokens = _batch(model)
    states = torch.randn(tokens, kept, generator=generator, dtype=torch.float64) @ basis.T
    seen = without_mean(states.T).T if residual_of(model.family).norm == "layer" else states
    on_disk = model.family.on_disk
    table, norm = f"{on_disk(model.family.embedding or '')}.weight", on_disk(residual_of(model.family).final)

    def read(names: list[str]) -> dict[str, Tensor]:
        tensors = model.checkpoint.read(names)
        if tied and table in tensors:
            tensors[table] = (tensors[table].double() @ basis @ basis.T).float()
        if f"{norm}.bias" in tensors:
            gain = tensors[f"{norm}.weight"].double() + model.family.norm_offset
            shift = torch.where(gain == 0, 0.0, tensors[f"{norm}.bias"] / gain)
            tensors[f"{norm}.bias"] = (gain * (shift @ basis @ basis.T)).float()
        return tensors

    whole, output = (_factory(each) for each in (model, Model.of(checkpoint)))
    theirs = Readout(whole, model.checkpoint.tensors, read).outputs(batch, states[None])
    narrow = output.model.checkpoint
    ours = Readout(output, narrow.tensors, narrow.read).outputs(batch, (scale_of(kept, wide) * seen @ basis)[None])
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    words = f"from the same states final norm and head make logits that are {off:.2g} of the largest away"
    return off <= allowed(model.dtype), words


def _factory(model: Model) -> BlockFactory:
    skeleton = stored_container(model.checkpoint).skeleton() if model.own_code else None
    return BlockFactory(model, device=torch.device("cpu"), dtype=torch.float32, skeleton=skeleton)


def _batch(model: Model) -> tuple[dict[str, Tensor], int]:
    """What a model is called with, and how many tokens that makes."""
    if model.family.modality == "text":
        return {"input_ids": torch.arange(_TOKENS)[None]}, _TOKENS
    size = model.family.usual or model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(1, model.config.num_channels, height, width)}, model.tokens
