"""Bases of the residual stream, and absorbing a part of one: pure functions (stages/hidden/README.md).

A basis is a matrix P (d, k) with orthonormal columns. The stream h becomes z = c h P, with c = √(k / d): its mean
square over k coordinates is then that of the projection of h over d, so that a stock RMSNorm of width k divides by what
the dense norm would, its epsilon included. A module that reads the normed stream gets W P / c, one that adds to it
c Pᵀ W.
"""

from math import sqrt

import torch
from torch import Tensor

from ckpt_prune.stages.rotation.orthogonal import complement_of_ones


def stream_scale(kept: int, width: int) -> float:
    """Return c, by which the stream is multiplied if `kept` of its `width` dimensions stay."""
    return sqrt(kept / width)


def principal_directions(gram: Tensor, kept: int, *, centred: bool) -> tuple[Tensor, float]:
    """Return the `kept` directions of most energy, P (d, k) float64, and their share of the energy.

    The columns of P are orthonormal. `gram` is Σ x xᵀ over tokens, (d, d) float64. `centred` says that signals have no
    mean over their coordinates: the direction of ones then comes last.
    """
    inner = complement_of_ones(len(gram)).to(gram) if centred else None
    values, vectors = torch.linalg.eigh(gram if inner is None else inner.T @ gram @ inner)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    if inner is not None:
        ones = torch.full((len(gram), 1), len(gram) ** -0.5, dtype=gram.dtype, device=gram.device)
        vectors = torch.cat([inner @ vectors, ones], 1)
    energy = float(values.sum())
    return vectors[:, :kept].contiguous(), float(values[:kept].sum()) / energy if energy > 0 else 1.0


def directions_keeping_ones(gram: Tensor, kept: int) -> tuple[Tensor, float]:
    """Return `principal_directions` for a stream that a stock LayerNorm reads: P 1 = √(d / k) 1.

    So what has no mean keeps none, and one of the k >= 2 dimensions is spent on the direction of ones. `gram` is of
    signals without a mean.
    """
    first, share = principal_directions(gram, kept - 1, centred=True)
    outer = complement_of_ones(kept).to(gram)
    ones = torch.full((len(gram), kept), (len(gram) * kept) ** -0.5, dtype=gram.dtype, device=gram.device)
    return first @ outer.T + ones, share


def diagonalise_gains(basis: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis of the same subspace in which a final norm's gains are gains again, and these: P Q and γ.

    Pᵀ diag(g) P = Q diag(γ) Qᵀ: in the basis P Q the head reads diag(γ) of what it read diag(g) of, and a table that is
    embedding and head at once stays one table. What is lost is how g mixes dropped directions into kept ones. P is (d,
    k) float64, and g (d,).
    """
    kept_gains, turn = torch.linalg.eigh(basis.T @ (gains[:, None] * basis))
    return basis @ turn, kept_gains


def slice_reader(weight: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return W P / c for a module that reads the normed stream."""
    return weight.double() @ basis / scale


def slice_writer(tensor: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return c Pᵀ W for a weight, or c Pᵀ b for a bias, that adds to the stream."""
    return scale * (basis.T @ tensor.double())
