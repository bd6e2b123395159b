"""Cost of dropping the first units of any order, all others refitted: one factorisation for every width.

Let the columns be sorted so that those dropped first come last, and G + λI = L Lᵀ. Dropping the last k columns costs
J = Σ ‖(W L)_:j‖² over them (this project; scoring/README.md, section 5). If errors e of the output count as eᵀ F e, the
norm is that of F; the refit, W_K + W_D L_DK L_KK⁻¹, does not depend on F.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.sparsity.damping import DAMP, damped_cholesky


@dataclass(frozen=True)
class DropOrder:
    """A projection whose inputs are dropped in some order, unit by unit.

    Attributes:
        columns: of the weight, those that stay longest first, (d,) int64.
        per_unit: adjacent columns that make a unit.
        weight: W in that order, (d_out, d) float64.
        factor: L, lower, of the damped Gram in units of `scale`, (d, d) float64.
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

        The work is d³ / 3 flops, memory two (d, d) float64 matrices beside the arguments.

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
        factor, _ = damped_cholesky(gram[columns][:, columns].double().div_(scale), damp)
        return cls(columns, per_unit, weight[:, columns].double(), factor, scale)

    def costs(self, metric: Tensor | None = None) -> Tensor:
        """Return J with the first k units dropped, k = 0 … n, (n + 1,) float64, on the scale of Gram sums.

        It never decreases, and includes λ (‖Ŵ_K − W_K‖² + ‖W_D‖²), in the metric.

        The work is d_out d² flops, and d_out² d with a metric.

        Args:
            metric: F, (d_out, d_out), symmetric and positive semi-definite; None for the identity.
        """
        turned = self.weight @ self.factor
        seen = turned if metric is None else metric.double() @ turned
        # A metric that rounding has left a little indefinite must not make a cost negative.
        added = (seen * turned).sum(0).clamp_min_(0)
        added = added.mul_(self.scale).view(-1, self.per_unit).sum(1).flip(0)
        return torch.cat([added.new_zeros(1), added.cumsum(0)])

    def lost(self, count: int) -> Tensor:
        """Return W − Ŵ with the first `count` units dropped and the others refitted, (d_out, d) float64.

        Its columns are those of W, and the output loses it times x.
        """
        kept = len(self.columns) - count * self.per_unit
        dropped = self.weight[:, kept:]
        moved = torch.linalg.solve_triangular(
            self.factor[:kept, :kept], dropped @ self.factor[kept:, :kept], upper=False, left=False
        )
        difference = torch.empty_like(self.weight)
        difference[:, self.columns] = torch.cat([-moved, dropped], 1)
        return difference if self.basis is None else difference @ self.basis
