"""How much a Gram is damped before errors of rounding are fed back by it."""

from ckpt_prune.compensation.methods import derive_strength
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP


def damp_for(columns: int, tokens: int, least: float = DAMP) -> float:
    """Return the damping for so many columns whose Gram is of so many tokens, as a share of the mean diagonal."""
    return max(least, min(MOST_DAMP, derive_strength(columns, tokens)))
