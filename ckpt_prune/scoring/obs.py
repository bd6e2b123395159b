"""Structured optimal brain surgeon: drops inputs of a projection in the order of least cost, the others refitted.

Dropping the columns D costs J(D) = tr(W_D ([(G + λI)⁻¹]_DD)⁻¹ W_Dᵀ), and units go greedily (Hassibi and Stork 1993;
scoring/README.md, section 5). Costs need the refitted weight Ŵ only through A = ŴᵀŴ, so H, the inverse of G + λI over
the units that are left, and A are all that is kept. With L Lᵀ = H_BB, dropping B is a symmetric update of both:

    H ← H − v vᵀ,   A ← A − v zᵀ − z vᵀ,   v = H_:B L⁻ᵀ,   z = A_:B L⁻ᵀ − ½ v (L⁻¹ A_BB L⁻ᵀ).

v and z are kept in panels. At each step the panels update only the blocks on the diagonal and the columns about to go.
A full panel is applied to the lower triangles by matrix products. The last unit takes the place of a dropped one.

The relative error of a cost from rounding stays below about 2e-16 times the condition number of G + λI (measured
against 50 digits). That number is at most (d + damp) / damp: 1.1e6 at a width of 11008 and the default. In float32 the
error is 1e-7 times it, which may swap units of nearly equal cost.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.scoring.costs import WIDE, single_factor
from ckpt_prune.sparsity.damping import DAMP, MOST_DAMP, SingularHessianError, damped_cholesky, dampings

PANEL = 128
"""Columns dropped before their updates are applied; raised to the columns of a unit."""
SINGLE_DAMP = 1e-3
"""More inputs than `WIDE` go in float32 if the damping is at least this: twice as fast, in half the memory."""
AGREES = 1e-3
"""Largest relative error in the cost of dropping everything, which is known. Beyond it, all is done in float64."""
ROWS = 1024
"""Rows of a matrix in one product: few enough to waste little of a triangle, enough for fast products."""


@dataclass(frozen=True)
class UnitRemoval:
    """The order in which units go, and what that costs.

    Attributes:
        order: units in the order they are dropped, (n,) int64.
        costs: J after dropping `order[: i + 1]`, (n,) float64, never decreasing, on the scale of Gram sums: squared
            units of the output, summed over tokens. They include λ ‖Ŵ_K − W_K‖² and λ ‖W_D‖².
        strength: absolute, on the same scale.
    """

    order: Tensor
    costs: Tensor
    strength: float = 0.0

    @property
    def scores(self) -> Tensor:
        """J at the moment each unit is dropped, (n,) float64 by unit; higher = keep.

        The highest k scores are the last k units of the order, except where costs tie. There the choice does not
        matter. Suppose that dropping a and then T raises J no further than a alone did. Then any non-empty part of
        {a} ∪ T raises J to that same value: no higher, since J never falls as more goes, and no lower, since a was the
        cheapest of them.
        """
        return torch.empty_like(self.costs).scatter_(0, self.order, self.costs)

    @property
    def curve(self) -> Tensor:
        """J with the first k units dropped, k = 0 … n, (n + 1,) float64."""
        return torch.cat([self.costs.new_zeros(1), self.costs])


def remove_greedily(
    weight: Tensor, gram: Tensor, per_unit: int = 1, *, damp: float = DAMP, count: int | None = None
) -> UnitRemoval:
    """Drop units of an input axis greedily: return their order, and the cost of every prefix of it.

    The work is about 2 d³ + d_out d² flops, nearly all in factorisations and matrix products. Memory beyond the
    arguments is two (d, d) float64 matrices at the peak on a CPU (2 GB at a width of 11008) and some panels. Solvers of
    a GPU add one more.

    G + λI must be positive definite to the precision of float64. It is not where there is no damping and inputs are
    always zero or depend on each other. Then the damping is raised as in `sparsity.damping`: from zero to 1e-4 of the
    mean diagonal, else tenfold, again and again up to the mean itself. `UnitRemoval.strength` says what it took.

    Args:
        weight: W, (d_out, d), any floating dtype, on the device of `gram`.
        gram: G = Σ x xᵀ or its centred form, (d, d), any floating dtype, symmetric.
        per_unit: adjacent columns that go together: those of a head, or of all heads of a KV group.
        damp: strength as a share of mean(diag(G)) over all inputs, as in `compensation.methods`; taken as it is if that
            mean is zero.
        count: units after which the others need no order: they follow by what each would cost alone, which takes half
            of the work if a fifth goes. None for all.

    Raises:
        SingularHessianError: no damping is enough, since G is not positive semi-definite.
        ValueError: shapes that do not fit, a negative damping, or infinities or NaN in an argument.
    """
    _check(weight, gram, per_unit, damp)
    scale = float(gram.diagonal().double().mean())
    scale = scale if scale > 0 else 1.0
    for share in dampings(damp, MOST_DAMP):
        with suppress(SingularHessianError):
            order, added = _remove(weight, gram, scale, share, per_unit, count)
            # J may not fall. Only a CPU promises to add one after the other.
            return UnitRemoval(order, added.double().mul_(scale).cpu().cumsum(0).to(weight.device), share * scale)
    raise SingularHessianError(
        f"the Gram is singular with damping up to {max(damp, MOST_DAMP):g} of its mean diagonal: it is no Gram, "
        "calibrate again"
    )


def _remove(
    weight: Tensor, gram: Tensor, scale: float, share: float, per_unit: int, count: int | None
) -> tuple[Tensor, Tensor]:
    """Return units in the order of greedy removal, and the cost that each adds in units of `scale`."""
    if len(gram) > WIDE and share >= SINGLE_DAMP:
        with suppress(SingularHessianError):
            order, added, left = _greedy(weight, _inverse(gram, scale, share, torch.float32), per_unit, count)
            single = weight.float()
            total = float(((single @ gram.float()).div_(scale).add_(single, alpha=share) * single).sum())
            # What is left costs tr(Ŵ (G + λI) Ŵᵀ), over the units that are left.
            gone = added if left is None else added[:count]
            rest_cost = 0.0 if left is None else _cost_left(*left, gram, scale, share)
            if abs(float(gone.sum(dtype=torch.float64)) + rest_cost - total) <= AGREES * total:
                return order, added
    return _greedy(weight, _inverse(gram, scale, share), per_unit, count)[:2]


def _cost_left(A: Tensor, columns: Tensor, gram: Tensor, scale: float, share: float) -> float:
    """Return the inner product of A, (m, m) of which the lower triangle counts, and G / `scale` + `share` I there."""
    part = gram.index_select(0, columns).index_select(1, columns)
    twice = 2 * float((A.tril() * part).sum(dtype=torch.float64)) - float((A.diagonal() * part.diagonal()).sum())
    return twice / scale + share * float(A.diagonal().sum(dtype=torch.float64))


def _check(weight: Tensor, gram: Tensor, per_unit: int, damp: float) -> None:
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"a weight must be (d_out, d) with at least one input, not {tuple(weight.shape)}")
    d = weight.shape[1]
    if gram.shape != (d, d):
        raise ValueError(f"a Gram of shape {tuple(gram.shape)} does not fit a weight of {d} inputs")
    if per_unit < 1 or d % per_unit:
        raise ValueError(f"{d} inputs cannot be divided into units of {per_unit}")
    if not 0 <= damp < float("inf"):
        raise ValueError(f"damp must be a finite number of at least 0, not {damp}")
    for name, tensor in (("weight", weight), ("Gram", gram)):
        if not all_finite(tensor):
            raise ValueError(f"the {name} holds infinities or NaN")


def _inverse(gram: Tensor, scale: float, share: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return (G / `scale` + `share` I)⁻¹, (d, d), of a factor in float64, or in float32 if that has digits enough.

    Raises:
        SingularHessianError: the matrix is not positive definite.
    """
    factor = single_factor(gram, scale, share) if dtype == torch.float32 else None
    if factor is None:
        matrix = gram.to(torch.float64, copy=True, memory_format=torch.contiguous_format).div_(scale)
        factor = damped_cholesky(matrix, share, most=share)[0].to(dtype)
    torch.cholesky_inverse(factor, out=factor)
    # LAPACK's columns are our rows; the matrix is symmetric, so the transpose is the same matrix.
    return factor.mT


