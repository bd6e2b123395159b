"""Bases of the residual stream, and absorbing a part of one: pure functions (README.md, section 7).

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
    """c: what the stream is multiplied by where `kept` of its `width` dimensions stay."""
    return sqrt(kept / width)


def principal_directions(gram: Tensor, kept: int, *, centred: bool) -> tuple[Tensor, float]:
    """The `kept` directions in which signals have most energy, descending.

    Args:
        gram: Σ x xᵀ over tokens, (d, d) float64.
        kept: k.
        centred: whether signals have no mean over their coordinates: the direction of ones comes last then.

    Returns:
        P, (d, k) float64 with orthonormal columns, and the share of the energy that lies in them.
    """
    inner = complement_of_ones(len(gram)).to(gram) if centred else None
    values, vectors = torch.linalg.eigh(gram if inner is None else inner.T @ gram @ inner)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    if inner is not None:
        ones = torch.full((len(gram), 1), len(gram) ** -0.5, dtype=gram.dtype, device=gram.device)
        vectors = torch.cat([inner @ vectors, ones], 1)
    whole = float(values.sum())
    return vectors[:, :kept].contiguous(), float(values[:kept].sum()) / whole if whole > 0 else 1.0


def directions_keeping_ones(gram: Tensor, kept: int) -> tuple[Tensor, float]:
    """The same for a stream that a stock LayerNorm reads: P 1 = √(d / k) 1, so that what has no mean keeps none.

    One of the k dimensions is spent on the direction of ones.

    Args:
        gram: Σ x xᵀ of signals without a mean, (d, d) float64.
        kept: k, at least 2.

    Returns:
        As of `principal`.
    """
    first, share = principal_directions(gram, kept - 1, centred=True)
    outer = complement_of_ones(kept).to(gram)
    ones = torch.full((len(gram), kept), (len(gram) * kept) ** -0.5, dtype=gram.dtype, device=gram.device)
    return first @ outer.T + ones, share


def diagonalise_gains(basis: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
    """The basis of the same subspace in which a final norm's gains are gains again, as far as they stay inside it.

    Pᵀ diag(g) P = Q diag(γ) Qᵀ: in the basis P Q the head reads diag(γ) of what it read diag(g) of, and a table that is
    embedding and head at once stays one table. What is lost is how g mixes dropped directions into kept ones; with
    nothing dropped that is nothing.

    Args:
        basis: P, (d, k) float64.
        gains: g, (d,) float64.

    Returns:
        P Q, (d, k), and γ, (k,).
    """
    found, turn = torch.linalg.eigh(basis.T @ (gains[:, None] * basis))
    return basis @ turn, found


def slice_reader(weight: Tensor, basis: Tensor, scale: float) -> Tensor:
    """W P / c of a module that reads the normed stream."""
    return weight.double() @ basis / scale


def slice_writer(tensor: Tensor, basis: Tensor, scale: float) -> Tensor:
    """C Pᵀ W of a weight, or c Pᵀ b of a bias, that adds to the stream."""
    return scale * (basis.T @ tensor.double())
