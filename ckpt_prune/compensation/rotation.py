"""The compensation rotation (RCPU eq. 5-9), and the polar factor it needs, without a singular value decomposition.

The paper takes Q = U Vᵀ of svd(C W_Kᵀ), (d_out, d_out). Here it is the polar factor by QDWH (Nakatsukasa, Bai and Gygi
2010, the Cholesky form of their eq. 5.5): the same up to rounding, about 1e-7 at a condition number of 1e5 and 1e-6 at
1e9. Singular values that rounding of the moments may have made count as zero, and Q is completed there by the rotation
nearest the identity (compensation/README.md, section 6).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Fit, Solution
from ckpt_prune.measure.moments.gram import add_gram, cut_strips, product_settings

SMALLEST = 1e-7
"""The least singular value that a float64 Gram can show, relative to the largest. Worse matrices take more steps."""
SINGULAR = 1e-13
"""Singular values below this share of the largest are rounding, and their directions are completed instead."""
NOISE = 4.0
"""Largest singular value of what rounding adds, as a multiple of their root mean square (measured: up to 2.5)."""
SINGLE_PRECISION_LIMIT = 300.0
"""Largest coefficient c of a float32 step. Its rounding error grows with c; here it is 1e-5, and later steps cut it."""
SINGLE_PRECISION_FROM = 256
"""Below this many columns float32 would save no time worth its digits."""
POLISH_FROM = 0.2
"""Largest ‖QᵀQ − I‖ at which the final polynomial is worth its products. It cubes the distance."""
ORTHOGONAL = 1e-8
"""Largest ‖QᵀQ − I‖ (Frobenius norm, over √n) of a factor taken as converged."""


def polar(
    matrix: Tensor, *, rank: int | None = None, nearest: Callable[[], Tensor] | None = None, noise: float = 0.0
) -> Tensor:
    """Return the orthonormal matrix nearest to `matrix`: the Q of matrix = Q H, H positive semi-definite.

    It is (m, n) float64.

    Args:
        matrix: (m, n) float64 with m >= n.
        rank: an upper bound of its rank, where known: a sum over N tokens has rank N at most. Singular values beyond
            it are noise.
        nearest: gives an (m, n) float64 matrix with orthonormal columns; None for the first columns of the identity. If
            `matrix` is singular Q is not unique, and the Q nearest to this matrix is taken.
        noise: singular values up to this one are rounding of the data that the matrix was made of.
    """
    m, n = matrix.shape
    if n and (rank is None or rank >= n):
        iterated = _iterate(matrix, noise)
        if iterated is not None:
            return iterated
    target = torch.eye(m, n, dtype=matrix.dtype, device=matrix.device) if nearest is None else nearest()
    return _by_decomposition(matrix, n if rank is None else rank, target, noise)


def _iterate(matrix: Tensor, noise: float) -> Tensor | None:
    """Iterate to the polar factor of a tall (m, n) float64 matrix.

    None if it is too near singular to converge, or its least singular value is no more than `noise`.
    """
    largest = _largest_singular_value(matrix)
    if not 0 < largest < math.inf:
        return None
    x, low, lifted = matrix / largest, 0.0, 1.0
    while lifted * SINGULAR < 1:
        if 1 - low * low < POLISH_FROM:
            return _polish(x.double())
        gram = _gram(x)
        resolved = low > 0
        if not resolved:
            low = min(_smallest_singular_value(gram), 1.0)
            resolved = low > SMALLEST
            # A Gram in float64 shows nothing below `SMALLEST`: what is not seen is left to a decomposition.
            if lifted == 1.0 and noise > SINGULAR * largest and low <= max(noise / largest, SMALLEST):
                return None
        a, b, c = _weights(max(low, SMALLEST))
        # Early steps separate small singular values and need float64; once none is small, float32 loses nothing that
        # the polish (in float64) does not restore, at half the time.
        if resolved and c <= SINGLE_PRECISION_LIMIT and _float32_pays(x):
            x, gram = x.float(), gram.float()
        gram.mul_(c).diagonal().add_(1)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if int(failed):
            return None
        x = torch.cholesky_solve(x.T, factor).T.mul_(a - b / c).add_(x, alpha=b / c)
        # Once the smallest singular value is seen, theory says how it grows. Until then it is looked for at each step.
        low = low * (a + b * low * low) / (1 + c * low * low) if resolved else 0.0
        lifted *= a
    return None


def _float32_pays(x: Tensor) -> bool:
    """Whether x (m, n) is large and float32 products are exact. A program may have asked for TF32 or bfloat16."""
    exact = product_settings(x.device).fp32_precision in ("none", "ieee")
    return exact and x.shape[1] >= SINGLE_PRECISION_FROM


def _gram(x: Tensor) -> Tensor:
    """Return xᵀx (n, n) of x (m, n)."""
    gram = x.new_zeros(x.shape[1], x.shape[1])
    add_gram(gram, x)
    return gram


def _times_lower(left: Tensor, lower: Tensor) -> Tensor:
    """Multiply `left` (m, n) by a lower triangular (n, n), skipping its zeros."""
    parts = (left[:, strip.start :] @ lower[strip.start :, strip] for strip in cut_strips(lower.shape[0]))
    return torch.cat(list(parts), 1)


def _times_upper(left: Tensor, lower: Tensor) -> Tensor:
    """Multiply `left` (m, n) by the transpose of a lower triangular (n, n), skipping its zeros."""
    parts = (left[:, : strip.stop] @ lower[strip, : strip.stop].T for strip in cut_strips(lower.shape[0]))
    return torch.cat(list(parts), 1)


def _largest_singular_value(matrix: Tensor) -> float:
    """Estimate the largest singular value of (m, n), by power iteration.

    QDWH bears an estimate that is slightly too small.
    """
    vector = matrix.T @ matrix.sum(1)
    for _ in range(6):
        vector = matrix.T @ (matrix @ (vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)))
    return 1.02 * float(vector.norm().sqrt())


def _smallest_singular_value(gram: Tensor) -> float:
    """Estimate the smallest singular value of x from xᵀx (n, n), by inverse iteration.

    The estimate is a little below the truth, and 0 if the Gram is singular.
    """
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        return 0.0
    # The fixed start is unlikely to be an eigenvector. Several columns find clustered values sooner.
    n = gram.shape[0]
    grid = torch.arange(4 * n, dtype=gram.dtype, device=gram.device).reshape(n, 4)
    block = torch.cos(1 + grid * grid / (1 + grid))
    for _ in range(3):
        block = torch.cholesky_solve(block / block.norm(dim=0), factor)
    return 0.8 / math.sqrt(block.norm(dim=0).amax().item())


def _weights(low: float) -> tuple[float, float, float]:
    """Return the best a, b, c of the QDWH step x (a + b x²) / (1 + c x²).

    Singular values lie in [`low`, 1] (its eq. 3.5).
    """
    squared = low * low
    d = (4 * (1 - squared) / (squared * squared)) ** (1 / 3)
    a = math.sqrt(1 + d) + 0.5 * math.sqrt(8 - 4 * d + 8 * (2 - squared) / (squared * math.sqrt(1 + d)))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _polish(x: Tensor) -> Tensor | None:
    """Return the orthonormal matrix near a nearly orthonormal x (m, n): Newton-Schulz of order three, in float64."""
    root_n = math.sqrt(x.shape[1])
    for _ in range(4):
        defect = _gram(x)
        defect.diagonal().sub_(1)
        if not float(defect.norm()) < 0.5 * root_n:
            return None
        # (I + E)^-1/2 = I − E/2 + 3E²/8 − 5E³/16 …; the correction is small, so float32 is enough for its products.
        small = defect.float() if _float32_pays(x) else defect
        squared = small @ small
        # ‖E³‖ ≤ ‖E²‖^1.5 bounds the error of the truncated series before it is applied.
        left_over = 0.3125 * float(squared.norm()) ** 1.5
        correction = x.to(small.dtype) @ squared.mul_(0.375).sub_(small, alpha=0.5)
        x = x + correction
        if left_over < ORTHOGONAL * root_n:
            return x
    return None


def _by_decomposition(matrix: Tensor, rank: int, nearest: Tensor, noise: float) -> Tensor:
    """Take the polar factor of a tall (m, n) matrix by SVD; on its null space, take the map nearest `nearest`."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=True)
    used = min(rank, int((values > max(noise, SINGULAR * float(values.amax()))).sum())) if values.numel() else 0
    determined = left[:, :used] @ right[:used]
    left, right = left[:, used:], right[used:]
    u, _, v = torch.linalg.svd(left.T @ nearest @ right.T, full_matrices=False)
    completed: Tensor = determined + left @ u @ v @ right
    return completed


