"""Comparing an output whose residual stream lies in one basis of fewer dimensions with the dense model.

The basis is in no file, but the output's embedding has absorbed it, and has far more rows than dimensions. So least
squares of that on the dense embedding find the basis, and the other tensors can be computed again with it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, get_args

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.names import RotationKind
from ckpt_prune.job.records import HiddenRecord, SiteRecord
from ckpt_prune.measure.streams.blocks import BlockFactory
from ckpt_prune.measure.streams.readout import Readout
from ckpt_prune.model.containers.container import stored_container
from ckpt_prune.model.cuts import list_cuts
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.stages.hidden.bases import stream_scale
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.rotation.absorbing import residual_of, subtract_mean
from ckpt_prune.stages.rotation.learner import RotationSizes, WrittenRotations
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint, not_learned
from ckpt_prune.verification.equality import BLOCKS, away, check_outside_blocks, list_mapped_tensors

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
    size = model.family.usual or model.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(1, model.config.num_channels, height, width)}, model.tokens


_ROWS = 8192
"""Rows of a table that are multiplied together, in float64."""
_TOLERANCE = 1e-3
"""Of a tensor's largest value: what rounding of the basis may move it by, besides two roundings of its dtype."""
_MOST_BENT = 1e-2
"""How far the columns of a basis may be from orthonormal."""


@dataclass(frozen=True)
class StreamBasis:
    """The basis that an output's embedding has absorbed, (d, k) float64, and what the embedding is multiplied by.

    `bent` is how far the columns came out from orthonormal.
    """

    directions: Tensor
    scale: float
    bent: float


def check_kept_stream(
    checkpoint: Checkpoint, dense: Checkpoint, report: Report, hidden: HiddenRecord
) -> tuple[bool | None, str]:
    """Find the basis, and compute tensors again with it: those outside the blocks, and those of some random blocks.

    Tensors that a compensation, a mask or a map rewrote are left out. Of pruned spaces the rows of kept units count.
    None if the embedding does not tell the basis.
    """
    model = Model.of(dense)
    basis = find_basis(checkpoint, model, hidden)
    if isinstance(basis, str):
        return None, f"no weight is compared: {basis}"
    if basis.bent > _MOST_BENT:
        return False, f"the embedding is not the dense one in a basis of {hidden.kept} dimensions"
    bases = (basis.directions,) * len(SlicedCheckpoint(model, "shared", hidden.kept).sublayers)
    untied = hidden.tied is False
    view = SlicedCheckpoint(model, "shared", hidden.kept, lambda _: bases, untied=untied, embedding_scale=basis.scale)
    blocks = sorted(random.SystemRandom().sample(range(model.blocks), min(BLOCKS, model.blocks)))
    largest, compared, uncompared = 0.0, 0, 0
    for name, expected in _recompute(view, report, blocks):
        if name not in checkpoint.tensors:
            return False, f"{name} is not there"
        if expected is None:
            uncompared += 1
            continue
        error = away(checkpoint.read([name])[name], expected)
        if error > tolerance(expected.dtype):
            return False, (
                f"{name} is not the dense model's in the basis of the embedding: {error:.2g} of its largest away"
            )
        largest, compared = max(largest, error), compared + 1
    more = f"; {plural(uncompared, 'rewritten tensor')} not compared" if uncompared else ""
    return True, (
        f"in the basis of {hidden.kept} dimensions that the embedding tells, {plural(compared, 'tensor')} outside the "
        f"blocks and in {len(blocks)} of {model.blocks} are the dense ones: {largest:.2g} of a tensor's largest value "
        f"away at most{more}"
    )


def tolerance(dtype: torch.dtype) -> float:
    """Return how far a tensor may be from what it is computed again as, in units of its largest value."""
    return _TOLERANCE + 2 * torch.finfo(dtype).eps


