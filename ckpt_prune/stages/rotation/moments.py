"""Moments of a dense model as its linear modules have them under rotations."""

from collections.abc import Mapping

from torch import Tensor

from ckpt_prune.architectures.family import KINDS
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.sublayers import sublayers
from ckpt_prune.measure.moment_sources import MomentSource, NoMoments
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import Key, SpaceMoments, select_input_moments
from ckpt_prune.stages.rotation.absorbing import residual_of, rotate_moments, rotated_sides, undo_norm
from ckpt_prune.stages.rotation.rotated_checkpoint import RotatedCheckpoint


def stream_gram(model: Model, source: MomentSource) -> Tensor:
    """The Gram of what the norms of all blocks make of the residual stream, before their gains and biases.

    What the final norm makes of it is not in it: statistics are of the inputs of blocks' linear modules.

    Args:
        model: the dense model.
        source: of moments of every linear module's input, with Grams.

    Returns:
        Σ x̂ x̂ᵀ over tokens and sub-layers, (d, d) float64 on CPU.

    Raises:
        ValueError: the source has no moments of what a norm feeds.
    """
    family = model.family
    places = sublayers(model)
    found: Tensor | None = None
    for block in range(model.blocks):
        norms = {family.tensor(block, norm, kind) for norm in residual_of(family).reads for kind in KINDS}
        tensors = model.checkpoint.read([name for name in model.block_names(block) if name in norms])
        for each in places:  # norms beside each other make the same of the stream
            known = source.moments(block, tensors, list(each.reads))
            module = next((module for module in each.reads if module in known), None)
            if module is None:
                raise ValueError(f"no moments of what {' and '.join(each.norms)} feed in block {block}")
            own = undo_norm(family, block, module, tensors, sum_folds(select_input_moments(known[module]))).gram
            assert own is not None
            found = own if found is None else found + own
    assert found is not None
    return found


class RotatedMoments(NoMoments):
    """Moments of a dense model as its linears have them under rotations.

    Args:
        source: of the dense model's moments, with Grams.
        rotated: the checkpoint under rotations.
    """

    def __init__(self, source: MomentSource, rotated: RotatedCheckpoint) -> None:
        self._source, self._rotated = source, rotated

    def moments(self, block: int, tensors: Mapping[str, Tensor], keys: list[Key]) -> dict[Key, SpaceMoments]:
        """Moments of these linear modules' inputs."""
        family = self._rotated.family
        residual, heads = self._rotated.on_device(block)
        found: dict[Key, SpaceMoments] = {}
        norms = self._rotated.norms(block) if residual is not None else {}
        for key, folds in self._source.moments(block, tensors, keys).items():
            _, right = rotated_sides(family, key, residual=residual is not None)
            own = [m.to(self._rotated.device) for m in select_input_moments(folds)]
            if residual is not None:
                own = [undo_norm(family, block, key, norms, m) for m in own]
            found[key] = tuple(rotate_moments(m, right, residual, heads).to("cpu") for m in own)
        return found