def procrustes(fit: Fit, weight_kept: Tensor) -> tuple[Tensor, float]:
    """Return Q W_K for the orthogonal Q that minimises Σ ‖y − Q W_K x‖², and tr S.

    Q W_K and W_K are (d_out, k) float64. S are the singular values of C W_Kᵀ, so that tr S = tr(Qᵀ C W_Kᵀ).
    """
    _, cross, _ = fit.second_moments()
    d_out, k = weight_kept.shape
    if k >= d_out:
        target = cross @ weight_kept.T
        q = polar(target, rank=fit.count, noise=_noise(fit, weight_kept.T))
        return q @ weight_kept, float((q * target).sum())
    # W_K = P Lᵀ with P orthonormal: Q W_K = (Q P) Lᵀ, and Q P is the polar factor of C L. P itself is seldom needed.
    lower, basis = _triangle(weight_kept)
    target = _times_lower(cross, lower)
    turned = polar(target, rank=fit.count, nearest=basis, noise=_noise(fit, lower))
    return _times_upper(turned, lower), float((turned * target).sum())


def _noise(fit: Fit, factor: Tensor) -> float:
    """Bound the largest singular value that rounding of the moments may give C times `factor` (k, n).

    An entry of C is off by `fit.rounding` of the root of both energies, each by chance.
    """
    gram, _, energy = fit.second_moments()
    square = max(0.0, energy) * float((gram.diagonal()[:, None] * factor.square()).sum().clamp_min(0))
    return NOISE * fit.rounding * math.sqrt(square / min(len(fit.target_sum), factor.shape[1]))


