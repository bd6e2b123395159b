"""Rotary pairs as complex numbers, every pair of tokens written out: for one query head and its key."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Complex = NDArray[np.complex128]


def as_complex(states: Array, layout: str) -> Complex:
    """Pairs (..., P) of a head's dimensions (..., 2 P)."""
    if layout == "neighbours":
        return states[..., ::2] + 1j * states[..., 1::2]
    half = states.shape[-1] // 2
    return states[..., :half] + 1j * states[..., half:]


def as_rows(pairs: Complex, layout: str) -> Array:
    """Dimensions (..., 2 P) of pairs (..., P)."""
    if layout == "neighbours":
        return np.stack([pairs.real, pairs.imag], -1).reshape(*pairs.shape[:-1], -1)
    return np.concatenate([pairs.real, pairs.imag], -1)


def turn_pairs(pairs: Complex, theta: float) -> Complex:
    """Pairs of tokens (T, P), pair p of token t turned by t θ^(−p / P)."""
    tokens, count = pairs.shape
    return pairs * np.exp(1j * np.arange(tokens)[:, None] * theta ** (-np.arange(count) / count))


def parts(samples: Sequence[tuple[Complex, Complex]]) -> Complex:
    """Return complex numbers whose real parts are what pairs add to the logit of token t at token s: (samples T T, P).

    Args:
        samples: queries and keys (T, P), turned.
    """
    return np.concatenate([(q[:, None] * k.conj()[None]).reshape(-1, q.shape[1]) for q, k in samples])


def energy(parts: Complex) -> Array:
    return np.sum(parts.real**2, axis=0)


def diagonal_mean(parts: Complex, kept: Sequence[int]) -> float:
    return float(np.mean(np.sum(np.abs(parts[:, kept]) ** 2, axis=0)) / 2)


def factors(parts: Complex, kept: Sequence[int], strength: float) -> Complex:
    """Factors c of the pairs that stay, by least squares on the logits themselves."""
    kept_parts = parts[:, kept]
    rows = np.concatenate([kept_parts.real, -kept_parts.imag], 1)
    lost = parts.real.sum(1) - kept_parts.real.sum(1)
    rows = np.concatenate([rows, np.sqrt(strength) * np.eye(rows.shape[1])])
    x = np.linalg.lstsq(rows, np.concatenate([lost, np.zeros(rows.shape[1])]), rcond=None)[0]
    return 1 + x[: len(kept)] + 1j * x[len(kept) :]


def error(parts: Complex, kept: Sequence[int], c: Complex) -> float:
    """Return the squared error of the logits, summed, if only the kept pairs stay, each times its factor of c."""
    return float(np.sum((parts.real.sum(1) - (parts[:, kept] * c).real.sum(1)) ** 2))
