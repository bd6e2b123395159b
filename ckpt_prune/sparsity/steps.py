"""Find the steps of weights that were rounded to 4 bits before, so that another format stores the same weights."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_OFF = 0.06
"""How far from a whole number a weight may be, in steps: two roundings to bfloat16 of a code of 8."""


def find_steps(blocks: Array) -> tuple[Array, Array] | None:
    """Return the steps of blocks of weights, and their codes, if every weight is a step times a code from -8 to 7.

    A block's largest weight is 1 to 8 of its steps, so there are 15 steps to try. Weights that were never rounded do
    not fit by chance, since all weights of a block have to.

    Args:
        blocks: (blocks, weights of a block) float32.

    Returns:
        Steps (blocks,) float32, which may be negative, and codes (blocks, weights) float32; None if some block does
        not fit.
    """
    at = np.abs(blocks).argmax(axis=1)[:, None]
    largest = np.take_along_axis(blocks, at, axis=1)
    steps, todo = np.ones_like(largest), np.flatnonzero(largest[:, 0])
    for code in (-8, *(sign * size for size in range(7, 0, -1) for sign in (1, -1))):
        step = largest[todo] / code
        codes = blocks[todo] / step
        fits = ((np.abs(codes - codes.round()) < _OFF) & (codes > -8.5) & (codes < 7.5)).all(axis=1)
        steps[todo[fits]] = step[fits]
        todo = todo[~fits]
    if len(todo):
        return None
    codes = np.round(blocks / steps)
    squares = (codes * codes).sum(axis=1)
    # What the step is by all weights: each was rounded to its own type.
    exact = (blocks * codes).sum(axis=1) / np.where(squares == 0, 1, squares)
    return exact.astype(np.float32), codes
