"""The contents of a GGUF file, and the error for checkpoints that llama.cpp cannot compute."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_ROWS, GgufType
from ckpt_prune.gguf.architectures import Architecture
from ckpt_prune.gguf.gguf_weight import GgufWeight

POOLING_KEY = "pooling_type"
BLOCK = 32
"""Columns that share a scale; the mixtures have 256, and their rows that are no multiple of it get other types."""


class CannotMapError(UserError):
    """No architecture of llama.cpp computes what a checkpoint computes."""


@dataclass(frozen=True)
class Layout:
    """The contents of a file.

    Attributes:
        architecture: of llama.cpp.
        values: keys of the model, without the architecture's name.
        tensors: by their names in GGUF.
        notes: what differs from the checkpoint.
    """

    architecture: Architecture
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufWeight]
    notes: tuple[str, ...] = ()

    @property
    def embeds(self) -> bool:
        """Whether its last hidden states are used as embeddings, and no token is predicted."""
        return self.architecture.encodes or POOLING_KEY in self.values


def describe_filled(kind: GgufType | None) -> str:
    """Return a line on columns that a type's blocks want to be more."""
    # --for asks for rows that keep the type itself, which are multiples of 256 for many.
    asked = f"for llama.cpp:{kind}" if GGUF_ROWS.get(kind) == BLOCK else f"set spaces.mlp.multiple_of={BLOCK}"
    return (
        f"columns are filled up with zeros to multiples of {BLOCK} (prune with --{asked}, which makes widths such "
        "multiples, unless units of all blocks are ranked in one list)"
    )
