"""Factor of the inverse Gram, for inputs that are visited from left to right (see `sparsegpt`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.sparsity.damping import damped_cholesky, live_mean


def factorise(hessian: Tensor, dead: Tensor, damp: float, most_damp: float) -> tuple[Tensor, float]:
    """Return the lower Cholesky factor of H + damping, inputs in reverse order, float64, and the damping."""
    # In units of the mean diagonal, so that neither the scale of H nor the 1 of a dead input matters.
    matrix = hessian.flip(0, 1).double().div_(live_mean(hessian))
    dead = dead.flip(0)
    # A dead input's products are zero but for rounding; its column must not touch a live one.
    matrix[dead] = 0
    matrix[:, dead] = 0
    matrix.diagonal()[dead] = 1
    return damped_cholesky(matrix, damp, most_damp)


@dataclass(frozen=True)
class OrderedFactor:
    """The factor of a Gram whose inputs are taken in another order.

    Attributes:
        order: inputs in the order in which they are visited, (d_in,) int64.
        factor: of the Gram with its inputs in that order, as `factorise` gives it, (d_in, d_in) float64.
    """

    order: Tensor
    factor: Tensor

    @property
    def energies(self) -> Tensor:
        """Diagonal of the damped Gram in units of its mean, inputs in their own order, (d_in,) float64."""
        return torch.empty_like(self.factor[0]).index_copy_(0, self.order, self.factor.square().sum(1).flip(0))


def factorise_largest_first(gram: Tensor, damp: float, most_damp: float) -> OrderedFactor:
    """Factorise a Gram (d_in, d_in) with its inputs in the order of their energy, largest first.

    Inputs that are visited first are rounded before they carry the errors of others, and have the most inputs left to
    make up for theirs (`actorder` of GPTQ's released code).
    """
    order = gram.diagonal().argsort(descending=True, stable=True)
    ordered = gram[order][:, order]
    return OrderedFactor(order, factorise(ordered, ordered.diagonal() == 0, damp, most_damp)[0])


def part(factor: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return R[rows, columns] of H = R Rᵀ, from the factor of H with its inputs in reverse order."""
    n = len(factor)
    return factor[n - rows.stop : n - rows.start, n - columns.stop : n - columns.start].flip(0, 1)
