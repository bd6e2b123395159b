"""Logit compensation: kept dimensions of queries and keys make up for the dropped ones (CORP eq. 14-16).

With S the kept and P the dropped dimensions of a head, A_b = Q_bᵀQ_b and B_b = K_bᵀK_b of sample b, M solves

    Σ_b A_b[S,S] M B_b[S,S] + λ M = Σ_b A_b[S,P] B_b[P,S].

The two projections absorb I + M (compensation/README.md, section 7). CORP solves the d'² equations densely, which is
d'⁶ work; here conjugate gradients do. λ is added to sums over samples, except in `absolute_logit_strength`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import dropped_indices
from ckpt_prune.compensation.least_squares import RELATIVE_CUTOFF
from ckpt_prune.compensation.methods import Units
from ckpt_prune.compensation.mixing import mix_dimensions, selection_matrix
from ckpt_prune.measure.moments.logits import LogitForm, LogitMoments, packed_positions

Operator = Callable[[Tensor], Tensor]
"""M (g, d', d') → Σ_b A_b[S,S] M B_b[S,S], (g, d', d'): for one head, and g matrices at once."""

DENSE_LIMIT = 64
"""Largest d' at which the operator is written out as a (d'², d'²) matrix, where the moments are per sample."""
DENSE_FROM = 4
"""Samples per kept dimension from which a product with that matrix is cheaper than one with every sample's Grams."""
CHOICE_TOLERANCE = 1e-8
"""Tolerance of solves that only rank strengths or give a floor. Errors from float32 Grams have fewer digits."""
NEAR_ZERO = 1e-6
"""A relative strength that is negligible beside the samples, and above float32 rounding."""
MAX_STEPS = 1000
"""Steps at most. Real layers take 15 to 40, since the preconditioner leaves only how samples differ."""


@dataclass(frozen=True)
class StrengthChoice:
    """The best strength on held-out folds, and the errors that it was chosen by.

    Attributes:
        value: in the units of the grid. If errors are equal, the larger wins: it changes the weights less.
        errors: strength → relative held-out error, Σ held-out error / Σ target energy.
    """

    value: float
    errors: dict[float, float]


@dataclass(frozen=True)
class LogitSystem:
    """The normal equations of all heads of one layer, for kept sets S of one size d'.

    The equations of two sets of samples add. Tensors are float64; those of `kept` may have fewer digits.

    Attributes:
        kept: moments restricted to S, from which the operator M ↦ Σ_b A_b[S,S] M B_b[S,S] is applied.
        rhs: Σ_b A_b[S,P] B_b[P,S], (H, d', d').
        query_gram: Σ_b A_b[S,S] tr B_b[S,S], (H, d', d').
        key_gram: Σ_b B_b[S,S] tr A_b[S,S], (H, d', d').
        dropped_energy: Σ_b ‖Q_P K_Pᵀ‖², (H,): the logit error of M = 0.
        energy: Σ_b ‖Q Kᵀ‖² over all dimensions, (H,). Relative errors are shares of it.
    """

    kept: LogitMoments
    rhs: Tensor
    query_gram: Tensor
    key_gram: Tensor
    dropped_energy: Tensor
    energy: Tensor

    @property
    def diagonal_mean(self) -> Tensor:
        """Mean diagonal entry of the Kronecker operator, Σ_b tr A_b[S,S] tr B_b[S,S] / d'², (H,)."""
        return self.query_gram.diagonal(dim1=1, dim2=2).sum(1) / self.kept.head_dim**2

    def operator(self, head: int, dtype: torch.dtype = torch.float64) -> Operator:
        """Lay out the operator of one head for many products in `dtype`. It holds memory of its own while it lives."""
        size = self.kept.head_dim
        at = packed_positions(size, self.rhs.device)
        if self.kept.fourth is not None:
            # Entry ((i, j), (k, l)) is Σ_b A_b[i, k] B_b[j, l].
            fourth = self.kept.fourth[head].to(dtype)
            dense = fourth[at[:, None, :, None], at[None, :, None, :]].view(size * size, size * size)
            return lambda M: (dense @ M.reshape(-1, size * size).T).T.reshape(M.shape)
        queries, keys = (packed[head].to(dtype)[:, at] for packed in self.kept.grams())
        # In this layout two products serve all samples: (d' N, d') with M, then (d', N d') with all B_b stacked.
        queries, keys = queries.transpose(0, 1).reshape(-1, size), keys.reshape(-1, size)
        return lambda M: torch.stack([(queries @ one).view(size, -1) @ keys for one in M])

    def apply(self, M: Tensor) -> Tensor:
        """Return Σ_b A_b[S,S] M B_b[S,S] for M (H, d', d') float64, head by head."""
        return torch.cat([self.operator(head)(M[head : head + 1]) for head in range(self.kept.heads)])

    def __add__(self, other: "LogitSystem") -> "LogitSystem":
        return LogitSystem(
            self.kept + other.kept,
            self.rhs + other.rhs,
            self.query_gram + other.query_gram,
            self.key_gram + other.key_gram,
            self.dropped_energy + other.dropped_energy,
            self.energy + other.energy,
        )