def _triangle(tall: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return lower triangular L (n, n) with tall = P Lᵀ, and a function that gives the orthonormal P (m, n)."""
    factor, failed = torch.linalg.cholesky_ex(_gram(tall))
    pivots = factor.diagonal()
    # Cholesky of tallᵀ tall is many times faster than Householder's, and as good while `tall` is well conditioned.
    if int(failed) == 0 and bool(pivots.amin() > 1e-3 * pivots.amax()):
        return factor, lambda: torch.linalg.solve_triangular(factor.T, tall, upper=True, left=False)
    basis, triangle = torch.linalg.qr(tall)
    return triangle.T, lambda: basis


def rotation(weight_kept: Tensor, fit: Fit) -> Solution:
    """Return Q W_K, the rotation of the pruned output nearest the target (RCPU eq. 5-7)."""
    return Solution(procrustes(fit, weight_kept)[0])


def scaled_rotation(weight_kept: Tensor, fit: Fit) -> Solution:
    """Return s Q W_K with s = tr S / tr(W_K G W_Kᵀ), the best scale for that rotation (RCPU eq. 8-9)."""
    gram, _, _ = fit.second_moments()
    rotated, trace = procrustes(fit, weight_kept)
    energy = float(((weight_kept @ gram) * weight_kept).sum())
    scale = trace / energy if energy > 0 else 1.0
    return Solution(rotated * scale, details={"scale": scale})


def centred_rotation(weight_kept: Tensor, fit: Fit) -> Solution:
    """Fit a rotation on centred moments, and the bias that matches the means, μ_y − Ŵ μ_K (this project)."""
    weight, _ = procrustes(fit.centre(), weight_kept)
    return Solution(weight, fit.target_mean - weight @ fit.mean)
