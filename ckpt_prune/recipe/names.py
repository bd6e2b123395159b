"""Names that recipes use and that the rooms of masks and rotations share."""

from typing import Literal

Backbone = Literal["magnitude", "wanda", "sparsegpt"]
"""Whose importance of single weights: a mask's, or the one that rotations concentrate."""
Goal = Literal[
    "stock", "loss", "vision", "cache", "depth", "hidden", "experts", "low-rank", "zeros", "recovery", "paper"
]
"""The purpose of a recipe: the groups of `recipe list`."""
RotationKind = Literal["per-layer", "shared", "values"]
"""Which importance rotations there are: one R1 for every block, one for all blocks, or R2 alone."""
SlicingKind = Literal["per-block", "shared"]
"""Which bases a sliced residual stream has: one for every sub-layer, or one for the whole of it."""
SlicingSignal = Literal["normed", "stream"]
"""The states whose principal directions are kept: the stream behind its norms, or the stream itself."""
RetractionName = Literal["cayley", "qr"]
"""How a matrix is kept orthogonal while it is learned."""