def logit_system(moments: LogitMoments, kept: Tensor) -> LogitSystem:
    """Build the normal equations of keeping the dimensions `kept` of each head.

    Args:
        moments: of the layer's queries and keys, in either form.
        kept: (H, d') int64, distinct, 1 <= d' <= d, on the moments' device.
    """
    return _system(moments, kept, _operator_form(moments.samples, kept.shape[1]))


def full_system(moments: LogitMoments) -> LogitSystem:
    """Build the system of keeping every dimension of each head: its operator is E ↦ Σ_b A_b E B_b."""
    every = torch.arange(moments.head_dim, device=moments.device)
    return logit_system(moments, every.expand(moments.heads, -1))


def _operator_form(samples: int, size: int) -> LogitForm:
    return "fourth-order" if size <= DENSE_LIMIT and samples >= DENSE_FROM * size else "per-sample"


def _system(moments: LogitMoments, kept: Tensor, form: LogitForm) -> LogitSystem:
    if kept.shape[0] != moments.heads or not 1 <= kept.shape[1] <= moments.head_dim:
        raise ValueError(f"kept dimensions must be ({moments.heads}, 1 to {moments.head_dim}), not {tuple(kept.shape)}")
    heads = [_of_head(moments.select_head(head), kept[head]) for head in range(moments.heads)]
    rhs, query_gram, key_gram, dropped_energy, energy = (torch.stack(parts) for parts in zip(*heads, strict=True))
    restricted = moments.restrict(kept)
    if form == "fourth-order":
        restricted = restricted.as_fourth(torch.float64)
    return LogitSystem(restricted, rhs, query_gram, key_gram, dropped_energy, energy)