def find_basis(checkpoint: Checkpoint, model: Model, hidden: HiddenRecord) -> StreamBasis | str:
    """Find the basis by least squares of the output's tables on the dense ones, or say why they do not tell it.

    If norms subtract the mean, the tables are taken without theirs.
    """
    width, centred = hidden.dimensions, residual_of(model.family).norm == "layer"
    identity = (torch.eye(width, dtype=torch.float64),) * len(SlicedCheckpoint(model, "shared", width).sublayers)
    unsliced = SlicedCheckpoint(model, "shared", width, lambda _: identity)
    gram = torch.zeros(width, width, dtype=torch.float64)
    cross = torch.zeros(width, hidden.kept, dtype=torch.float64)
    noise, rows, dtype = 0.0, 0, torch.float32
    for name, axis in track(list(unsliced.starts.items()), "finding the basis", unit="tensor"):
        dense, output = (side.read([name])[name].movedim(axis, -1) for side in (unsliced, checkpoint))
        if output.shape != (*dense.shape[:-1], hidden.kept):
            return f"{name} is not of {hidden.kept} dimensions"
        dtype = output.dtype
        noise += torch.finfo(dtype).eps ** 2 / 4 * output.double().square().mean().item()
        dense, output = dense.reshape(-1, width), output.reshape(-1, hidden.kept)
        for x, y in zip(torch.split(dense, _ROWS), torch.split(output, _ROWS), strict=True):
            gram += x.double().T @ x.double()
            cross += x.double().T @ y.double()
        rows += len(output)
    values, vectors = torch.linalg.eigh(gram)
    # Without a mean, the direction of ones is in no row.
    values, vectors = values[int(centred) :], vectors[:, int(centred) :]
    least = float(values[0])
    if rows < width or least <= 1e-10 * float(values[-1]) or sqrt(width * noise / least) > tolerance(dtype):
        return "the embedding does not tell the basis that all weights have absorbed"
    solution = vectors @ ((vectors.T @ cross) / values[:, None])
    count = hidden.kept - centred
    left, lengths, right = torch.linalg.svd(solution, full_matrices=False)
    length = lengths[:count].square().mean().sqrt()
    bent = float((lengths[:count] / length - 1).abs().max()) if length > 0 else float("inf")
    directions = left[:, :count] @ right[:count]
    if centred:
        directions += 1 / sqrt(width * hidden.kept)
    return StreamBasis(directions, sqrt(hidden.kept / width) / float(length or 1), bent)


def _recompute(view: SlicedCheckpoint, report: Report, blocks: list[int]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the names of tensors with what they should be; None for one that was rewritten."""
    model = view.model
    prefixes = tuple(model.family.block.format(block=block) for block in range(model.blocks))
    outside = [name for name in view.names() if not name.startswith(prefixes)]
    for name in track(outside, "comparing", unit="tensor"):
        yield name, view.read([name])[name]
    for block in track(blocks, "comparing", unit="block"):
        tensors = view.block(block)
        sites = {expert_space(site.space, site.expert): site for site in report.sites if site.block == block}
        rewritten = _list_rewritten(model, report, block, sites) | list_mapped_tensors(report.depth, tensors)
        kept = {space: torch.tensor(site.kept, dtype=torch.int64) for space, site in sites.items()}
        for module, kind, dim, lines in list_cuts(model.remaining_lines(kept)):
            name = model.tensor(block, module, kind)
            if name in tensors:
                tensors[name] = tensors[name].index_select(dim, lines)
        for name, tensor in tensors.items():
            yield name, None if name in rewritten else tensor


def _list_rewritten(model: Model, report: Report, block: int, sites: dict[str, SiteRecord]) -> set[str]:
    """List the tensors of a block that compensation or a mask rewrote."""
    modules = {m for space, site in sites.items() for m in model.family.spaces[space].list_rewritten(site.method)}
    names = {model.tensor(block, module, kind) for module in modules for kind in KINDS}
    return names | {linear.weight for linear in report.linears}
