"""Comparing an output whose residual stream lies in one basis of fewer dimensions with the dense model.

The basis is in no file, but the output's embedding has absorbed it, and has far more rows than dimensions. So least
squares of that on the dense embedding find the basis, and the other tensors can be computed again with it.
"""

import random
from collections.abc import Iterator, Set
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.check import Finding
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.progress import track
from ckpt_prune.job.records import SiteRecord
from ckpt_prune.model.cuts import list_cuts
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.matching import match_checkpoint
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import expert_space
from ckpt_prune.stages.hidden.records import HiddenRecord
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.report import Report
from ckpt_prune.stages.rotation.absorbing import residual_of
from ckpt_prune.stages.shared.equality import BLOCKS, away, check_outside_blocks, tolerance
from ckpt_prune.stages.shared.logits import compare_logits

_ROWS = 8192
"""Rows of a table that are multiplied together, in float64."""
_MOST_BENT = 1e-2
"""How far the columns of a basis may be from orthonormal."""


def moves_stream(report: Report) -> bool:
    return report.hidden is not None


def not_by_blocks(report: Report) -> str | None:
    return None if report.hidden is None else "its weights have absorbed a basis of the residual stream"


def check_kept(checkpoint: Checkpoint, dense: Checkpoint, report: Report, changed: Set[str]) -> Finding | None:
    """Compare what can be computed again in another basis of the stream; None if all dimensions stay."""
    hidden = report.hidden
    if hidden is None:
        return None
    if report.recovery is not None or report.adapters is not None:
        return None, "the stream has another basis: the weights are not compared with the dense model's"
    if not hidden.energy:
        return None
    if hidden.kind == "shared":
        return check_kept_stream(checkpoint, dense, report, hidden, changed)
    passed, detail = check_outside_blocks(checkpoint, Model.of(dense))
    return passed, f"{detail}; those inside have absorbed bases and are not compared" if passed else detail


def check_head(checkpoint: Checkpoint, dense: Checkpoint, report: Report) -> Finding | None:
    """Check that head and final norm compute what the dense ones do in the basis that the embedding tells."""
    hidden, model = report.hidden, Model.of(dense)
    if hidden is None:
        return None
    output = match_checkpoint(checkpoint)[0]
    if not hidden.energy or hidden.kind != "shared":
        return check_outside_blocks(output, model)
    stream = find_basis(output, model, hidden)
    if isinstance(stream, str):
        return None, f"not compared: {stream}"
    return compare_logits(checkpoint, model, stream.directions, tied=bool(hidden.tied))


@dataclass(frozen=True)
class StreamBasis:
    """The basis that an output's embedding has absorbed, (d, k) float64, and what the embedding is multiplied by.

    `bent` is how far the columns came out from orthonormal.
    """

    directions: Tensor
    scale: float
    bent: float


def check_kept_stream(
    checkpoint: Checkpoint, dense: Checkpoint, report: Report, hidden: HiddenRecord, changed: Set[str] = frozenset()
) -> Finding:
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
    for name, expected in _recompute(view, report, blocks, changed):
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
        f"in the basis of {hidden.kept} dimensions, found from the embedding, {plural(compared, 'tensor')} outside the "
        f"blocks and in {len(blocks)} of {model.blocks} are the dense ones: {largest:.2g} of a tensor's largest value "
        f"away at most{more}"
    )


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
        return "the basis that all weights have absorbed cannot be found from the embedding"
    solution = vectors @ ((vectors.T @ cross) / values[:, None])
    count = hidden.kept - centred
    left, lengths, right = torch.linalg.svd(solution, full_matrices=False)
    length = lengths[:count].square().mean().sqrt()
    bent = float((lengths[:count] / length - 1).abs().max()) if length > 0 else float("inf")
    directions = left[:, :count] @ right[:count]
    if centred:
        directions += 1 / sqrt(width * hidden.kept)
    return StreamBasis(directions, sqrt(hidden.kept / width) / float(length or 1), bent)


def _recompute(
    view: SlicedCheckpoint, report: Report, blocks: list[int], changed: Set[str]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the names of tensors with what they should be; None for one that was rewritten."""
    model = view.model
    prefixes = tuple(model.family.block.format(block=block) for block in range(model.blocks))
    outside = [name for name in view.names() if not name.startswith(prefixes)]
    for name in track(outside, "comparing", unit="tensor"):
        yield name, view.read([name])[name]
    for block in track(blocks, "comparing", unit="block"):
        tensors = view.block(block)
        sites = {expert_space(site.space, site.expert): site for site in report.sites if site.block == block}
        rewritten = _list_rewritten(model, report, block, sites) | changed
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
