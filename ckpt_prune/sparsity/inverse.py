"""Factor of the inverse Gram, for inputs that are visited from left to right (see `sparsegpt`)."""

from torch import Tensor

from ckpt_prune.sparsity.damping import damped_cholesky, live_mean


def factorise(hessian: Tensor, dead: Tensor, damp: float, most_damp: float) -> tuple[Tensor, float]:
    """Return the lower Cholesky factor of H + damping, inputs in reverse order, float64, and the damping."""
    # In units of the mean diagonal, so that neither the scale of H nor the 1 of a dead input matters.
    matrix = hessian.flip(0, 1).double().div_(live_mean(hessian))
    dead = dead.flip(0)
    # A dead input's products are zero but for rounding; its column must not touch a live one.
    matrix[dead] = 0
    matrix[:, dead] = 0
    matrix.diagonal()[dead] = 1
    return damped_cholesky(matrix, damp, most_damp)


def part(factor: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return R[rows, columns] of H = R Rᵀ, from the factor of H with its inputs in reverse order."""
    n = len(factor)
    return factor[n - rows.stop : n - rows.start, n - columns.stop : n - columns.start].flip(0, 1)
