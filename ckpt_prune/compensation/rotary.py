"""Complex factors of rotary pairs: the pairs that stay make up for those that go. Pure functions of moments.

The factor of pair p in a query head, c_p = 1 + a_p + i b_p, is [[Re c, −Im c], [Im c, Re c]] on the two rows of the
query. a and b are least squares with a ridge, and the equations are in compensation/README.md, section 9.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ckpt_prune.compensation.least_squares import RELATIVE_CUTOFF
from ckpt_prune.compensation.logit import LogitDiagnostics, StrengthChoice, absolute_logit_strength, least_held_out
from ckpt_prune.compensation.methods import Units
from ckpt_prune.measure.moments.rotary import RotaryMoments
from ckpt_prune.model.spaces import Pairing


@dataclass(frozen=True)
class RotarySystem:
    """The normal equations of all query heads of a layer, float64.

    Attributes:
        normal: of the pairs that stay, (H, 2 P', 2 P').
        rhs: (H, 2 P').
        dropped_energy: Σ (Σ_{p∉S} z_p)², (H,): the error without factors.
        energy: Σ (Σ_p z_p)², (H,): relative errors are shares of it.
    """

    normal: Tensor
    rhs: Tensor
    dropped_energy: Tensor
    energy: Tensor

    @property
    def diagonal_mean(self) -> Tensor:
        """Mean diagonal entry of the normal matrix, (H,)."""
        return self.normal.diagonal(dim1=1, dim2=2).mean(1)


def rotary_system(moments: RotaryMoments, kept: Tensor) -> RotarySystem:
    """Build the normal equations of keeping some pairs of each KV head."""
    if kept.dim() != 2 or moments.heads % len(kept) or not 1 <= kept.shape[1] <= moments.pairs:
        raise ValueError(f"kept pairs must be (KV heads, 1 to {moments.pairs}), not {tuple(kept.shape)}")
    pairs_of_heads = kept.repeat_interleave(moments.heads // len(kept), 0)
    lines = torch.stack([2 * pairs_of_heads, 2 * pairs_of_heads + 1], -1).flatten(1)
    rows = moments.gram.gather(1, lines[:, :, None].expand(-1, -1, moments.gram.shape[2]))
    normal = rows.gather(2, lines[:, None, :].expand(-1, lines.shape[1], -1))
    # What every pair gives the logits together, and those that stay: 1 at z, 0 at z'.
    all_pairs = torch.zeros(moments.heads, moments.gram.shape[1], dtype=torch.float64, device=kept.device)
    all_pairs[:, ::2] = 1
    dropped = all_pairs.scatter(1, 2 * pairs_of_heads, 0.0)
    lost = (moments.gram @ dropped[:, :, None]).squeeze(2)
    return RotarySystem(
        normal,
        lost.gather(1, lines),
        (dropped * lost).sum(1).clamp_min(0),
        (all_pairs * (moments.gram @ all_pairs[:, :, None]).squeeze(2)).sum(1).clamp_min(0),
    )


def solve_factors(system: RotarySystem, strength: Tensor) -> Tensor:
    """Solve for a and b of every pair that stays, (H, P', 2) float64: the least ones if several do as well.

    `strength` is of each query head, (H,), zero or more, absolute.
    """
    values, vectors = torch.linalg.eigh(system.normal)
    values = torch.where(values > RELATIVE_CUTOFF * values[:, -1:], values, 0.0) + strength[:, None]
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)
    factors: Tensor = vectors @ (inverse * (vectors.mT @ system.rhs[:, :, None]).squeeze(2))[:, :, None]
    return factors.view(len(factors), -1, 2)


def factor_errors(system: RotarySystem, factors: Tensor) -> Tensor:
    """Return the squared error of the logits of every query head over all pairs of tokens, (H,), never negative.

    `system` is of the samples to measure on; factors (H, P', 2) may be fitted to others.
    """
    x = factors.flatten(1)
    through = (system.normal @ x[:, :, None]).squeeze(2)
    return (system.dropped_energy + (x * (through - 2 * system.rhs)).sum(1)).clamp_min(0)


def choose_factors(
    folds: Sequence[RotaryMoments], kept: Tensor, grid: Sequence[float], units: Units = "relative"
) -> StrengthChoice:
    """Choose the strength of `grid` with the least held-out logit error over `folds`, one for all heads."""

    def errors(_: int, held_fold: int) -> tuple[Tensor, Tensor]:
        train = rotary_system(reduce(add, [*folds[:held_fold], *folds[held_fold + 1 :]]), kept)
        own_system = rotary_system(folds[held_fold], kept)
        fitted = (solve_factors(train, absolute_logit_strength(value, units, train.diagonal_mean)) for value in grid)
        return torch.stack([factor_errors(own_system, factors).sum() for factors in fitted]), own_system.energy.sum()

    return least_held_out(folds, 1, grid, errors)


def diagnose_factors(system: RotarySystem, reached: Tensor) -> LogitDiagnostics:
    """Return the diagnostics of factors; `reached` are the errors of a solution, (H,)."""
    lost = system.dropped_energy
    least = factor_errors(system, solve_factors(system, torch.zeros_like(lost)))
    return LogitDiagnostics.of(lost, torch.minimum(torch.minimum(least, reached), lost))


def pair_rows(kept: Tensor, pairs: int, copies: int, layout: Pairing) -> Tensor:
    """Return rows of q (or k) of the pairs that stay: first and second of each, (heads, P', 2) int64.

    Args:
        kept: pairs of every KV head, (KV heads, P') int64.
        pairs: of a head, P.
        copies: heads in turn that share a KV head's pairs; 1 for k.
    """
    kept_pairs = kept.repeat_interleave(copies, 0)
    first, second = (kept_pairs, kept_pairs + pairs) if layout == "halves" else (2 * kept_pairs, 2 * kept_pairs + 1)
    return (
        torch.stack([first, second], -1)
        + 2 * pairs * torch.arange(len(kept_pairs), device=kept_pairs.device)[:, None, None]
    )


def absorb_factors(
    rows: Tensor, factors: Tensor | None, kept: Tensor, pairs: int, copies: int, layout: Pairing
) -> Tensor:
    """Return the rows of a projection or bias that stay, in their own layout, multiplied by their factors.

    Args:
        rows: (heads 2 P, ...), any floating dtype.
        factors: a and b, (heads, P', 2); None leaves rows as they are.

    Returns:
        (heads 2 P', ...) float64.
    """
    first, second = rows.double()[pair_rows(kept, pairs, copies, layout)].unbind(2)
    if factors is not None:
        real, imaginary = (part.view(*part.shape, *[1] * (rows.dim() - 1)) for part in factors.unbind(2))
        first, second = (1 + real) * first - imaginary * second, imaginary * first + (1 + real) * second
    joined = torch.cat([first, second], 1) if layout == "halves" else torch.stack([first, second], 2).flatten(1, 2)
    return joined.flatten(0, 1)