def _of_head(moments: LogitMoments, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the attributes of a `LogitSystem` other than `kept`, for one head, in their order."""
    at = packed_positions(moments.head_dim, kept.device)
    dropped = dropped_indices(moments.head_dim, kept)
    inside, across, outside = at[kept][:, kept], at[kept][:, dropped], at[dropped][:, dropped]
    diagonal = inside.diagonal()
    size = kept.shape[0]
    if moments.fourth is not None:
        fourth = moments.fourth[0]
        rhs = fourth.new_zeros(size, size, dtype=torch.float64)
        for pairs in across.T:
            rhs += fourth[pairs[:, None], pairs].double()
        query_gram = fourth[:, diagonal].double().sum(1)[inside]
        key_gram = fourth[diagonal].double().sum(0)[inside]

        def energy(pairs: Tensor) -> Tensor:
            return fourth[pairs, pairs].double().sum()
    else:
        queries, keys = (packed[0] for packed in moments.grams())
        query_columns = queries[:, across].double().transpose(0, 1).reshape(size, -1)
        key_rows = keys[:, across.T].double().reshape(-1, size)
        rhs = query_columns @ key_rows
        query_gram = (keys[:, diagonal].double().sum(1) @ queries.double())[inside]
        key_gram = (queries[:, diagonal].double().sum(1) @ keys.double())[inside]

        def energy(pairs: Tensor) -> Tensor:
            # Row by row: all pairs of all samples at once would take several times the memory of the moments.
            rows = [(queries[:, row].double() * keys[:, row].double()).sum() for row in pairs]
            return torch.stack(rows).sum() if rows else queries.new_zeros((), dtype=torch.float64)

    return rhs, query_gram, key_gram, energy(outside), energy(at)


def absolute_logit_strength(value: float, units: Units, mean: Tensor) -> Tensor:
    """Return a strength on the scale of a system, (H,) float64: a relative one is multiplied by `mean`."""
    if not value >= 0:
        raise ValueError(f"lambda must be zero or more, not {value}")
    return value * (mean if units == "relative" else torch.ones_like(mean))


@dataclass(frozen=True)
class LogitSolution:
    """Result of conjugate gradients for each head.

    Attributes:
        M: (H, d', d') float64.
        steps: products with the operator, (H,) int64.
        residual: norm of the residual over the norm of the right-hand side, both in the metric of the inverse
            preconditioner, (H,) float64. 0 where the right-hand side is 0.
    """

    M: Tensor
    steps: Tensor
    residual: Tensor


def solve_logit(
    system: LogitSystem, strength: Tensor, *, tolerance: float = 1e-10, max_steps: int = MAX_STEPS
) -> LogitSolution:
    """Solve Σ_b A_b[S,S] M B_b[S,S] + λ M = Σ_b A_b[S,P] B_b[P,S] for the M of each head (CORP eq. 15).

    Conjugate gradients start from M = 0. The preconditioner is one Kronecker product, Â ⊗ B̂ + λ with
    Â = Σ_b A_b tr B_b and B̂ = Σ_b B_b tr A_b over Σ_b tr A_b tr B_b. It has the operator's trace, and is inverted in
    the eigenvectors of its factors. If all samples were alike it would be the operator itself.

    Where the operator is singular and the moments are float32, some of its eigenvalues are rounding, of either sign.
    A relative strength of `NEAR_ZERO` or more hides them. Dimensions that are always zero do no harm.

    Where λ = 0 and the operator is singular, Σ_b ‖Q_P K_Pᵀ − Q_S M K_Sᵀ‖² has many minima. The result is the one with
    the least tr(Mᵀ Â M B̂), which is zero in directions that no sample has. A head also stops where rounding of the
    moments leaves its quadratic form without positive curvature. Its M is then never worse than M = 0.

    Args:
        strength: of each head, (H,), zero or more, absolute.
        tolerance: a head is done at this `LogitSolution.residual`.
        max_steps: a head is given up after so many steps, with the M it has; its residual tells.
    """
    heads = [
        _conjugate_gradients(system, head, strength[head : head + 1].double(), tolerance, max_steps)
        for head in range(system.kept.heads)
    ]
    return LogitSolution(*(torch.cat(parts) for parts in zip(*heads, strict=True)))


def _conjugate_gradients(
    system: LogitSystem, head: int, strengths: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return M (g, d', d'), steps (g,) and residuals (g,) of one head. Each of the g strengths stops on its own."""
    operator, precondition = system.operator(head), _preconditioner(system, head, strengths)
    shift = strengths[:, None, None]
    residual = system.rhs[head].expand(len(strengths), -1, -1).clone()
    M = torch.zeros_like(residual)
    steps = torch.zeros(len(strengths), dtype=torch.int64, device=residual.device)
    direction = precondition(residual)
    square = start = _inner(residual, direction)
    running = square > 0
    for _ in range(max_steps):
        if not bool(running.any()):
            break
        image = torch.zeros_like(direction)
        image[running] = operator(direction[running])
        image += shift * direction
        curvature = _inner(direction, image)
        running = running & (curvature > 0)
        steps += running
        length = torch.where(running, square / torch.where(running, curvature, 1.0), 0.0)[:, None, None]
        M += length * direction
        residual -= length * image
        turned = precondition(residual)
        next_square = torch.where(running, _inner(residual, turned).clamp_min(0), square)
        bend = torch.where(running, next_square / torch.where(running, square, 1.0), 0.0)[:, None, None]
        direction = turned + bend * direction
        square = next_square
        running = running & (square > tolerance**2 * start)
    return M, steps, torch.where(start > 0, square / torch.where(start > 0, start, 1.0), 0.0).sqrt()


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2))


