"""Orthogonal matrices that follow a gradient: two ways to descend without leaving them.

- "qr" (DenoiseRotator appendix C): A is unconstrained, and Adam works on it. The rotation is Q of A = Q R with the
  signs that make R's diagonal positive; without them Q is not continuous in A.
- "cayley": Riemannian Adam in the moving frame. At Q the gradient is Q Ω with Ω = Qᵀ G − Gᵀ Q skew, one number for
  each pair of axes. Adam's moments are kept of Ω. The skew step X that they give is taken by the Cayley transform
  Q ← Q (I − X/2)⁻¹ (I + X/2) = 2 Q (I − X/2)⁻¹ − Q. It is orthogonal whatever the size of X (Wen and Yin 2013), and
  costs one LU solve. A Newton-Schulz step every `REFRESH` steps keeps rounding from adding up. Its step does not shrink
  by itself as that of "qr" does, where A grows; so it is decayed (`Retraction.decays`).

Both start anywhere, take leading batch dimensions, and are given the plain gradient dL/dQ: they do not see the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ckpt_prune.recipe.names import RetractionName

MOMENTUM, SQUARES, EPSILON = 0.9, 0.999, 1e-8
"""Adam's usual constants, for both methods."""
REFRESH = 10
"""Steps between re-orthonormalisations: float32 drifts by about 1e-7 a step and axis."""


class Rotator(Protocol):
    """Orthogonal matrices (..., n, n) that follow gradients."""

    def rotation(self) -> Tensor:
        """Return the current matrices, (..., n, n), without a gradient; not to be written to."""

    def slope(self, gradient: Tensor) -> Tensor:
        """Turn dL/dQ (..., n, n) into the gradient of the rotator's own parameters.

        dL/dQ is of all entries as if they were free.
        """

    def step(self, slope: Tensor, rate: float) -> None:
        """Go one step down `slope`, clipped or not, at a learning rate."""


