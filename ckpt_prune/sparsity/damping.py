"""Factorise a Gram that calibration may have left singular."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_prune.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

DAMP = 0.01
"""SparseGPT's default damping, as a share of the mean diagonal."""
LEAST_DAMP = 1e-4
"""The damping that is tried after zero, which no factor raises."""
MOST_DAMP = 1.0
"""The most damping that is tried. With more than the mean diagonal the data hardly count."""
RESOLVED = 1e-10
"""Least pivot that means something, as a share of its diagonal entry. Entries of float32 Grams round at 6e-8."""


class SingularHessianError(UserError):
    """No damping allowed makes a Hessian positive definite. The caller adds the layer to the message."""


def live_mean(hessian: Tensor) -> float:
    """Return the mean of the diagonal over live inputs, those that some token had; 1 if there is none.

    Absolute values are averaged: divided by a negative mean, a matrix that is no Gram could pass for one.
    """
    diagonal = hessian.diagonal().double()
    live = diagonal[diagonal != 0].abs()
    return float(live.mean()) if live.numel() else 1.0


def damped_cholesky(matrix: Tensor, damp: float, most: float = MOST_DAMP) -> tuple[Tensor, float]:
    """Return the lower Cholesky factor of H, (d, d), with the least damping that is enough, and that damping.

    As long as the matrix is singular to the precision of the Grams, ten times more is tried, and at last `most` itself.

    Args:
        matrix: H (d, d) float64 in units of its mean diagonal. Its diagonal is overwritten.
        damp: the damping that is tried first; zero is allowed.
        most: the damping that is tried last, unless `damp` itself is more.
    """
    import torch  # recipes read the constants of this module without it

    diagonal = matrix.diagonal().clone()
    tried = []
    for share in dampings(damp, most):
        tried.append(f"{share:g}")
        matrix.diagonal().copy_(diagonal + share)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        # A pivot no larger than rounding is a singular matrix that Cholesky happened to get through.
        if int(failed) == 0 and bool((factor.diagonal().square() > RESOLVED * matrix.diagonal()).all()):
            return factor, share
    raise SingularHessianError(
        f"the Hessian is singular with damping {', '.join(tried)} of its mean diagonal: use more calibration samples"
    )


def single_cholesky(matrix: Tensor, least_pivot: float) -> Tensor | None:
    """Return the lower Cholesky factor of a (d, d) float32 matrix; None if float32 has too few digits for it.

    Args:
        least_pivot: squares of the factor's diagonal must be more than this share of the matrix's diagonal.
    """
    import torch

    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(matrix)
    enough = int(failed) == 0 and bool((factor.diagonal().square() > least_pivot * matrix.diagonal()).all())
    return factor if enough else None


def dampings(damp: float, most: float) -> Iterator[float]:
    """Yield `damp`, then ten times more again and again, and `most` last."""
    yield damp
    while damp < most:
        damp = min(10 * damp or LEAST_DAMP, most)
        yield damp