def _preconditioner(system: LogitSystem, head: int, strengths: Tensor) -> Operator:
    """Return (Â ⊗ B̂ + λ)⁺ of one head, for each of g strengths. It is zero where both Â ⊗ B̂ and λ are."""
    (a, U), (b, V) = (torch.linalg.eigh(gram[head]) for gram in (system.query_gram, system.key_gram))
    a, b = (torch.where(values > RELATIVE_CUTOFF * values[-1], values, 0.0) for values in (a, b))
    trace = system.query_gram[head].trace()
    kronecker = torch.outer(a, b) / torch.where(trace > 0, trace, 1.0) + strengths[:, None, None]
    inverse = torch.where(kronecker > 0, 1 / torch.where(kronecker > 0, kronecker, 1.0), 0.0)
    return lambda R: U @ (inverse * (U.T @ R @ V)) @ V.T


def logit_error(system: LogitSystem, M: Tensor) -> Tensor:
    """Return Σ_b ‖Q_P K_Pᵀ − Q_S M K_Sᵀ‖² of each head, (H,) float64, never negative.

    `system` is of the samples to measure on; M (H, d', d') may have been fitted to others.
    """
    return torch.cat([_errors(system, head, M[head : head + 1]) for head in range(system.kept.heads)])


def _errors(system: LogitSystem, head: int, M: Tensor) -> Tensor:
    """Return `logit_error` of one head, (g,), for g matrices M (g, d', d')."""
    gain = 2 * _inner(M, system.rhs[head]) - _inner(M, system.operator(head)(M))
    return (system.dropped_energy[head] - gain).clamp_min(0)


@dataclass(frozen=True)
class LogitDiagnostics:
    """Logit error of dropping dimensions, and how much of it the kept ones can make up, head by head (CORP C.2).

    Attributes:
        uncompensated: Σ_b ‖Q_P K_Pᵀ‖², (H,) float64.
        floor: J* = uncompensated − hᵀ G⁺ h, the least error that any M can reach, (H,) float64.
        rho2: 1 − floor / uncompensated, (H,) float64 in [0, 1]; 1 where nothing is lost.
    """

    uncompensated: Tensor
    floor: Tensor
    rho2: Tensor

    @classmethod
    def of(cls, uncompensated: Tensor, floor: Tensor) -> "LogitDiagnostics":
        """Compute ρ² from the two errors."""
        some = uncompensated > 0
        rho2 = 1 - torch.where(some, floor / torch.where(some, uncompensated, 1.0), 0.0)
        return cls(uncompensated, floor, rho2)


def diagnose_logit(system: LogitSystem) -> LogitDiagnostics:
    """Return the diagnostics of a system."""
    uncompensated = system.dropped_energy.clamp_min(0)
    # The error of any M is an upper bound of the floor, and its excess is quadratic in the error of M. λ = 0 comes
    # nearest, unless the operator is singular and rounding stops it early.
    strengths_of_heads = torch.stack(
        [absolute_logit_strength(value, "relative", system.diagonal_mean) for value in (0.0, NEAR_ZERO)], 1
    )
    floors = []
    for head, strengths in enumerate(strengths_of_heads):
        M, _, _ = _conjugate_gradients(system, head, strengths, CHOICE_TOLERANCE, MAX_STEPS)
        floors.append(_errors(system, head, M).amin())
    return LogitDiagnostics.of(uncompensated, torch.minimum(torch.stack(floors), uncompensated))


@dataclass(frozen=True)
class LogitFit:
    """Factors of the narrow queries and keys of a layer: q' = Pᵀq and k' = Qᵀk, head by head.

    Attributes:
        left: P, (H, d, d') float64.
        right: Q, likewise.
        errors: Σ_b ‖Q_b (I − P Qᵀ) K_bᵀ‖² on what it was fitted to, (H,) float64.
        residual: of the equations that were solved, relative; None if there are none.
    """

    left: Tensor
    right: Tensor
    errors: Tensor
    residual: float | None = None


