"""Moments of a dense model as its linear modules have them under rotations."""

from collections.abc import Mapping

from torch import Tensor

from ckpt_prune.calibration.kinds import Key, SpaceMoments
from ckpt_prune.calibration.moments import Moments
from ckpt_prune.calibration.sources import MomentSource, NoMoments
from ckpt_prune.rotations.absorbing import after_rotation, sides, unnormed
from ckpt_prune.rotations.rotated import RotatedCheckpoint


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
            _, right = sides(family, key, residual=residual is not None)
            own = [m.to(self._rotated.device) for m in folds if isinstance(m, Moments)]
            if residual is not None:
                own = [unnormed(family, block, key, norms, m) for m in own]
            found[key] = tuple(after_rotation(m, right, residual, heads).to("cpu") for m in own)
        return found
