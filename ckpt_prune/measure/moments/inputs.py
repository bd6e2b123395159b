"""Additive moments of the tokens that reach one consumer (measure/README.md, section 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.gram import add_gram
from ckpt_prune.measure.moments.precision import Extent, needs_double
from ckpt_prune.parallel.group import Group

ACTIVE_THRESHOLD = 1e-6
"""An input counts as active where its absolute value exceeds this (CORP's active probability)."""
CACHED = 3 * 2**18
"""Bytes of tokens of which sums are taken at once on a CPU: they stay in a processor's own cache."""
AT_ONCE = 2**28
"""The same on an accelerator."""


@dataclass(frozen=True)
class Drift:
    """Sums over N tokens of δ (d_out,), what the residual stream lacks of the dense model's after a site.

    See compensation/README.md, section 4.

    δ = (dense residual stream after the site) − (residual stream after the site when everything before it is pruned
    and the site itself is whole). So W x + δ is the drift-correcting target of a consumer with weight W and input x.

    Attributes:
        cross: Σ δ xᵀ, (d_out, d) float32, or float64 where that is too coarse.
        sum: Σ δ, (d_out,) float64.
        energy: Σ ‖δ‖².
    """

    cross: Tensor
    sum: Tensor
    energy: float

    @classmethod
    def zeros(cls, outputs: int, width: int, device: torch.device | str = "cpu") -> Self:
        """The drift of no token."""
        cross = torch.zeros(outputs, width, dtype=torch.float32, device=device)
        return cls(cross, torch.zeros(outputs, dtype=torch.float64, device=device), 0.0)

    def accumulate(self, drift: Tensor, tokens: Tensor) -> Self:
        """These sums and those of `drift` (..., d_out) at `tokens` (..., d).

        The cross moment is updated in place, or goes on in float64 from here (`precision.needs_double`).
        """
        delta, x = drift.detach().reshape(-1, drift.shape[-1]), tokens.detach().reshape(-1, tokens.shape[-1])
        wide = delta.double()
        square = wide.square()
        ours, theirs = Extent.of(delta, len(x), wide.sum(0), square.sum(0)), Extent.of(x, len(x), *sums_of(x)[:2])
        cross = self.cross.double() if needs_double(ours, theirs) else self.cross
        cross.addmm_(delta.to(cross.dtype).T, x.to(cross.dtype))
        return type(self)(cross, self.sum + wide.sum(0), self.energy + float(square.sum()))

    def __add__(self, other: "Drift") -> "Drift":
        """Sums over the tokens of both."""
        return Drift(self.cross + other.cross, self.sum + other.sum, self.energy + other.energy)

    def to(self, device: torch.device | str) -> "Drift":
        """The same sums on another device."""
        return Drift(self.cross.to(device), self.sum.to(device), self.energy)

    def pooled(self, group: Group) -> "Drift":
        """Sums over the tokens of all processes, at the first one."""
        energy = group.add(torch.tensor(self.energy, dtype=torch.float64))
        return Drift(add_widest(group, self.cross), group.add(self.sum), float(energy))


@dataclass(frozen=True)
class Taylor:
    """LLM-Pruner's importances of the units of a site (scoring/README.md, section 6).

    They are of all samples together: sums of absolute values of sums, which do not add.

    Attributes:
        first: Σ |g w| over the weights of a unit, (units,) float64.
        second: Σ |g w − ½ Σ_s (g_s w)²|, the same.
    """

    first: Tensor
    second: Tensor

    def to(self, device: torch.device | str) -> "Taylor":
        """The same on another device."""
        return Taylor(self.first.to(device), self.second.to(device))


def add_widest(group: Group, tensor: Tensor) -> Tensor:
    """`Group.add` of tensors of one shape, in the widest floating type that any process has."""
    wide = group.total(float(tensor.dtype == torch.float64)) > 0
    return group.add(tensor.double() if wide else tensor)


def count_rows_at_once(width: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Tokens of which sums are taken together."""
    each = 4 * width * sums_in(dtype).itemsize
    return max(4, min(CACHED // each, 512) if device == "cpu" else AT_ONCE // each)


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """In which type tokens of a type are added up, some hundred at once."""
    return torch.float32 if dtype == torch.bfloat16 else torch.float64


def sums_of(x: Tensor, active_above: float = ACTIVE_THRESHOLD, dtype: torch.dtype | None = None) -> Tensor:
    """Σx, Σx², Σ|x| and how many |x| are above a threshold, of x (N, d): (4, d) float64.

    Squares of bfloat16 numbers are numbers of float32, in which up to 512 rows of them are added up on a CPU; all else
    is in float64. `dtype` says in which type instead.
    """
    width, rows = x.shape[1], count_rows_at_once(x.shape[1], x.dtype, x.device.type)
    dtype = dtype or sums_in(x.dtype)
    found = torch.zeros(4, width, dtype=torch.float64, device=x.device)
    # All four side by side are one sum over rows, several times faster than one after the other.
    beside = torch.empty(min(rows, len(x)), 4, width, dtype=dtype, device=x.device)
    for part in torch.split(x, rows):
        own = beside[: len(part)]
        plain, square, absolute, active = own.unbind(1)
        plain.copy_(part)
        torch.mul(plain, plain, out=square)
        torch.abs(plain, out=absolute)
        torch.gt(absolute, active_above, out=active)
        found += own.sum(0)
    return found


@dataclass(frozen=True)
class Moments:
    """Sums over N tokens x of width d: everything scores and closed forms need, and nothing of the tokens themselves.

    Attributes:
        count: N, tokens seen.
        sum: Σ x, (d,) float64.
        square: Σ x², (d,) float64.
        absolute: Σ |x|, (d,) float64.
        active: number of tokens with |x| above a threshold, `ACTIVE_THRESHOLD` unless said, (d,) float64.
        gram: Σ x xᵀ, (d, d) float32, or float64 where that is too coarse (`precision.needs_double`). None where only
            the vectors were collected.
        drift: of the same tokens, where the target corrects it; else None.
        taylor: of the site, the same whichever tokens these are; None where it was not collected.
        routed: of an expert, how many tokens its router sent to it; fewer than `count` where these were too few to
            measure on, so that all tokens of the layer were shown to it. None where there is no router.
    """

    count: int
    sum: Tensor
    square: Tensor
    absolute: Tensor
    active: Tensor
    gram: Tensor | None = None
    drift: Drift | None = None
    taylor: Taylor | None = None
    routed: int | None = None

    @classmethod
    def zeros(cls, width: int, *, gram: bool, device: torch.device | str = "cpu") -> Self:
        """The moments of no token."""
        a, b, c, d = (torch.zeros(width, dtype=torch.float64, device=device) for _ in range(4))
        full = torch.zeros(width, width, dtype=torch.float32, device=device) if gram else None
        return cls(0, a, b, c, d, full)

    def accumulate(self, tokens: Tensor, active_above: float = ACTIVE_THRESHOLD) -> Self:
        """These moments and those of `tokens` (..., d), active above a threshold.

        The Gram is updated in place, or goes on in float64 from here (`precision.needs_double`).
        """
        x = tokens.detach().reshape(-1, tokens.shape[-1])
        count, sums, gram = self.count + x.shape[0], sums_of(x, active_above), self.gram
        extent = Extent.of(x, count, self.sum + sums[0], self.square + sums[1])
        if needs_double(extent, extent):
            sums = sums_of(x, active_above, torch.float64) if sums_in(x.dtype) != torch.float64 else sums
            gram = None if gram is None else gram.double()
        if gram is not None:
            add_gram(gram, x)
        return type(self)(
            count,
            self.sum + sums[0],
            self.square + sums[1],
            self.absolute + sums[2],
            self.active + sums[3],
            gram,
        )

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of the tokens of both; Gram and drift are there only where both have them."""
        gram = self.gram + other.gram if self.gram is not None and other.gram is not None else None
        drift = self.drift + other.drift if self.drift is not None and other.drift is not None else None
        return Moments(
            self.count + other.count,
            self.sum + other.sum,
            self.square + other.square,
            self.absolute + other.absolute,
            self.active + other.active,
            gram,
            drift,
            self.taylor if other.taylor is not None else None,
            None if self.routed is None or other.routed is None else self.routed + other.routed,
        )

    @property
    def few(self) -> int | None:
        """Tokens that the router sent to an expert, where they were too few to measure on; else None."""
        return self.routed if self.routed is not None and self.routed < self.count else None

    @property
    def finite(self) -> bool:
        """Whether no token was NaN or Inf."""
        return all_finite(self.square)

    def to(self, device: torch.device | str) -> "Moments":
        """The same moments on another device."""
        return Moments(
            self.count,
            self.sum.to(device),
            self.square.to(device),
            self.absolute.to(device),
            self.active.to(device),
            None if self.gram is None else self.gram.to(device),
            None if self.drift is None else self.drift.to(device),
            None if self.taylor is None else self.taylor.to(device),
            self.routed,
        )

    def pooled(self, group: Group) -> "Moments":
        """Moments of the tokens of all processes, at the first one."""
        counts = group.add(torch.tensor([self.count, self.routed or 0]))
        sums, squares, absolute, active = group.add(
            torch.stack([self.sum, self.square, self.absolute, self.active])
        ).unbind()
        return Moments(
            int(counts[0]),
            sums,
            squares,
            absolute,
            active,
            None if self.gram is None else add_widest(group, self.gram),
            None if self.drift is None else self.drift.pooled(group),
            self.taylor,
            None if self.routed is None else int(counts[1]),
        )

    def at(self, inputs: Tensor) -> "Moments":
        """The moments of some of the inputs alone, int64, ascending."""
        drift, gram = self.drift, self.gram
        return Moments(
            self.count,
            self.sum[inputs],
            self.square[inputs],
            self.absolute[inputs],
            self.active[inputs],
            None if gram is None else gram[inputs][:, inputs],
            None if drift is None else Drift(drift.cross[:, inputs], drift.sum, drift.energy),
            self.taylor,
            self.routed,
        )

    def under(self, change: Callable[[Tensor], Tensor]) -> "Moments":
        """The moments of the inputs in another basis.

        Sums of absolute values and numbers of active inputs are not told by these: they are not a number.

        Args:
            change: of inputs (..., d) into the other basis, linear.
        """
        drift, gram = self.drift, self.gram
        if gram is None:
            raise ValueError("inputs in another basis need second moments: collect statistics with a Gram")
        turned = change(change(gram.double()).T)
        unknown = torch.full_like(self.sum, torch.nan)
        return Moments(
            self.count,
            change(self.sum),
            turned.diagonal().clone(),
            unknown,
            unknown,
            turned,
            None if drift is None else Drift(change(drift.cross.double()), drift.sum, drift.energy),
        )

    @property
    def width(self) -> int:
        """The number of inputs, d."""
        return self.sum.shape[0]

    @property
    def mean(self) -> Tensor:
        """μ = Σx / N, (d,) float64."""
        return self.sum / self.count

    @property
    def energy(self) -> Tensor:
        """E[x²], (d,) float64."""
        return self.square / self.count

    @property
    def variance(self) -> Tensor:
        """Population variance, (d,) float64, never negative."""
        return (self.energy - self.mean.square()).clamp_min(0)


class _Additive(Protocol):
    def __add__(self, other: Any, /) -> Any: ...
    def to(self, device: Any, /) -> Any: ...


Sums = TypeVar("Sums", bound=_Additive)
"""Any kind of moments."""


def sum_folds(folds: Sequence[Sums]) -> Sums:
    """Moments of all folds together. A single fold is returned as it is, without a copy."""
    combined: Sums = reduce(add, folds)
    return combined