def fit_unmeasured(kept: Tensor, dims: int) -> LogitFit:
    """Keep dimensions as they are if nothing was measured; errors are zero."""
    chosen = selection_matrix(kept, dims)
    return LogitFit(chosen, chosen, chosen.new_zeros(len(kept)))


def keep_dimensions(moments: LogitMoments, system: LogitSystem, kept: Tensor, value: float, units: Units) -> LogitFit:
    """Keep rows of q and k as they are."""
    chosen = selection_matrix(kept, moments.head_dim)
    return LogitFit(chosen, chosen, system.dropped_energy.clamp_min(0))


def refit_logits(moments: LogitMoments, system: LogitSystem, kept: Tensor, value: float, units: Units) -> LogitFit:
    """Solve for M and absorb it into q and k (CORP eq. 14-16)."""
    solution = solve_logit(system, absolute_logit_strength(value, units, system.diagonal_mean))
    left, right = mix_dimensions(solution.M, kept, moments.head_dim)
    return LogitFit(left, right, logit_error(system, solution.M), float(solution.residual.max()))


def diagnose_fit(moments: LogitMoments, system: LogitSystem, fit: LogitFit) -> LogitDiagnostics:
    """Return the diagnostics of the system; they are the same for every fit of kept dimensions."""
    return diagnose_logit(system)


def choose_strength(
    folds: Sequence[LogitMoments], kept: Tensor, grid: Sequence[float], units: Units = "relative"
) -> StrengthChoice:
    """Choose the strength of `grid` with the least held-out logit error over `folds`, one for all heads.

    The errors of the choice are Σ held-out ‖Q_P K_Pᵀ − Q_S M K_Sᵀ‖² / Σ ‖Q Kᵀ‖².

    Args:
        folds: moments of disjoint samples.
        kept: (H, d') int64.
        units: of the grid. Relative strengths are relative to the training folds' system, head by head.
    """
    form = _operator_form(sum(fold.samples for fold in folds), kept.shape[1])
    # One head at a time: the summed systems of all heads and all folds would not fit beside a large layer.
    systems: dict[int, list[LogitSystem]] = {}

    def errors(head: int, held: int) -> tuple[Tensor, Tensor]:
        if head not in systems:
            systems.clear()
            systems[head] = [_system(fold.select_head(head), kept[head : head + 1], form) for fold in folds]
        fold_systems = systems[head]
        train = reduce(add, fold_systems[:held] + fold_systems[held + 1 :])
        strengths = torch.cat([absolute_logit_strength(value, units, train.diagonal_mean) for value in grid])
        M, _, _ = _conjugate_gradients(train, 0, strengths, CHOICE_TOLERANCE, MAX_STEPS)
        return _errors(fold_systems[held], 0, M), fold_systems[held].energy.sum()

    return least_held_out(folds, kept.shape[0], grid, errors)


def least_held_out(
    folds: Sequence[object],
    heads: int,
    grid: Sequence[float],
    errors: Callable[[int, int], tuple[Tensor, Tensor]],
) -> StrengthChoice:
    """Choose the strength of the least error over all heads and folds.

    Args:
        folds: moments of disjoint samples.
        errors: head and number of the held-out fold → held-out errors of all strengths (g,), and the fold's energy.
    """
    if len(folds) < 2:
        raise ValueError(f"choosing lambda on held-out samples needs at least 2 folds, not {len(folds)}")
    if not grid:
        raise ValueError("choosing lambda needs at least one value to try")
    held_out = [errors(head, fold) for head in range(heads) for fold in range(len(folds))]
    errors_by_strength = torch.stack([errors_of_head for errors_of_head, _ in held_out]).sum(0)
    energy = sum(float(fold_energy) for _, fold_energy in held_out)
    shares = {
        value: float(error_of_strength) / energy if energy > 0 else 0.0
        for value, error_of_strength in zip(grid, errors_by_strength, strict=True)
    }
    return StrengthChoice(min(shares, key=lambda value: (shares[value], -value)), shares)
