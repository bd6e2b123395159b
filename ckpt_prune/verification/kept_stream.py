"""Comparing an output whose residual stream lies in one basis of fewer dimensions with the dense model.

The basis is in no file. The embedding has absorbed it, and has far more rows than dimensions: so the dense one and that
of the output tell it, and the other tensors can be computed again with it.
"""

import random
from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor

from ckpt_prune.architectures.cuts import touched
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import space_of
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import HiddenRecord
from ckpt_prune.report.model import Report
from ckpt_prune.rotations.absorbing import residual_of
from ckpt_prune.rotations.sliced import SlicedCheckpoint
from ckpt_prune.runner.recomputing import BLOCKS, away
from ckpt_prune.verification.kept_blocks import mapped_tensors

_ROWS = 8192
"""Of a table that are multiplied together, in float64."""
_LIMIT = 1e-3
"""Of a tensor's largest value: what a basis that is found may move it by, beside two roundings of its dtype."""
_BENT = 1e-2
"""How far a basis that is found may be from orthonormal columns."""


def kept_in_basis(
    checkpoint: Checkpoint, dense: Checkpoint, report: Report, hidden: HiddenRecord
) -> tuple[bool | None, str]:
    """Find the basis that the embedding has absorbed, and compute some of the other tensors again with it.

    Those are all tensors outside the blocks, and in some blocks, chosen at random, all that no compensation and no map
    of a gap rewrote: of pruned spaces the rows of the kept units.

    Args:
        checkpoint: the output.
        dense: what it was made from, without the blocks that are gone.
        report: the output's.
        hidden: its record of the stream, of one basis.

    Returns:
        Whether they are the same; None where the embedding does not tell the basis. And what was found.
    """
    model = Model.of(dense)
    found = find_basis(checkpoint, model, hidden)
    if isinstance(found, str):
        return None, f"no weight is compared: {found}"
    basis, scale, bent = found
    if bent > _BENT:
        return False, f"the embedding is not the dense one in a basis of {hidden.kept} dimensions"
    untied = hidden.tied is False
    places = len(SlicedCheckpoint(model, "shared", hidden.kept).sublayers)
    view = SlicedCheckpoint(
        model, "shared", hidden.kept, lambda _: (basis,) * places, untied=untied, embedding_scale=scale
    )
    chosen = sorted(random.SystemRandom().sample(range(model.blocks), min(BLOCKS, model.blocks)))
    largest, count, left = 0.0, 0, 0
    for name, ours, theirs in _pairs(checkpoint, view, report, chosen):
        if ours is None:
            return False, f"{name} is not there"
        if theirs is None:
            left += 1
            continue
        off = away(ours, theirs)
        if off > allowed(theirs.dtype):
            return (
                False,
                f"{name} is not the dense model's in the basis of the embedding: {off:.2g} of its largest away",
            )
        largest, count = max(largest, off), count + 1
    more = f"; {plural(left, 'rewritten tensor')} not compared" if left else ""
    return True, (
        f"in the basis of {hidden.kept} dimensions that the embedding tells, {plural(count, 'tensor')} outside the "
        f"blocks and in {len(chosen)} of {model.blocks} are the dense ones: {largest:.2g} of a tensor's largest value "
        f"away at most{more}"
    )


def allowed(dtype: torch.dtype) -> float:
    """How far a tensor may be from what it is computed again as, in units of its largest value."""
    return _LIMIT + 2 * torch.finfo(dtype).eps