def _greedy(
    weight: Tensor, H: Tensor, per_unit: int, count: int | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return units in the order of greedy removal, (n,) int64, and the cost each adds, (n,), never negative.

    If it ends after `count` units, also A over those that are left (its lower triangle), and their columns.

    W is (d_out, d); H is the inverse, (d, d), in whose type all is done, and is overwritten. Raises
    `SingularHessianError` if rounding has left it not positive definite.
    """
    A = torch.zeros_like(H)
    for part in torch.split(weight, ROWS):
        wide = part.to(H.dtype)
        _add_product(A, wide, wide, 1)
    state = (_Columns if per_unit == 1 and H.device.type == "cpu" else _Units)(H, A, per_unit)
    n = len(state.unit)
    for live in range(n, 0, -1):
        if count is not None and n - live == count:
            return state.order, state.added, state.stop(live)
        state.drop_cheapest(live)
    return state.order, state.added, None


class _Units:
    """Units that are left, the first `live` of them, and what dropping the others has changed.

    Args:
        H: the inverse, (d, d), of which the lower triangle counts; overwritten, as A is.
        A: ŴᵀŴ, (d, d), likewise.
        b: columns of a unit.

    Attributes:
        h, a: H_BB and A_BB of every unit, (n, b, b) each, up to date.
        V, Z: rows v and z that H and A do not hold yet, the first `used`.
        unit: which unit stands at each place, (n,) int64.
        order, added: units in the order in which they went, and the cost that each added.
    """

    def __init__(self, H: Tensor, A: Tensor, b: int) -> None:
        self.H, self.A, self.b, self.used = H, A, b, 0
        self.h, self.a = _blocks(H, b), _blocks(A, b)
        width = max(PANEL, b)
        self.V, self.Z = H.new_empty(width, len(H)), H.new_empty(width, len(H))
        self.unit = torch.arange(len(H) // b, device=H.device)
        self.order, self.added = torch.empty_like(self.unit), H.new_empty(len(self.unit))

    def drop_cheapest(self, live: int) -> None:
        """Drop the unit that costs least; of equals the lowest, wherever exchanges have put it."""
        b, last, unit = self.b, live - 1, self.unit
        costs = _costs(self.h[:live], self.a[:live])
        least = costs.min()
        at = int(torch.where(costs <= least, unit[:live], len(unit)).argmin())
        if not float(least) > -float("inf"):
            raise _indefinite()
        gone = len(unit) - live
        self.order[gone], self.added[gone] = unit[at], least.clamp_min(0)
        if last == 0:
            return
        self.make_room(live)
        _eliminate(self.H, self.A, self.h[at], self.a[at], self.V, self.Z, self.used, at, live)
        self.used += b
        _fill(at, last, b, self.H, self.A, self.V[: self.used], self.Z[: self.used])
        for rows in (unit, self.h, self.a):
            rows[at] = rows[last]
        v, z = (panel[self.used - b : self.used, : last * b] for panel in (self.V, self.Z))
        _update(self.h[:last], self.a[:last], v, z)

    def make_room(self, live: int) -> None:
        """Apply the panels if they are full."""
        if self.used + self.b > len(self.V):
            self._apply_panels(live * self.b)
            self.used = 0

    def stop(self, live: int) -> tuple[Tensor, Tensor]:
        """Let all units follow by what each would cost alone. Return A over their columns, and the columns."""
        b, gone, unit = self.b, len(self.unit) - live, self.unit[:live]
        self._apply_panels(live * b)
        remaining = self.A[: live * b, : live * b]
        remaining.view(live, b, live, b).diagonal(dim1=0, dim2=2).copy_(self.a[:live].permute(1, 2, 0))
        costs = _costs(self.h[:live], self.a[:live])
        ranks = costs.argsort(stable=True)
        self.order[gone:], sorted_costs = unit[ranks], costs[ranks].clamp_min(0)
        self.added[gone:] = sorted_costs.diff(prepend=sorted_costs.new_zeros(1))
        columns = unit[:, None] * b + torch.arange(b, device=unit.device)
        return remaining, columns.flatten()

    def _apply_panels(self, stop: int) -> None:
        v, z = self.V[: self.used, :stop], self.Z[: self.used, :stop]
        _add_product(self.H[:stop, :stop], v, v, -1)
        _add_product(self.A[:stop, :stop], v, z, -1)
        _add_product(self.A[:stop, :stop], z, v, -1)


class _Columns(_Units):
    """Units of one column on a CPU: a step is a dozen operations on a row, which numpy begins three times as fast."""

    def __init__(self, H: Tensor, A: Tensor, b: int) -> None:
        super().__init__(H, A, b)
        self._arrays = tuple(each.numpy() for each in (H, A, self.V, self.Z))
        self._rows = tuple(each.view(-1).numpy() for each in (self.unit, self.h, self.a, self.order, self.added))
        self._scratch = np.empty_like(self._rows[1])

    @np.errstate(all="ignore")
    def drop_cheapest(self, live: int) -> None:
        H, A, V, Z = self._arrays
        unit, h, a, order, added = self._rows
        last, scratch = live - 1, self._scratch[:live]
        costs = np.divide(a[:live], h[:live], out=scratch)
        least = costs.min()
        equal = (costs == least).nonzero()[0]
        if not (h[:live].min() > 0 and least > -np.inf):
            raise _indefinite()
        at = int(equal[unit[equal].argmin()])
        gone = len(unit) - live
        order[gone], added[gone] = unit[at], max(least, 0)
        if last == 0:
            return
        self.make_room(live)
        used = self.used
        v, z = V[used, :live], Z[used, :live]
        for row, matrix in ((v, H), (z, A)):
            row[: at + 1] = matrix[at, : at + 1]
            row[at + 1 :] = matrix[at + 1 : live, at]
        if used:
            before_v, before_z = V[:used, :live], Z[:used, :live]
            v -= before_v[:, at] @ before_v
            z -= before_z[:, at] @ before_v
            z -= before_v[:, at] @ before_z
        root = np.sqrt(h[at])
        v /= root
        z /= root
        z -= np.multiply(v, 0.5 * a[at] / h[at], out=scratch)
        self.used += 1
        if at < last:
            for matrix in (H, A):
                matrix[at, :at] = matrix[last, :at]
                matrix[at + 1 : last, at] = matrix[last, at + 1 : last]
            for panel in (V, Z):
                panel[: used + 1, at] = panel[: used + 1, last]
            for rows in (unit, h, a):
                rows[at] = rows[last]
        h[:last] -= np.square(v[:last], out=scratch[:last])
        a[:last] -= 2 * np.multiply(v[:last], z[:last], out=scratch[:last])


def _indefinite() -> SingularHessianError:
    return SingularHessianError("the inverse of the Gram lost its positive definiteness to rounding")


def _eliminate(H: Tensor, A: Tensor, h: Tensor, a: Tensor, V: Tensor, Z: Tensor, used: int, at: int, live: int) -> None:
    """Write v and z of the unit `at`, as rows, after the `used` rows of V and Z. Their values at the unit are void.

    Args:
        H: lower triangle, without the updates in V.
        A: lower triangle, without the updates in V and Z.
        h: H_BB, (b, b), up to date.
        a: A_BB, (b, b), up to date.
        Z: (width, d), as V.
        used: rows of V and Z in use.
        at: position of the unit.
        live: number of units left, this one among them.
    """
    b = len(h)
    columns, stop = slice(at * b, (at + 1) * b), live * b
    before_v, before_z = V[:used, :stop], Z[:used, :stop]
    v, z = V[used : used + b, :stop], Z[used : used + b, :stop]
    for rows, matrix in ((v, H), (z, A)):
        rows[:, : columns.stop] = matrix[columns, : columns.stop]
        rows[:, columns.stop :] = matrix[columns.stop : stop, columns].T
    v.addmm_(before_v[:, columns].T, before_v, alpha=-1)
    z.addmm_(before_z[:, columns].T, before_v, alpha=-1).addmm_(before_v[:, columns].T, before_z, alpha=-1)
    if b == 1:
        v.div_(h.sqrt())
        z.div_(h.sqrt()).sub_(v * (0.5 * a / h))
    else:
        L, _ = torch.linalg.cholesky_ex(h)
        inner = torch.linalg.solve_triangular(L, torch.linalg.solve_triangular(L, a, upper=False).T, upper=False)
        v.copy_(torch.linalg.solve_triangular(L, v, upper=False))
        z.copy_(torch.linalg.solve_triangular(L, z, upper=False)).addmm_(inner, v, alpha=-0.5)


def _fill(at: int, last: int, b: int, H: Tensor, A: Tensor, V: Tensor, Z: Tensor) -> None:
    """Move the last unit to the place of unit `at`, in both panels and in both lower triangles.

    The blocks on the diagonal are left to the caller.
    """
    gap, end = slice(at * b, (at + 1) * b), slice(last * b, (last + 1) * b)
    if at == last:
        return
    between = slice(gap.stop, end.start)
    for matrix in (H, A):
        matrix[gap, : gap.start] = matrix[end, : gap.start]
        matrix[between, gap] = matrix[end, between].T
    for panel in (V, Z):
        panel[:, gap] = panel[:, end]


def _update(h: Tensor, a: Tensor, v: Tensor, z: Tensor) -> None:
    """Bring the diagonal blocks h and a, both (k, b, b), up to date with v and z, both (b, k b)."""
    k, b = len(h), len(v)
    if b == 1:
        h[:, 0, 0].addcmul_(v[0], v[0], value=-1)
        a[:, 0, 0].addcmul_(v[0], z[0], value=-2)
    else:
        left, right = (rows.view(b, k, b).permute(1, 2, 0) for rows in (v, z))
        h.baddbmm_(left, left.mT, alpha=-1)
        a.baddbmm_(left, right.mT, alpha=-1).baddbmm_(right, left.mT, alpha=-1)


def _costs(h: Tensor, a: Tensor) -> Tensor:
    """Return tr(H_BB⁻¹ A_BB) of every unit, (k,), from (k, b, b) each; −∞ if H_BB is not positive definite."""
    if h.shape[1] == 1:
        costs, is_definite = a[:, 0, 0] / h[:, 0, 0], h[:, 0, 0] > 0
    else:
        factor, failed = torch.linalg.cholesky_ex(h)
        costs, is_definite = torch.cholesky_solve(a, factor).diagonal(dim1=1, dim2=2).sum(1), failed == 0
    return torch.where(is_definite, costs, -float("inf"))


def _add_product(matrix: Tensor, left: Tensor, right: Tensor, sign: int) -> None:
    """Add ± leftᵀ right, both (m, k), to the lower triangle of `matrix` (k, k). Some of the upper changes, too."""
    for part in _parts(len(matrix)):
        matrix[part, : part.stop].addmm_(left[:, part].T, right[:, : part.stop], alpha=sign)


def _blocks(matrix: Tensor, b: int) -> Tensor:
    """Copy the (b, b) blocks on a matrix's diagonal, (n, b, b). Only the lower triangle of the matrix counts."""
    n = len(matrix) // b
    lower = matrix.view(n, b, n, b).diagonal(dim1=0, dim2=2).permute(2, 0, 1).tril()
    return lower + lower.tril(-1).mT


def _parts(size: int) -> Iterator[slice]:
    for start in range(0, size, ROWS):
        yield slice(start, min(start + ROWS, size))
