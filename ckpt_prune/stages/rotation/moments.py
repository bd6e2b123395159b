"""Moments of a dense model, as its linear modules have them under rotations."""

from collections.abc import Mapping

from torch import Tensor

from ckpt_prune.measure.moment_sources import MomentSource, NoMoments
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments, select_input_moments
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.sublayers import list_sublayers
from ckpt_prune.stages.rotation.absorbing import residual_of, rotate_moments, rotated_sides, undo_norm
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint


def stream_gram(model: Model, source: MomentSource) -> Tensor:
    """Sum the Grams of what the norms of all blocks read, before their gains and biases.

    Σ x̂ x̂ᵀ over tokens and sub-layers, (d, d) float64 on CPU. The input of the final norm is not in it: statistics are
    of the inputs of blocks' linear modules. `source` has moments of every linear module's input, with Grams.
    """
    family = model.family
    places = list_sublayers(model)
    gram: Tensor | None = None
    for block in range(model.blocks):
        norms = {family.tensor(block, norm, kind) for norm in residual_of(family).reads for kind in KINDS}
        tensors = model.checkpoint.read([name for name in model.block_names(block) if name in norms])
        for sublayer in places:  # norms beside each other make the same of the stream
            moments = source.moments(block, tensors, list(sublayer.reads))
            module = next((module for module in sublayer.reads if module in moments), None)
            if module is None:
                raise ValueError(f"no moments of what {' and '.join(sublayer.norms)} feed in block {block}")
            sublayer_gram = undo_norm(
                family, block, module, tensors, sum_folds(select_input_moments(moments[module]))
            ).gram
            assert sublayer_gram is not None
            gram = sublayer_gram if gram is None else gram + sublayer_gram
    assert gram is not None
    return gram


class RotatedMoments(NoMoments):
    """Moments of a dense model as its linears have them under rotations, from moments with Grams."""

    def __init__(self, source: MomentSource, rotated: RotatedCheckpoint) -> None:
        self._source, self._rotated = source, rotated

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Return moments of these linear modules' inputs."""
        family = self._rotated.family
        residual, heads = self._rotated.on_device(block)
        rotated: dict[Key, SpaceMoments] = {}
        norms = self._rotated.norms(block) if residual is not None else {}
        for key, folds in self._source.moments(block, tensors, keys).items():
            _, right = rotated_sides(family, key, residual=residual is not None)
            inputs = [m.to(self._rotated.device) for m in select_input_moments(folds)]
            if residual is not None:
                inputs = [undo_norm(family, block, key, norms, m) for m in inputs]
            rotated[key] = tuple(rotate_moments(m, right, residual, heads).to("cpu") for m in inputs)
        return rotated
