"""Error feedback into a block type as GPTQ's paper writes it: a row at a time, H⁻¹ shrunk by each column."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def round_row(row: Array, hessian: Array, block: int, damp: float, levels: Callable[[int, Array], Array]) -> Array:
    """Return the rounded weights of one row.

    Args:
        row: (d_in,).
        hessian: of the inputs.
        block: columns that share scales.
        damp: share of the mean diagonal.
        levels: given the number of a block and its weights as they are by then, the weights that each column may have,
            (block, codes).
    """
    inverse = np.linalg.inv(hessian + damp * np.diag(hessian).mean() * np.eye(len(row)))
    w, rounded = row.copy(), np.empty(len(row))
    for j in range(len(row)):
        if j % block == 0:
            allowed = levels(j // block, w[j : j + block])
        at = allowed[j % block]
        rounded[j] = at[np.abs(at - w[j]).argmin()]
        w -= (w[j] - rounded[j]) / inverse[j, j] * inverse[j]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, :] = inverse[:, j] = 0.0
        inverse[j, j] = 1.0
    return rounded
