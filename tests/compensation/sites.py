"""Small pruned projections with everything known about them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.compensation.fit import Fit, fit_from_moments
from ckpt_prune.measure.moments.inputs import Moments


@dataclass(frozen=True)
class Site:
    weight: Tensor
    tokens: Tensor
    kept: Tensor

    @property
    def weight_kept(self) -> Tensor:
        return self.weight[:, self.kept]

    @property
    def inputs(self) -> Tensor:
        return self.tokens[:, self.kept]

    @property
    def targets(self) -> Tensor:
        return self.tokens @ self.weight.T

    @property
    def dropped(self) -> Tensor:
        return torch.tensor([j for j in range(self.weight.shape[1]) if j not in self.kept.tolist()], dtype=torch.int64)

    @property
    def moments(self) -> Moments:
        """In float64, Gram included, so that closed forms can be held to more digits than a float32 Gram has."""
        x = self.tokens
        square, active = x.square().sum(0), (x.abs() > 1e-6).sum(0).double()
        return Moments(x.shape[0], x.sum(0), square, x.abs().sum(0), active, x.T @ x)

    @property
    def fit(self) -> Fit:
        return fit_from_moments(self.weight, self.moments, self.kept)


def fit_of(inputs: Tensor, targets: Tensor) -> Fit:
    """A fit straight from activations."""
    return Fit(
        inputs.shape[0],
        inputs.sum(0),
        targets.sum(0),
        inputs.T @ inputs,
        targets.T @ inputs,
        float(targets.square().sum()),
    )


def make_site(d_out: int, d_in: int, k: int, tokens: int, seed: int = 0) -> Site:
    """Correlated inputs with a mean."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x = normal(tokens, d_in) @ (torch.eye(d_in) + 0.4 * normal(d_in, d_in)) + normal(d_in)
    return Site(normal(d_out, d_in), x, torch.randperm(d_in, generator=g)[:k].sort().values)


TALL = (12, 10, 7, 200)
"""k < d_out: attention output after heads are removed."""
WIDE = (6, 16, 11, 200)
"""k > d_out: an MLP's second projection."""
SQUARE = (8, 12, 8, 200)
SHAPES = {"k<d_out": TALL, "k>d_out": WIDE, "k=d_out": SQUARE}
