"""What dropping the first units of any order costs once all that stay are refitted: one factorisation for every width.

With G = Σ x xᵀ, the Gram of a projection's inputs, dropping the columns D of its weight W costs

    J(D) = tr(W_D S_D W_Dᵀ),    S_D = A_DD − A_DK A_KK⁻¹ A_KD,    A = G + λI,

which is the objective of ridge towards W_K at its optimum (`scoring.obs`). S_D is the Schur complement of what stays.
Let columns be sorted so that those that go first come last, and A = L Lᵀ. Then the complement of the last k columns is
L_D L_Dᵀ, L_D being the last k rows and columns of L, for every k at once. So J of the last k columns is the sum of
‖(W L)_:j‖² over them (this project). Where errors e of the output count as eᵀ F e, it is that of (W L)_:j instead;
what stays is refitted all the same, for a metric on the outputs does not change the refit. The refit itself is
W_K + W_D L_DK L_KK⁻¹, from the same factor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.sparsity.damping import DAMP, damped_cholesky


@dataclass(frozen=True)
class DropOrder:
    """A projection whose inputs go in some order, unit by unit.

    Attributes:
        columns: of the weight, those that stay longest first, (d,) int64.
        per_unit: adjacent columns that make a unit.
        weight: W in that order, (d_out, d) float64.
        factor: L, lower, of the damped Gram in units of `scale`, (d, d) float64.
        scale: mean of the Gram's diagonal.
        basis: where the inputs are these products of others, (d, d) float64: what is lost is told of those; else None.
    """

    columns: Tensor
    per_unit: int
    weight: Tensor
    factor: Tensor
    scale: float
    basis: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, gram: Tensor, order: Tensor, per_unit: int = 1, *, damp: float = DAMP) -> "DropOrder":
        """Factorise.

        The work is d³ / 3 flops, memory two (d, d) float64 matrices beside the arguments.

        Args:
            weight: W, (d_out, d), any floating dtype.
            gram: G, (d, d), any floating dtype, symmetric, on the same device.
            order: units in the order in which they go, (n,) int64.
            per_unit: adjacent columns that make a unit, d / n.
            damp: λ as a share of mean(diag(G)); raised as in `sparsity.damping` where that is not enough.

        Raises:
            SingularHessianError: no damping is enough, since G is not positive semi-definite.
        """
        columns = (order.flip(0)[:, None] * per_unit + torch.arange(per_unit, device=order.device)).flatten()
        scale = float(gram.diagonal().double().mean())
        scale = scale if scale > 0 else 1.0
        factor, _ = damped_cholesky(gram[columns][:, columns].double().div_(scale), damp)
        return cls(columns, per_unit, weight[:, columns].double(), factor, scale)

    def costs(self, metric: Tensor | None = None) -> Tensor:
        """J with the first k units dropped, k = 0 … n.

        The work is d_out d² flops, and d_out² d with a metric.

        Args:
            metric: F, (d_out, d_out), symmetric and positive semi-definite; None for the identity.

        Returns:
            (n + 1,) float64, never decreasing, on the scale of Gram sums. They include λ (‖Ŵ_K − W_K‖² + ‖W_D‖²), in
            the metric.
        """
        turned = self.weight @ self.factor
        seen = turned if metric is None else metric.double() @ turned
        # A metric that rounding has left a little indefinite must not make a cost negative.
        added = (seen * turned).sum(0).clamp_min_(0)
        added = added.mul_(self.scale).view(-1, self.per_unit).sum(1).flip(0)
        return torch.cat([added.new_zeros(1), added.cumsum(0)])

    def lost(self, count: int) -> Tensor:
        """W − Ŵ with the first `count` units dropped and the others refitted: what an output loses is this times x.

        Args:
            count: from 0 to n.

        Returns:
            (d_out, d) float64, columns as in W.
        """
        kept = len(self.columns) - count * self.per_unit
        gone = self.weight[:, kept:]
        moved = torch.linalg.solve_triangular(
            self.factor[:kept, :kept], gone @ self.factor[kept:, :kept], upper=False, left=False
        )
        found = torch.empty_like(self.weight)
        found[:, self.columns] = torch.cat([-moved, gone], 1)
        return found if self.basis is None else found @ self.basis
