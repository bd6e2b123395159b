"""Share of zeros of each block under one share of the whole model. Pure functions.

See sparsity/README.md, section 6. A share of zeros is called a ratio. Blocks are listed in order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.zero_patterns import GroupPattern

BINS = 100
"""Bins of the histogram of log₁₀ eigenvalues. The tail begins at its peak (AlphaPruning's released code)."""


def outlier_ratio(scores: Sequence[Tensor], threshold: float) -> float:
    """Return the share of a block's weights whose score is above `threshold` times the mean score (OWL, eq. 2).

    `scores` are |W_ij| ‖X_j‖₂ of every linear module of the block, any floating dtype; `threshold` is OWL's M.
    """
    count = sum(score.numel() for score in scores)
    mean = float(sum(score.double().sum() for score in scores)) / count
    return sum(int((score > threshold * mean).sum()) for score in scores) / count


def hill_exponent(weight: Tensor) -> float:
    """Return PL_Alpha_Hill, the power-law exponent of a weight's spectrum (AlphaPruning, eq. 3).

    Let λ_1 ≤ … ≤ λ_n be the eigenvalues of Wᵀ W (or of W Wᵀ, if that is smaller), and λ_i the first of the tail. Then

        α = 1 + k / Σ_{j ≥ i} ln(λ_j / λ_i),   k = n − i + 1.

    It is above 1, and infinite if the tail is one value. The tail begins at the peak of the spectrum's histogram over
    log₁₀ λ, as the paper says ("Fix-finger"). The released code then searches for the beginning of least
    Kolmogorov-Smirnov distance, from next to no λ up to 1.5 times the peak; that is left out.
    """
    eigenvalues = torch.linalg.svdvals(weight.double()).square().sort().values
    # A matrix of less than full rank has eigenvalues that are nothing but rounding.
    eigenvalues = eigenvalues[eigenvalues > eigenvalues[-1] * torch.finfo(torch.float64).eps]
    if not len(eigenvalues) or eigenvalues[0] == eigenvalues[-1]:
        return float("inf")
    logs = eigenvalues.log10()
    low, high = float(logs[0]), float(logs[-1])
    peak = low + int(torch.histc(logs, BINS, low, high).argmax()) * (high - low) / BINS
    tail = eigenvalues[logs >= peak].log()
    fall = float((tail - tail[0]).sum())
    return 1 + len(tail) / fall if fall > 0 else float("inf")


def ratios_by_outliers(outliers: Sequence[float], sizes: Sequence[int], ratio: float, spread: float) -> list[float]:
    """Share out zeros as OWL does: the more outliers a block has, the less it loses (section 3.3, as its code has it).

    The kept share is 2λ (D − min D) / (max D − min D), moved so that its mean is 1 − ratio. (The paper's blocks are
    all of one size; where they differ, the mean is over weights.)

    Args:
        outliers: D of every block.
        sizes: weights of every block.
        ratio: of all weights together.
        spread: λ: the result spans 2λ.
    """
    kept = _linear(outliers, 0.0, 2 * spread)
    shares = [size / sizes[0] for size in sizes]
    mean = sum(size * part for size, part in zip(shares, kept, strict=True)) / sum(shares)
    return [ratio - share + mean for share in kept]


def ratios_by_exponents(exponents: Sequence[float], sizes: Sequence[int], ratio: float, spread: float) -> list[float]:
    """Share out zeros as AlphaPruning does: the lighter the tail of a block, the more it loses (eq. 4).

    Args:
        exponents: of every block, the mean over its weights.
        sizes: weights of every block.
        ratio: of all weights together.
        spread: ε: before they are scaled to the ratio, shares span 1 − ε to 1 + ε.
    """
    shares = _linear(exponents, 1 - spread, 1 + spread)
    scale = ratio * sum(sizes) / sum(size * share for size, share in zip(sizes, shares, strict=True))
    return [share * scale for share in shares]


def _linear(values: Sequence[float], low: float, high: float) -> list[float]:
    """Move and scale values to span `low` to `high`; all are in the middle if they are the same."""
    least, most = min(values), max(values)
    if most == least:
        return [(low + high) / 2] * len(values)
    return [low + (value - least) / (most - least) * (high - low) for value in values]


def check_ratios(ratios: Sequence[float], name: str, spread: float) -> None:
    """Refuse ratios below 0 or not below 1, which no mask can have."""
    for block, ratio in enumerate(ratios):
        if not 0 <= ratio < 1:
            raise UserError(
                f"mask.allocation {name} with spread {spread:g} would zero {ratio:.1%} of block {block}: say a smaller "
                "mask.spread, or another ratio"
            )


def whole_groups(ratios: Sequence[float], pattern: GroupPattern) -> list[int]:
    """Return N of each block's N:M, whose sum is that of the pattern in every block.

    Each is its ratio's, rounded down, and the largest remainders get one more. (OWL's code rounds each to the nearest,
    and its sum may miss the pattern's.) No block has fewer than 1, or more than M. The mean of `ratios` is the
    pattern's.
    """
    targets = [min(max((1 - ratio) * pattern.of, 1.0), float(pattern.of)) for ratio in ratios]
    kept = [int(target + 1e-9) for target in targets]
    missing = pattern.kept * len(ratios) - sum(kept)
    while missing:
        step = 1 if missing > 0 else -1
        open_to = [b for b, count in enumerate(kept) if 1 <= count + step <= pattern.of]
        # Of equal remainders the first block; sorting is stable.
        best = max(open_to, key=lambda block: step * (targets[block] - kept[block]))
        kept[best] += step
        missing -= step
    return kept
