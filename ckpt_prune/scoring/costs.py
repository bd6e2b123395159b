"""Cost of dropping the first units of any order, all others refitted: one factorisation for every width.

Let the columns be sorted so that those dropped first come last, and G + λI = L Lᵀ. Dropping the last k columns costs
J = Σ ‖(W L)_:j‖² over them (this project; scoring/README.md, section 5). If errors e of the output count as eᵀ F e, the
norm is that of F; the refit, W_K + W_D L_DK L_KK⁻¹, does not depend on F.

With an input x = L u, the refit loses W_D (x_D − L_DK L_KK⁻¹ x_K) = W_D L_DD u_D of the output. This is the sum of
(W L)_:j u_j over the columns that go. So one solve gives it for every width, and no refit is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ckpt_prune.measure.moments.gram import cut_strips
from ckpt_prune.sparsity.damping import DAMP, damped_cholesky, single_cholesky

WIDE = 1024
"""Grams of more inputs are factorised in float32 if that has digits enough."""
SMALLEST_PIVOT = 1e-5
"""Relative to its entry of the diagonal. A factor in float32 is off by about √d · 6e-8 over its root: 0.1 % here."""


@dataclass(frozen=True)
class DropOrder:
    """A projection whose inputs are dropped in some order, unit by unit.

    Attributes:
        columns: of the weight, those that stay longest first, (d,) int64.
        per_unit: adjacent columns that make a unit.
        weight: W in that order, (d_out, d), in the factor's type.
        factor: L, lower, of the damped Gram in units of `scale`, (d, d) float64, or float32 if it is `WIDE`.
        scale: mean of the Gram's diagonal.
        basis: (d, d) float64 if the inputs are this matrix times others: `lost` is then in terms of those; else None.
    """

    columns: Tensor
    per_unit: int
    weight: Tensor
    factor: Tensor
    scale: float
    basis: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, gram: Tensor, order: Tensor, per_unit: int = 1, *, damp: float = DAMP) -> "DropOrder":
        """Factorise the Gram of a projection for an order.

        The work is d³ / 3 flops, memory two (d, d) matrices beside the arguments.

        Args:
            weight: W, (d_out, d), any floating dtype.
            gram: G, (d, d), any floating dtype, symmetric, on the same device.
            order: units in the order in which they are dropped, (n,) int64.
            per_unit: adjacent columns that make a unit, d / n.
            damp: λ as a share of mean(diag(G)); raised as in `sparsity.damping` if it is not enough.

        Raises:
            SingularHessianError: no damping is enough, since G is not positive semi-definite.
        """
        columns = (order.flip(0)[:, None] * per_unit + torch.arange(per_unit, device=order.device)).flatten()
        scale = float(gram.diagonal().double().mean())
        scale = scale if scale > 0 else 1.0
        sorted_gram = gram.index_select(0, columns).index_select(1, columns)
        factor = single_factor(sorted_gram, scale, damp) if len(columns) > WIDE else None
        if factor is None:
            factor, _ = damped_cholesky(sorted_gram.double().div_(scale), damp)
        return cls(columns, per_unit, weight[:, columns].to(factor.dtype), factor, scale)

    @property
    def is_wide(self) -> bool:
        """True if the inputs are many, and as they are: gradients are projected on the order, in place of refits."""
        return self.basis is None and len(self.columns) > WIDE

    @cached_property
    def turned(self) -> Tensor:
        """W L, (d_out, d)."""
        if len(self.columns) <= WIDE:
            return self.weight @ self.factor
        # Rows above the diagonal of L are zero: strips of it leave out nearly half of the products.
        turned = torch.empty_like(self.weight)
        for strip in cut_strips(len(self.columns)):
            turned[:, strip] = self.weight[:, strip.start :] @ self.factor[strip.start :, strip]
        return turned

    def costs(self, metric: Tensor | None = None) -> Tensor:
        """Return J with the first k units dropped, k = 0 … n, (n + 1,) float64, on the scale of Gram sums.

        It never decreases, and includes λ (‖Ŵ_K − W_K‖² + ‖W_D‖²), in the metric.

        The work is d_out d² flops, and d_out² d with a metric.

        Args:
            metric: F, (d_out, d_out), symmetric and positive semi-definite; None for the identity.
        """
        seen = self.turned if metric is None else metric.to(self.turned.dtype) @ self.turned
        # A metric that rounding has left a little indefinite must not make a cost negative.
        added = (seen * self.turned).sum(0, dtype=torch.float64).clamp_min_(0)
        added = added.mul_(self.scale).view(-1, self.per_unit).sum(1).flip(0)
        return torch.cat([added.new_zeros(1), added.cumsum(0)])

    def lost(self, count: int) -> Tensor:
        """Return W − Ŵ with the first `count` units dropped and the others refitted, (d_out, d), in the factor's type.

        Its columns are those of W, and the output loses it times x.
        """
        kept = len(self.columns) - count * self.per_unit
        dropped = self.weight[:, kept:]
        moved = torch.linalg.solve_triangular(
            self.factor[:kept, :kept], dropped @ self.factor[kept:, :kept], upper=False, left=False
        )
        difference = torch.empty_like(self.weight)
        difference[:, self.columns] = torch.cat([-moved, dropped], 1)
        return difference if self.basis is None else difference.to(self.basis.dtype) @ self.basis

    def project_on_gradient(self, inputs: Tensor, gradient: Tensor, counts: Sequence[int]) -> Tensor:
        """Return g·(W − Ŵ)x for every token and number of units dropped, the others refitted: (tokens, counts) float64.

        The work is d² + 2 d_out d flops a token, whatever the counts. There must be no `basis`.

        Args:
            inputs: x, (tokens, d).
            gradient: g at the output, (tokens, d_out).
            counts: ascending.
        """
        by_column = torch.linalg.solve_triangular(
            self.factor, inputs[:, self.columns].to(self.factor.dtype).T, upper=False
        ).T
        by_column = by_column * (gradient.to(self.factor.dtype) @ self.turned)
        moved, stop = [torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)], len(self.columns)
        for count in counts:
            start = len(self.columns) - count * self.per_unit
            moved.append(moved[-1] + by_column[:, start:stop].sum(1, dtype=torch.float64))
            stop = start
        return torch.stack(moved[1:], 1)


def single_factor(gram: Tensor, scale: float, damp: float) -> Tensor | None:
    """Return the factor of G / `scale` + `damp` I, (d, d), in float32; None if that has too few digits."""
    matrix = gram.float().div_(scale) if gram.dtype != torch.float32 else gram.div(scale)
    matrix.diagonal().add_(damp)
    return single_cholesky(matrix, SMALLEST_PIVOT)