class QRRotator:
    """Adam on A, the rotation being Q of its QR decomposition. It starts from an orthogonal (..., n, n)."""

    def __init__(self, start: Tensor) -> None:
        self._a = start.detach().clone().requires_grad_()
        self._adam = torch.optim.Adam([self._a], betas=(MOMENTUM, SQUARES), eps=EPSILON)
        self._q: Tensor | None = None

    def rotation(self) -> Tensor:
        if self._q is None:
            with torch.enable_grad():
                q, r = torch.linalg.qr(self._a)
                signs = torch.where(r.detach().diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
                self._q = q * signs.unsqueeze(-2)
        found: Tensor = self._q.detach()
        return found

    def slope(self, gradient: Tensor) -> Tensor:
        """Return the gradient of A."""
        self.rotation()
        assert self._q is not None
        (slope,) = torch.autograd.grad(self._q, self._a, gradient)
        return slope

    def step(self, slope: Tensor, rate: float) -> None:
        self._a.grad = slope
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._q = None


class CayleyRotator:
    """Riemannian Adam in the moving frame, with the Cayley transform for a retraction.

    It starts from an orthogonal (..., n, n).
    """

    def __init__(self, start: Tensor) -> None:
        self._q = start.detach().clone()
        self._mean, self._squares = torch.zeros_like(start), torch.zeros_like(start)
        self._steps = 0

    def rotation(self) -> Tensor:
        return self._q

    @torch.no_grad()
    def slope(self, gradient: Tensor) -> Tensor:
        """Return Ω."""
        turned: Tensor = self._q.mT @ gradient
        return turned - turned.mT

    @torch.no_grad()
    def step(self, slope: Tensor, rate: float) -> None:
        self._steps += 1
        # Ω is skew and Ω² symmetric, so the step made of their averages is skew again.
        self._mean.lerp_(slope, 1 - MOMENTUM)
        self._squares.lerp_(slope.square(), 1 - SQUARES)
        root = (self._squares / (1 - SQUARES**self._steps)).sqrt_().add_(EPSILON)
        x = self._mean.div(root).mul_(-rate / (1 - MOMENTUM**self._steps))
        # (I − X/2)ᵀ = I + X/2: the solve from the right is one from the left of the transpose.
        half = x.mul_(0.5)
        half.diagonal(dim1=-2, dim2=-1).add_(1)
        turned: Tensor = torch.linalg.solve(half, self._q.mT).mT
        self._q = turned.mul(2).sub_(self._q)
        if self._steps % REFRESH == 0:
            self._q = _newton_schulz(self._q)


def clip_slopes(slopes: Sequence[Tensor], clip: float | None) -> list[Tensor]:
    """Shorten slopes of several rotators so that together they are no longer than `clip`, unless it is None.

    DenoiseRotator's released code does.
    """
    if clip is None:
        return list(slopes)
    length = torch.stack([torch.linalg.vector_norm(slope).double() for slope in slopes]).norm()
    share = float((clip / length.clamp_min(torch.finfo(torch.float32).tiny)).clamp_max(1.0))
    return [slope * share for slope in slopes]


def _newton_schulz(q: Tensor) -> Tensor:
    """Go one step towards the nearest orthogonal matrix: it squares the distance of q (..., n, n), if below one."""
    nearer: Tensor = 1.5 * q - 0.5 * q @ (q.mT @ q)
    return nearer


@dataclass(frozen=True)
class Retraction:
    """A way to follow gradients among orthogonal matrices.

    Attributes:
        build: starts from (..., n, n).
        learning_rate: used if a recipe says none.
        decays: whether the rate goes down to zero over the steps, as half a cosine; else it is constant.
    """

    build: Callable[[Tensor], Rotator]
    learning_rate: float
    decays: bool


RETRACTIONS: dict[RetractionName, Retraction] = {
    "cayley": Retraction(CayleyRotator, 0.05, decays=True),
    "qr": Retraction(QRRotator, 0.01, decays=False),
}
"""By name. "qr" is the paper's, with its rate; tools/notes/masks.md has how the two compare."""


class Preserving:
    """Rotations with R u = u: those of the complement of u, by another rotator.

    A Householder reflection P brings u to an axis; R = P diag(1, R̃) P with R̃ (n − 1, n − 1) orthogonal. LayerNorm
    models need it with u = 1/√n: their mean subtraction commutes with such rotations only. The start (n, n) preserves u
    (n,), which is not zero.
    """

    def __init__(self, start: Tensor, preserve: Tensor, build: Callable[[Tensor], Rotator]) -> None:
        self._normal = _householder(preserve.to(start))
        self._inner = build(_reflect(start, self._normal)[1:, 1:].contiguous())

    def rotation(self) -> Tensor:
        return _reflect(_with_axis(self._inner.rotation()), self._normal)

    def slope(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the complement's rotator."""
        return self._inner.slope(_reflect(gradient, self._normal)[1:, 1:].contiguous())

    def step(self, slope: Tensor, rate: float) -> None:
        self._inner.step(slope, rate)


def _householder(u: Tensor) -> Tensor:
    """Return the unit normal (n,) of the mirror that brings u (n,) to the first axis, up to sign."""
    length = torch.linalg.vector_norm(u)
    if not bool(length > 0):
        raise ValueError("the direction to preserve is zero")
    normal: Tensor = u / length
    # Away from the axis rather than towards it: no cancellation.
    normal[0] += 1.0 if bool(normal[0] >= 0) else -1.0
    unit: Tensor = normal / torch.linalg.vector_norm(normal)
    return unit


def complement_of_ones(n: int) -> Tensor:
    """Return orthonormal columns, (n, n − 1) float64, that span all vectors of mean zero."""
    normal = _householder(torch.ones(n, dtype=torch.float64))
    mirror = torch.eye(n, dtype=torch.float64) - 2 * torch.outer(normal, normal)
    return mirror[:, 1:].contiguous()


def _reflect(matrix: Tensor, normal: Tensor) -> Tensor:
    """Return P M P with P = I − 2 n nᵀ, in products of order n²."""
    matrix = matrix - 2 * torch.outer(normal, normal @ matrix)
    return matrix - 2 * torch.outer(matrix @ normal, normal)


def _with_axis(inner: Tensor) -> Tensor:
    extended = inner.new_zeros(len(inner) + 1, len(inner) + 1)
    extended[0, 0] = 1
    extended[1:, 1:] = inner
    return extended


def make_rotator(method: RetractionName, start: Tensor, *, preserve: Tensor | None = None) -> Rotator:
    """Make a rotator of `RETRACTIONS` at an orthogonal start (..., n, n); its device and dtype are the rotator's.

    If `preserve` is given, a direction u (n,) stays where it is; `start` is then (n, n) and preserves it.
    """
    build = RETRACTIONS[method].build
    return build(start) if preserve is None else Preserving(start, preserve, build)


def identity(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """Return identities (..., n, n) on CPU, each written out."""
    return torch.eye(shape[-1], dtype=dtype).expand(shape).clone()


def near_identity(
    shape: tuple[int, ...], size: float, generator: torch.Generator, *, preserve: Tensor | None = None
) -> Tensor:
    """Return random rotations (..., n, n), float64 on CPU, that turn every pair of axes by about `size` radians.

    Args:
        shape: (..., n, n).
        size: of the angles, much less than one.
        preserve: a direction (n,) to leave where it is.
    """
    n = shape[-1] if preserve is None else shape[-1] - 1
    x = torch.randn(*shape[:-2], n, n, generator=generator, dtype=torch.float64) * (size / 2**0.5)
    eye = torch.eye(n, dtype=torch.float64)
    half = (x - x.mT) / 2
    turned: Tensor = torch.linalg.solve(eye - half, eye + half)
    return turned if preserve is None else _reflect(_with_axis(turned), _householder(preserve.cpu().double()))


def orthonormalise(rotation: Tensor, preserve: Tensor | None = None) -> Tensor:
    """Return the orthogonal matrix nearest to a nearly orthogonal one, (..., n, n) float64 on CPU.

    Args:
        rotation: (..., n, n), any floating dtype, ‖QᵀQ − I‖ well below one.
        preserve: a direction u (n,) that `rotation` (n, n) nearly preserves and the result does.
    """
    q = rotation.detach().to("cpu", torch.float64)
    if preserve is None:
        for _ in range(4):
            q = _newton_schulz(q)
        return q
    normal = _householder(preserve.detach().to("cpu", torch.float64))
    return _reflect(_with_axis(orthonormalise(_reflect(q, normal)[1:, 1:])), normal)
