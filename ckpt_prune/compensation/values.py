"""Directions of values: what the values of a KV head and the columns under them are turned into, before some go.

See compensation/README.md, section 10.

Attention mixes the values of a KV head, v (d), into the inputs x_i of its query heads i, whose columns W_i read them.
Any invertible matrix may stand between: W_i x_i = (W_i B) (B⁻¹ x_i), and B⁻¹ x_i is the same mixture of B⁻¹ v. Rotary
positions act on queries and keys alone. With Σ the second moment of the x_i and M = Σ_i W_iᵀ W_i, both pooled over the
query heads of the KV head, the k directions that keep most of the output are a truncated SVD (Eckart and Young):

    M^½ Σ^½ = U S Vᵀ,    v ← Vᵀ Σ^-½ v,    W_i ← W_i Σ^½ V,

and what the others carry is the sum of their squared singular values. In this basis directions are units like any
others: they go in the order of S, and what stays is refitted as the columns of any projection are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Share of a second moment's mean diagonal that is added to it: above the rounding of float32 moments."""


@dataclass(frozen=True)
class Turn:
    """A basis for the values of every KV head, all directions in the order of what they carry.

    Inputs and columns have r query heads of d dimensions in each of g KV heads. Turned, they have d directions in each
    KV head, and r neighbouring columns for each direction.

    Attributes:
        values: of values into their directions, (g, d, d) float64.
        columns: what stands behind: the inverse of each, (g, d, d).
        strengths: squared singular values, (g, d), descending in each head.
    """

    values: Tensor
    columns: Tensor
    strengths: Tensor

    def turned(self, weight: Tensor) -> Tensor:
        """Columns that read directions, (d_out, g d r) float64, of those that read values, (d_out, g r d)."""
        return self._along(weight.double(), self.columns)

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs in directions, (..., g d r) float64, of inputs (..., g r d)."""
        return self._along(x.double(), self.values.mT)

    def gram(self, gram: Tensor) -> Tensor:
        """Σ x xᵀ of the inputs in directions, of the same of inputs."""
        return self.inputs(self.inputs(gram).T)

    def basis(self, width: int) -> Tensor:
        """The matrix that `inputs` multiplies inputs of some width by, (g d r, g r d) float64."""
        return self.inputs(torch.eye(width, dtype=torch.float64, device=self.values.device)).T

    def narrowed(self, tensor: Tensor, keep: int) -> Tensor:
        """The first `keep` directions of v's weight (g d, d_in) or bias (g d,), (g keep, ...) float64."""
        heads, size, _ = self.values.shape
        own = self.values[:, :keep] @ tensor.double().reshape(heads, size, -1)
        return own.reshape(heads * keep, *tensor.shape[1:])

    def _along(self, x: Tensor, factors: Tensor) -> Tensor:
        heads, size, _ = factors.shape
        parts = x.reshape(*x.shape[:-1], heads, -1, size)
        return (parts @ factors).mT.reshape(*x.shape[:-1], -1)


def by_head(columns: Tensor, heads: int, keep: int) -> Tensor:
    """Columns (d_out, g keep r), a direction's beside each other, as (d_out, g r keep): a query head's are."""
    return columns.reshape(len(columns), heads, keep, -1).mT.reshape(len(columns), -1)


def by_direction(columns: Tensor, heads: int, keep: int) -> Tensor:
    """What `by_head` was made of."""
    return columns.reshape(len(columns), heads, -1, keep).mT.reshape(len(columns), -1)


def principal(weight: Tensor, gram: Tensor, heads: int, size: int) -> Turn:
    """The basis in which the first directions of every KV head keep most of the output.

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
    return Turn(directions.mT @ inverse, root @ directions, strengths)