def find_basis(checkpoint: Checkpoint, model: Model, hidden: HiddenRecord) -> tuple[Tensor, float, float] | str:
    """The basis (d, k) float64, what the output's embedding is multiplied by, and how far from orthonormal it came out.

    Least squares: tables of the dense model, without their mean where norms subtract it, against the output's. In place
    of all, why they do not tell it.
    """
    wide, centred = hidden.dimensions, residual_of(model.family).norm == "layer"
    places = len(SlicedCheckpoint(model, "shared", wide).sublayers)
    whole = SlicedCheckpoint(model, "shared", wide, lambda _: (torch.eye(wide, dtype=torch.float64),) * places)
    gram = torch.zeros(wide, wide, dtype=torch.float64)
    cross = torch.zeros(wide, hidden.kept, dtype=torch.float64)
    noise, rows, dtype = 0.0, 0, torch.float32
    for name, axis in track(list(whole.starts.items()), "finding the basis", unit="tensor"):
        tables = [each.read([name])[name].movedim(axis, -1) for each in (whole, checkpoint)]
        if tables[1].shape != (*tables[0].shape[:-1], hidden.kept):
            return f"{name} is not of {hidden.kept} dimensions"
        dtype = tables[1].dtype
        noise += torch.finfo(dtype).eps ** 2 / 4 * tables[1].double().square().mean().item()
        pairs = zip(*(torch.split(each.reshape(-1, each.shape[-1]), _ROWS) for each in tables), strict=True)
        for theirs, ours in ((a.double(), b.double()) for a, b in pairs):
            gram += theirs.T @ theirs
            cross += theirs.T @ ours
            rows += len(ours)
    values, vectors = torch.linalg.eigh(gram)
    # Without a mean, the direction of ones is in no row.
    values, vectors = values[int(centred) :], vectors[:, int(centred) :]
    least = float(values[0])
    if rows < wide or least <= 1e-10 * float(values[-1]) or sqrt(wide * noise / least) > allowed(dtype):
        return "the embedding does not tell the basis that all weights have absorbed"
    found = vectors @ ((vectors.T @ cross) / values[:, None])
    count = hidden.kept - centred
    left, lengths, right = torch.linalg.svd(found, full_matrices=False)
    length = lengths[:count].square().mean().sqrt()
    bent = float((lengths[:count] / length - 1).abs().max()) if length > 0 else float("inf")
    basis = left[:, :count] @ right[:count]
    if centred:
        basis += 1 / sqrt(wide * hidden.kept)
    return basis, sqrt(hidden.kept / wide) / float(length or 1), bent


def _pairs(
    checkpoint: Checkpoint, view: SlicedCheckpoint, report: Report, blocks: list[int]
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Names of tensors with the output's, and with what they are made again as; None where one is not known."""
    model = view.model
    inside = tuple(model.family.block.format(block=block) for block in range(model.blocks))
    outside = [name for name in view.names() if not name.startswith(inside)]
    for name in track(outside, "comparing", unit="tensor"):
        yield name, _held(checkpoint, name), view.read([name])[name]
    for block in track(blocks, "comparing", unit="block"):
        made = view.block(block)
        rewritten = _rewritten(model, report, block) | mapped_tensors(report.depth, made)
        for name, tensor in _cut(model, report, block, made).items():
            yield name, _held(checkpoint, name), None if name in rewritten else tensor


def _held(checkpoint: Checkpoint, name: str) -> Tensor | None:
    return checkpoint.read([name])[name] if name in checkpoint.tensors else None


def _rewritten(model: Model, report: Report, block: int) -> set[str]:
    """Tensors of a block that compensation or a mask rewrote."""
    spaces = model.family.spaces
    modules = {
        module
        for site in report.sites
        if site.block == block
        for module in spaces[space_of(site.space, site.expert)].rewritten(site.method)
    }
    names = {model.tensor(block, module, kind) for module in modules for kind in ("weight", "bias")}
    return names | {linear.weight for linear in report.linears}


def _cut(model: Model, report: Report, block: int, made: dict[str, Tensor]) -> dict[str, Tensor]:
    """A block's tensors with the kept units of its sites alone."""
    kept = {
        space_of(site.space, site.expert): torch.tensor(site.kept, dtype=torch.int64)
        for site in report.sites
        if site.block == block
    }
    found = dict(made)
    for module, kind, dim, lines in touched(model.stays(kept)):
        name = model.tensor(block, module, kind)
        if name in found:
            found[name] = found[name].index_select(dim, lines)
    return found
