"""One basis for everything that reads the residual stream, from the Gram of what all norms make of it."""

from torch import Tensor

from ckpt_prune.common.progress import track
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.model.sublayers import list_sublayers
from ckpt_prune.stages.hidden.bases import SlicedStream, directions_keeping_ones, principal_directions
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint, tied_basis
from ckpt_prune.stages.rotation.absorbing import residual_of
from ckpt_prune.stages.rotation.moments import stream_gram


def open_sliced_stream(prepared: Prepared) -> SlicedStream:
    model, stream = prepared.model, prepared.live_stream(prepared.plain_view)
    centred = residual_of(model.family).norm == "layer"
    normed = prepared.stage(Hidden).signal == "normed"
    return SlicedStream(stream, list_sublayers(model), normed=normed, centred=centred)


def shared_gram(prepared: Prepared) -> Tensor:
    """Return the Gram of the normed stream, summed over all norms of the dense model, (d, d) float64.

    Statistics have only the norms of the blocks: they do not say what the final norm reads.
    """
    if prepared.statistics is not None:
        return stream_gram(prepared.model, CachedMoments(prepared.statistics, prepared.model)).to(prepared.device)
    model, sliced = prepared.model, open_sliced_stream(prepared)
    grams: list[Tensor] = []

    def add(_place: int, gram: Tensor) -> None:
        grams[:] = [gram + grams[0] if grams else gram]

    for block in track(range(model.blocks), "measuring the stream", total=model.blocks):
        sliced.block(block, model.read_block(block), add)
    add(0, sliced.end(sliced.stream.factory.skeleton.get_submodule(residual_of(model.family).final)))
    return grams[0].to(prepared.device)


def shared_basis(view: SlicedCheckpoint, gram: Tensor) -> tuple[Tensor, float]:
    """Return one basis for everything that reads the stream, and the share of the energy in it."""
    centred = residual_of(view.family).norm == "layer"
    basis, share = (
        directions_keeping_ones(gram, view.kept) if centred else principal_directions(gram, view.kept, centred=False)
    )
    return tied_basis(view.model, basis) if view.keeps_tie else basis, share
