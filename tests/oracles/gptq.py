"""GPTQ as its paper writes it: one weight of a row after another, with H⁻¹ shrunk by each."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def round_row(row: Array, hessian: Array, scale: Array, zero: Array, most: int, damp: float) -> Array:
    """The whole numbers of one row of W (d_in,), eq. 2 and 3 of arXiv 2210.17323 (there: one output).

    Args:
        row: the weights of one output.
        hessian: of the inputs.
        scale: of each weight, which the caller knows.
        zero: of each weight.
        most: the largest number.
        damp: share of the mean diagonal.
    """
    inverse = np.linalg.inv(hessian + damp * np.diag(hessian).mean() * np.eye(len(row)))
    w, codes = row.copy(), np.empty(len(row))
    for j in range(len(row)):
        codes[j] = np.clip(np.round(w[j] / scale[j] + zero[j]), 0, most)
        error = (w[j] - (codes[j] - zero[j]) * scale[j]) / inverse[j, j]
        w -= error * inverse[j]
        # Input j is fixed from now on: the inverse of H without it.
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, :] = inverse[:, j] = 0.0
        inverse[j, j] = 1.0
    return codes
