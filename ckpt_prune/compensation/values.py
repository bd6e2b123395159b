"""Directions of values: a basis for the values of a KV head and the columns that read them.

Let Σ be the second moment of the query heads' inputs, and M = Σ_i W_iᵀ W_i (compensation/README.md, section 10). A
truncated SVD of M^½ Σ^½ = U S Vᵀ gives the directions that keep most of the output: v ← Vᵀ Σ^-½ v and W_i ← W_i Σ^½ V.
In this basis directions are units like any others: they are dropped in the order of S, and the rest is refitted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Share of a second moment's mean diagonal that is added to it: above the rounding of float32 moments."""


@dataclass(frozen=True)
class ValueBasis:
    """Basis for the values of every KV head, all directions in the order of their strength.

    Inputs and columns have r query heads of d dimensions in each of g KV heads. Turned, they have d directions in each
    KV head, and r neighbouring columns for each direction.

    Attributes:
        values: maps values to their directions, (g, d, d) float64.
        columns: the inverse of each, (g, d, d), which columns absorb.
        strengths: squared singular values, (g, d), descending in each head.
    """

    values: Tensor
    columns: Tensor
    strengths: Tensor

    def turn_columns(self, weight: Tensor) -> Tensor:
        """Turn columns that read values, (d_out, g r d), into columns that read directions, (d_out, g d r) float64."""
        return self._along(weight.double(), self.columns)

    def inputs(self, x: Tensor) -> Tensor:
        """Turn inputs (..., g r d) into directions, (..., g d r) float64."""
        return self._along(x.double(), self.values.mT)

    def gram(self, gram: Tensor) -> Tensor:
        """Turn Σ x xᵀ of the inputs into that of their directions."""
        return self.inputs(self.inputs(gram).T)

    def basis(self, width: int) -> Tensor:
        """Return the matrix that `inputs` multiplies inputs of some width by, (g d r, g r d) float64."""
        return self.inputs(torch.eye(width, dtype=torch.float64, device=self.values.device)).T

    def narrow_values(self, tensor: Tensor, keep: int) -> Tensor:
        """Return the first `keep` directions of v's weight (g d, d_in) or bias (g d,), (g keep, ...) float64."""
        heads, size, _ = self.values.shape
        directions = self.values[:, :keep] @ tensor.double().reshape(heads, size, -1)
        return directions.reshape(heads * keep, *tensor.shape[1:])

    def _along(self, x: Tensor, factors: Tensor) -> Tensor:
        heads, size, _ = factors.shape
        parts = x.reshape(*x.shape[:-1], heads, -1, size)
        return (parts @ factors).mT.reshape(*x.shape[:-1], -1)


def by_head(columns: Tensor, heads: int, keep: int) -> Tensor:
    """Reorder columns (d_out, g keep r), direction by direction, to (d_out, g r keep), query head by query head."""
    return columns.reshape(len(columns), heads, keep, -1).mT.reshape(len(columns), -1)


def by_direction(columns: Tensor, heads: int, keep: int) -> Tensor:
    """Undo `by_head`."""
    return columns.reshape(len(columns), heads, -1, keep).mT.reshape(len(columns), -1)


def principal_values(weight: Tensor, gram: Tensor, heads: int, size: int) -> ValueBasis:
    """Return the basis in which the first directions of every KV head keep most of the output.

    Args:
        weight: of the output projection, (d_out, g r d), any floating dtype.
        gram: Σ x xᵀ of its inputs, or that of the inputs less their mean, (g r d, g r d), on the same device.
        heads: KV heads, g.
        size: of a head, d.
    """
    wide = weight.double().reshape(len(weight), heads, -1, size)
    metric = torch.einsum("ogid,ogie->gde", wide, wide)
    blocks = gram.reshape(heads, wide.shape[2], size, heads, wide.shape[2], size)
    moment = torch.einsum("gidgie->gde", blocks).double()
    values, vectors = torch.linalg.eigh(moment)
    mean = values.clamp_min(0).mean(1, keepdim=True)
    # A head whose values are always zero has no directions of its own: any will do.
    values = values.clamp_min(0) + torch.where(mean > 0, ROUNDING * mean, torch.ones_like(mean))
    root = vectors * values.sqrt()[:, None, :] @ vectors.mT
    inverse = vectors / values.sqrt()[:, None, :] @ vectors.mT
    strengths, directions = torch.linalg.eigh(root @ metric @ root)
    strengths, directions = strengths.flip(1).clamp_min(0), directions.flip(2)
    return ValueBasis(directions.mT @ inverse, root @ directions, strengths)
