"""Whether the weights of a GGUF file are those of a checkpoint, as far as their types can hold them."""

from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.graph_types import GGUF_ROWS
from ckpt_prune.gguf.contents import CannotMapError
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.writing import FITTED
from ckpt_prune.model.model import Model

_BLOCK = 32
_FARTHEST = {
    Kind.F32: 1e-6,
    Kind.F16: 1e-3,
    Kind.BF16: 8e-3,
    # A block's numbers are off by half a step at most, which is its largest number / 127, and its norm is no less
    # than that number: sqrt(32) / 254, and the rounding of the step itself.
    Kind.Q8_0: 0.025,
    # Half a step, and a whole one for numbers opposite to the largest: sqrt(32) / 8.
    Kind.Q4_0: 0.75,
    # Half a fifteenth of the way from the least to the largest.
    Kind.Q4_1: 0.4,
}
"""Type → how far a block may be from what it was rounded from, as a share of its norm."""
_OTHERS = 0.9
"""How far a whole row of any other type may be, as a share of its norm: such types mix steps of several sizes."""
_NOISE = 1e-3
"""Numbers so much smaller than the rest of a tensor may become anything as small: float16 has no smaller ones."""


def other_weights(file: Path, model: Model | Checkpoint, kind: str) -> list[str]:
    """Return the tensors of a file that are not what its types make of a checkpoint's: it is damaged, or not its file.

    Tensors that this package would not write in that shape, as other tools may, are not compared.

    Args:
        kind: type of most of the file.
    """
    try:
        layout = lay_out(model, kind if kind in GGUF_ROWS else None)  # type: ignore[arg-type]
    except CannotMapError:
        return []
    gguf_file = open_gguf(file)
    if gguf_file.values.get("general.architecture") != layout.architecture.name:
        return []
    wrong = []
    for name, info in gguf_file.tensors.items():
        expected = layout.tensors.get(name)
        if expected is not None and tuple(expected.shape) == tuple(info.shape):
            stored, source = gguf_file.read(name).float(), expected.read().float()
            if not _alike(stored, source, info.kind, fitted=bool(gguf_file.values.get(FITTED))):
                wrong.append(name)
    return wrong


def _alike(stored: Tensor, source: Tensor, kind: Kind, *, fitted: bool) -> bool:
    """Return whether weights are near enough; of a fitted matrix whole rows alone tell, for blocks make up for others.

    Types that hold weights as they are do not move any.
    """
    fitted = fitted and kind not in (Kind.F32, Kind.F16, Kind.BF16)
    in_blocks = kind in _FARTHEST and source.shape[-1] % _BLOCK == 0 and not fitted
    width = _BLOCK if in_blocks else source.shape[-1]
    stored, source = stored.reshape(-1, width), source.reshape(-1, width)
    usual = source.square().mean().sqrt() * width**0.5
    distance = torch.linalg.vector_norm(stored - source, dim=1)
    share = _OTHERS if fitted else _FARTHEST.get(kind, _OTHERS)
    return bool((distance <= share * torch.linalg.vector_norm(source, dim=1) + _NOISE * usual).all())
