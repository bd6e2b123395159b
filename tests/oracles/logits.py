"""Textbook Q/K-logit compensation of one head, on its queries and keys: lists of (T, d) arrays, one a sample."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Samples = Sequence[tuple[Array, Array]]
"""Q_b and K_b of each sample."""


def list_dropped(kept: Sequence[int], head_dim: int) -> list[int]:
    return [j for j in range(head_dim) if j not in kept]


def lost_logits(sample: tuple[Array, Array], kept: Sequence[int]) -> Array:
    """Return the part of the logits of a sample (T, T) that the kept dimensions lack without compensation."""
    Q, K = sample
    return Q @ K.T - Q[:, kept] @ K[:, kept].T


def designs(samples: Samples, kept: Sequence[int]) -> tuple[Array, Array]:
    """The regression M solves: a row for each logit of each sample, a column for each entry of M row by row."""
    rows = [np.kron(Q[:, kept], K[:, kept]) for Q, K in samples]
    return np.vstack(rows), np.concatenate([lost_logits(sample, kept).flatten() for sample in samples])


def kronecker(samples: Samples, kept: Sequence[int]) -> tuple[Array, Array]:
    """G (d'², d'²) and h (d'²) of CORP's normal equations (C.2), M row by row, sample by sample."""
    out = list_dropped(kept, samples[0][0].shape[1])
    G, h = np.zeros((len(kept) ** 2, len(kept) ** 2)), np.zeros(len(kept) ** 2)
    for Q, K in samples:
        A, B = Q.T @ Q, K.T @ K
        G += np.kron(A[np.ix_(kept, kept)], B[np.ix_(kept, kept)])
        h += (A[np.ix_(kept, out)] @ B[np.ix_(out, kept)]).flatten()
    return G, h


def solve(samples: Samples, kept: Sequence[int], strength: float) -> Array:
    """M by the dense d'⁶ solve, λ absolute and positive."""
    G, h = kronecker(samples, kept)
    return np.linalg.solve(G + strength * np.eye(len(h)), h).reshape(len(kept), -1)


def regression(samples: Samples, kept: Sequence[int], strength: float) -> Array:
    """M by least squares on the logits themselves, which forms no Gram: for equations a dense solve loses digits of."""
    rows, targets = designs(samples, kept)
    n = rows.shape[1]
    rows, targets = np.vstack([rows, np.sqrt(strength) * np.eye(n)]), np.concatenate([targets, np.zeros(n)])
    return np.linalg.lstsq(rows, targets, rcond=None)[0].reshape(len(kept), -1)


def error(samples: Samples, kept: Sequence[int], M: Array) -> float:
    """Σ_b ‖Q Kᵀ − Q_S (I + M) K_Sᵀ‖², logits in full."""
    return float(sum(np.sum((Q @ K.T - Q[:, kept] @ (np.eye(len(kept)) + M) @ K[:, kept].T) ** 2) for Q, K in samples))


def energy(samples: Samples) -> float:
    return float(sum(np.sum((Q @ K.T) ** 2) for Q, K in samples))


def floor(samples: Samples, kept: Sequence[int]) -> float:
    """Return the squared error that the best M leaves in the logits, without normal equations."""
    rows, targets = designs(samples, kept)
    solution = np.linalg.lstsq(rows, targets, rcond=1e-10)[0]
    return float(np.sum((targets - rows @ solution) ** 2))


def diagonal_mean(samples: Samples, kept: Sequence[int]) -> float:
    return float(np.mean(np.diag(kronecker(samples, kept)[0])))


def held_out(folds: Sequence[Sequence[Samples]], kept: Sequence[Sequence[int]], value: float, relative: bool) -> float:
    """Σ error on each fold of M fitted on the others / Σ energy; `folds` by fold, then by head."""
    total, scale = 0.0, 0.0
    for f, fold in enumerate(folds):
        for head, at in enumerate(kept):
            train = [sample for g, other in enumerate(folds) if g != f for sample in other[head]]
            strength = value * (diagonal_mean(train, at) if relative else 1.0)
            total += error(fold[head], at, regression(train, at, strength))
            scale += energy(fold[head])
    return total / scale


def logit_energy(samples: Samples) -> Array:
    """CORP's score of each dimension: the mean over samples of ‖q_j‖² ‖k_j‖²."""
    scores = np.zeros(samples[0][0].shape[1])
    for j in range(len(scores)):
        for Q, K in samples:
            scores[j] += sum(q * q for q in Q[:, j]) * sum(k * k for k in K[:, j])
    return scores / len(samples)


def low_rank_error(samples: Samples, P: Array, R: Array) -> float:
    """Σ_b ‖Q Kᵀ − (Q P)(K R)ᵀ‖², logits in full."""
    return float(sum(np.sum((Q @ K.T - (Q @ P) @ (K @ R).T) ** 2) for Q, K in samples))


def _other_factor(samples: Samples, right: Array, strength: float) -> Array:
    """The P that is best beside a given R, by least squares on the logits themselves."""
    d = right.shape[0]
    pairs = [*((Q, K @ right) for Q, K in samples), (np.sqrt(strength) * np.eye(d), right)]
    # Each pair's Kronecker product, which np.kron takes ten times as long for.
    rows = np.vstack([np.einsum("ti,ua->tuia", *pair).reshape(-1, right.size) for pair in pairs])
    targets = np.concatenate([(Q @ K.T).flatten() for Q, K in samples] + [np.sqrt(strength) * np.eye(d).flatten()])
    return np.linalg.lstsq(rows, targets, rcond=None)[0].reshape(d, -1)


def _newton(samples: Samples, left: Array, right: Array, strength: float, steps: int = 100) -> tuple[Array, Array]:
    """P and R nearby where the objective is least: by Levenberg's and Marquardt's steps on both at once."""
    d, size = left.shape

    def residuals(P: Array, R: Array) -> Array:
        parts = [(Q @ (np.eye(d) - P @ R.T) @ K.T).flatten() for Q, K in samples]
        return np.concatenate([*parts, np.sqrt(strength) * (np.eye(d) - P @ R.T).flatten()])

    r, damping = residuals(left, right), 1e-3
    for _ in range(steps):
        rows = []
        for Q, K in [*samples, (np.sqrt(strength) * np.eye(d), np.eye(d))]:
            # E_ij = δ_ij − Σ_r P_ir R_jr: by P_ir it is −R_jr in row i, by R_jr −P_ir in column j.
            by_left = -np.einsum("ai,br->abir", Q, K @ right).reshape(len(Q) * len(K), d * size)
            by_right = -np.einsum("ar,bj->abjr", Q @ left, K).reshape(len(Q) * len(K), d * size)
            rows.append(np.hstack([by_left, by_right]))
        J = np.vstack(rows)
        H, g = J.T @ J, J.T @ r
        step = np.linalg.lstsq(H + damping * np.trace(H) / len(H) * np.eye(len(H)), -g, rcond=None)[0]
        P, R = left + step[: d * size].reshape(d, size), right + step[d * size :].reshape(d, size)
        after = residuals(P, R)
        lower = r @ r - after @ after
        if lower > 0:
            left, right, r, damping = P, R, after, damping / 10
            if lower <= 1e-15 * (r @ r):
                break
        else:
            damping *= 10
            if damping > 1e6:
                break
    return left, right


def low_rank(samples: Samples, size: int, strength: float, starts: int = 1, rounds: int = 20) -> tuple[Array, Array]:
    """P and R (d, d') of the least Σ_b ‖Q Kᵀ − (Q P)(K R)ᵀ‖² + λ ‖I − P Rᵀ‖².

    By alternating least squares, which slows down near the end, and steps on both factors from there. Starts are the
    leading singular vectors of all samples' logits' form, then random.
    """
    d = samples[0][0].shape[1]
    # ‖Q E Kᵀ‖ is that of the triangles of Q and K: as many rows as there are dimensions, whatever the tokens.
    samples = [(np.linalg.qr(Q)[1], np.linalg.qr(K)[1]) for Q, K in samples]
    flipped = [(K, Q) for Q, K in samples]
    generator = np.random.default_rng(0)
    best: tuple[float, Array, Array] | None = None
    for start in range(starts):
        R = generator.normal(size=(d, size))
        if start == 0:
            form = sum(Q.T @ Q @ K.T @ K for Q, K in samples)
            R = np.linalg.svd(form)[2][:size].T
        for _ in range(rounds):
            R = np.linalg.qr(R)[0]
            P = _other_factor(samples, R, strength)
            P = np.linalg.qr(P)[0]
            R = _other_factor(flipped, P, strength)
        P, R = _newton(samples, P, R, strength)
        objective = low_rank_error(samples, P, R) + strength * float(np.sum((np.eye(d) - P @ R.T) ** 2))
        if best is None or objective < best[0]:
            best = (objective, P, R)
    assert best is not None
    return best[1:]


def centre_keys(samples: Samples) -> Samples:
    """Keys less their mean over a sample."""
    return [(Q, K - K.mean(0)) for Q, K in samples]


def whole_mean(samples: Samples) -> float:
    """Mean diagonal of E ↦ Σ_b A_b E B_b."""
    return diagonal_mean(samples, range(samples[0][0].shape[1]))
