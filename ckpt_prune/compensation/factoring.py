"""Best product of two thin matrices in place of a linear module's weight (compensation/README.md, section 14)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.compensation.least_squares import solve


@dataclass(frozen=True)
class Factors:
    """Ŵ = up · down.

    Attributes:
        up: (d_out, r) float64, its columns orthonormal if both factors are found together.
        down: (r, d_in) float64.
        error: Σ‖y − ŷ‖² / Σ‖y‖² on the tokens of the Gram; without one ‖W − Ŵ‖² / ‖W‖².
    """

    up: Tensor
    down: Tensor
    error: float


def rank_for_ratio(rows: int, columns: int, ratio: float) -> int:
    """Return the largest rank whose factors have at most a share 1 - ratio of a weight's parameters; at least 1.

    SVD-LLM's code takes ⌊d_out d_in (1 - ratio) / (d_out + d_in)⌋, which is that.
    """
    return max(1, int(rows * columns * (1 - ratio) / (rows + columns)))


def saves_parameters(rows: int, columns: int, rank: int) -> bool:
    """Return whether the factors have fewer parameters than the weight."""
    return rank * (rows + columns) < rows * columns


def direction_energies(weight: Tensor, gram: Tensor | None) -> Tensor:
    """Return the energy of every direction of the output, (min(d_out, d_in),) float64, descending.

    They are the squared singular values of W S, S Sᵀ = G. The error of rank r is the sum of those from the r-th on
    (Wang et al. 2024, SVD-LLM, Theorem 3.2).

    Args:
        weight: (d_out, d_in) float64.
        gram: G = Σ x xᵀ, (d_in, d_in); None for the identity.
    """
    values: Tensor = torch.linalg.eigvalsh(_smaller(weight, gram)[0])
    return values.flip(0).clamp_min(0)


def factor(weight: Tensor, gram: Tensor | None, rank: int) -> Factors:
    """Return the Ŵ of a rank that minimises Σ‖(W − Ŵ) x‖².

    SVD-LLM whitens: W S = U Σ Vᵀ, S Sᵀ = G, and Ŵ = U_r Σ_r V_rᵀ S⁻¹. That is U_r U_rᵀ W, which needs no inverse and so
    takes a singular G as it is: S⁻¹ stands behind V_rᵀ = Σ_r⁻¹ U_rᵀ W S. U_r are the first eigenvectors of W G Wᵀ.

    Args:
        weight: (d_out, d_in) float64.
        gram: G = Σ x xᵀ, (d_in, d_in), positive semidefinite up to rounding; None for the identity, which gives a
            truncated singular value decomposition of W.
        rank: r, from 1 to min(d_out, d_in).
    """
    product, root = _smaller(weight, gram)
    decomposition = torch.linalg.eigh(product)
    values, vectors = decomposition.eigenvalues, decomposition.eigenvectors
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)[:, :rank]
    if root is not None:
        # Right singular vectors: W S V = U Σ. Householder's QR has orthonormal columns also where Σ is zero.
        vectors = torch.linalg.qr(weight @ root @ vectors).Q
    # The sign of an eigenvector is left to the library: its largest entry is positive here.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    up = vectors * torch.where(largest < 0, -1.0, 1.0)
    energy = values.sum().item()
    return Factors(up, up.T @ weight, values[rank:].sum().item() / energy if energy else 0.0)


def refit_factors(weight: Tensor, gram: Tensor, down: Tensor) -> Factors:
    """Return the U that minimises Σ‖W x − U D x‖² for a fixed D: W G Dᵀ (D G Dᵀ)⁺. Its columns are not orthonormal.

    SVD-LLM's layer-wise closed-form update (Wang et al. 2024, as first published; step 2 of the released code): D comes
    from the dense model's inputs, and G from those behind layers that are updated already.

    Args:
        weight: W, (d_out, d_in) float64.
        gram: G = Σ x xᵀ, (d_in, d_in) float64.
        down: D, (r, d_in) float64.
    """
    through = gram @ down.T
    up = solve(down @ through, weight @ through)
    lost = weight - up @ down
    energy, error = ((matrix @ gram * matrix).sum().item() for matrix in (weight, lost))
    return Factors(up, down, max(0.0, error) / energy if energy > 0 else 0.0)


def _smaller(weight: Tensor, gram: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return W G Wᵀ, or (W S)ᵀ W S and S if there are fewer inputs than outputs: the smaller of the two."""
    rows, columns = weight.shape
    if rows <= columns:
        return weight @ (weight.T if gram is None else gram @ weight.T), None
    root = torch.eye(columns, dtype=weight.dtype, device=weight.device) if gram is None else _root(gram)
    whitened = weight @ root
    return whitened.T @ whitened, root


def _root(gram: Tensor) -> Tensor:
    """Return S of S Sᵀ = G: Cholesky's factor, or one made of eigenvectors if G is singular."""
    factored = torch.linalg.cholesky_ex(gram)
    if not factored.info:
        lower: Tensor = factored.L
        return lower
    values, vectors = torch.linalg.eigh(gram)
    root: Tensor = vectors * values.clamp_min(0).sqrt()
    return root
