"""Complex factors: the rotary pairs that stay make up for those that go. Pure functions of moments.

See compensation/README.md, section 9.

Rotation by position turns pair p of a query and a key, and what compensates must commute with it: a complex factor
c_p for every pair and query head, which is [[Re c, −Im c], [Im c, Re c]] on the two rows of the query. With z_p and
z'_p of `moments.rotary`, c_p = 1 + a_p + i b_p adds a_p z_p + b_p z'_p to the logits. So a and b are least squares,
with ridge towards no factor:

    Σ (Σ_{p∈S} (a_p z_p + b_p z'_p) − Σ_{p∉S} z_p)² + λ (‖a‖² + ‖b‖²),  sums over all pairs of tokens of all samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ckpt_prune.architectures.spaces import Pairing
from ckpt_prune.compensation.least_squares import RELATIVE_CUTOFF
from ckpt_prune.compensation.logit import LogitDiagnostics, StrengthChoice, absolute_logit_strength, least_held_out
from ckpt_prune.compensation.methods import MethodFacts, Units
from ckpt_prune.measure.moments.rotary import RotaryMoments

ROTARY_METHODS: dict[str, MethodFacts] = {
    own.name: own
    for own in (
        MethodFacts("none", "keep the surviving rows of q and k as they are", "no compensation", False, False, False),
        MethodFacts(
            "factors",
            "scale and turn each rotary pair that stays by a complex factor, absorbed into q",
            "this project",
            False,
            True,
            False,
        ),
    )
}
"""Every compensation that a recipe may name for rotary pairs."""


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
        """Of the normal matrix, (H,)."""
        return self.normal.diagonal(dim1=1, dim2=2).mean(1)


def rotary_system(moments: RotaryMoments, kept: Tensor) -> RotarySystem:
    """The normal equations of keeping some pairs of each KV head.

    Args:
        moments: of the layer.
        kept: (KV heads, P') int64, distinct.

    Raises:
        ValueError: `kept` is not (KV heads, 1 to P).
    """
    if kept.dim() != 2 or moments.heads % len(kept) or not 1 <= kept.shape[1] <= moments.pairs:
        raise ValueError(f"kept pairs must be (KV heads, 1 to {moments.pairs}), not {tuple(kept.shape)}")
    of_heads = kept.repeat_interleave(moments.heads // len(kept), 0)
    both = torch.stack([2 * of_heads, 2 * of_heads + 1], -1).flatten(1)
    rows = moments.gram.gather(1, both[:, :, None].expand(-1, -1, moments.gram.shape[2]))
    normal = rows.gather(2, both[:, None, :].expand(-1, both.shape[1], -1))
    # What every pair gives the logits together, and those that stay: 1 at z, 0 at z'.
    whole = torch.zeros(moments.heads, moments.gram.shape[1], dtype=torch.float64, device=kept.device)
    whole[:, ::2] = 1
    gone = whole.scatter(1, 2 * of_heads, 0.0)
    lost = (moments.gram @ gone[:, :, None]).squeeze(2)
    return RotarySystem(
        normal,
        lost.gather(1, both),
        (gone * lost).sum(1).clamp_min(0),
        (whole * (moments.gram @ whole[:, :, None]).squeeze(2)).sum(1).clamp_min(0),
    )


def solve_factors(system: RotarySystem, strength: Tensor) -> Tensor:
    """The a and b of every pair that stays: (H, P', 2) float64; the least ones where several do as well.

    Args:
        system: the equations.
        strength: of each query head, (H,), zero or more, absolute.
    """
    values, vectors = torch.linalg.eigh(system.normal)
    values = torch.where(values > RELATIVE_CUTOFF * values[:, -1:], values, 0.0) + strength[:, None]
    inverse = torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)
    found: Tensor = vectors @ (inverse * (vectors.mT @ system.rhs[:, :, None]).squeeze(2))[:, :, None]
    return found.view(len(found), -1, 2)


def factor_freedom(system: RotarySystem, strength: Tensor) -> float:
    """Effective degrees of freedom of the factors of all heads, Σ v / (v + λ) over the eigenvalues v of each.

    Args:
        system: the equations.
        strength: of each query head, (H,), zero or more, absolute.
    """
    values = torch.linalg.eigvalsh(system.normal)
    values = torch.where(values > RELATIVE_CUTOFF * values[:, -1:], values, 0.0)
    return float(torch.where(values > 0, values / (values + strength[:, None]), 0.0).sum())


def factor_errors(system: RotarySystem, factors: Tensor) -> Tensor:
    """What the logits of every query head lose, squared and summed over all pairs of tokens, (H,), never negative.

    Args:
        system: of the samples to measure on.
        factors: (H, P', 2), fitted to any.
    """
    x = factors.flatten(1)
    through = (system.normal @ x[:, :, None]).squeeze(2)
    return (system.dropped_energy + (x * (through - 2 * system.rhs)).sum(1)).clamp_min(0)


def choose_factors(
    folds: Sequence[RotaryMoments], kept: Tensor, grid: Sequence[float], units: Units = "relative"
) -> StrengthChoice:
    """The strength of `grid` with the least held-out logit error over `folds`, one for all heads.

    Args:
        folds: moments of disjoint samples.
        kept: (KV heads, P') int64.
        grid: strengths to try, none negative.
        units: of the grid.

    Returns:
        The choice, as `logit.choose_strength` returns it.

    Raises:
        ValueError: fewer than two folds, an empty grid, or a negative strength.
    """

    def errors(_: int, held: int) -> tuple[Tensor, Tensor]:
        train = rotary_system(reduce(add, [*folds[:held], *folds[held + 1 :]]), kept)
        own = rotary_system(folds[held], kept)
        fitted = (solve_factors(train, absolute_logit_strength(value, units, train.diagonal_mean)) for value in grid)
        return torch.stack([factor_errors(own, each).sum() for each in fitted]), own.energy.sum()

    return least_held_out(folds, 1, grid, errors)


def diagnose_factors(system: RotarySystem, reached: Tensor) -> LogitDiagnostics:
    """How far factors go.

    Args:
        system: the equations.
        reached: errors of a solution, (H,).
    """
    lost = system.dropped_energy
    least = factor_errors(system, solve_factors(system, torch.zeros_like(lost)))
    return LogitDiagnostics.of(lost, torch.minimum(torch.minimum(least, reached), lost))


def pair_rows(kept: Tensor, pairs: int, copies: int, layout: Pairing) -> Tensor:
    """Rows of q (or of k) of the pairs that stay, head by head: first and second of each, (heads, P', 2) int64.

    Args:
        kept: pairs of every KV head, (KV heads, P') int64.
        pairs: of a head, P.
        copies: heads in turn that share a KV head's pairs; 1 for k.
        layout: how pairs lie in a head.
    """
    own = kept.repeat_interleave(copies, 0)
    first, second = (own, own + pairs) if layout == "halves" else (2 * own, 2 * own + 1)
    return torch.stack([first, second], -1) + 2 * pairs * torch.arange(len(own), device=own.device)[:, None, None]


def absorb_factors(
    rows: Tensor, factors: Tensor | None, kept: Tensor, pairs: int, copies: int, layout: Pairing
) -> Tensor:
    """Rows of a projection, or a bias, of the pairs that stay, in their own layout, with what they absorb.

    Args:
        rows: (heads 2 P, ...), any floating dtype.
        factors: a and b, (heads, P', 2); None leaves rows as they are.
        kept: as in `pair_rows`.
        pairs: P.
        copies: as in `pair_rows`.
        layout: how pairs lie in a head.

    Returns:
        (heads 2 P', ...) float64.
    """
    first, second = rows.double()[pair_rows(kept, pairs, copies, layout)].unbind(2)
    if factors is not None:
        real, imaginary = (part.view(*part.shape, *[1] * (rows.dim() - 1)) for part in factors.unbind(2))
        first, second = (1 + real) * first - imaginary * second, imaginary * first + (1 + real) * second
    joined = torch.cat([first, second], 1) if layout == "halves" else torch.stack([first, second], 2).flatten(1, 2)
    return joined.flatten(0, 1)
