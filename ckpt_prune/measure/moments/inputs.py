"""Moments of the tokens that reach one linear module; they add (measure/README.md, section 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.gram import add_gram, multiply_narrowly
from ckpt_prune.measure.moments.precision import Extent, needs_double
from ckpt_prune.measure.moments.sums import Sums, add_widest
from ckpt_prune.parallel.group import Group

ACTIVE_THRESHOLD = 1e-6
"""An input counts as active if its absolute value exceeds this (CORP's active probability)."""
CACHED = 3 * 2**18
"""Bytes of tokens that are summed at once on a CPU: they stay in a processor's own cache."""
AT_ONCE = 2**28
"""Bytes of tokens that are summed at once on an accelerator."""
VECTORS = ("sum", "square", "absolute", "active")
"""Sums of `Moments` that have an entry for each input."""


@dataclass(frozen=True)
class Drift(Sums):
    """Sums over N tokens of δ (d_out,), what the residual stream lacks of the dense model's after a site.

    δ = (dense residual stream after the site) − (residual stream after the site when everything before it is pruned
    and the site itself is whole). So W x + δ is the drift-correcting target of a consumer with weight W and input x
    (compensation/README.md, section 4).

    Attributes:
        cross: Σ δ xᵀ, (d_out, d) float32, or float64 if that is too coarse.
        sum: Σ δ, (d_out,) float64.
        energy: Σ ‖δ‖².
    """

    cross: Tensor
    sum: Tensor
    energy: float

    @classmethod
    def zeros(cls, outputs: int, width: int, device: torch.device | str = "cpu") -> Self:
        cross = torch.zeros(outputs, width, dtype=torch.float32, device=device)
        return cls(cross, torch.zeros(outputs, dtype=torch.float64, device=device), 0.0)

    def accumulate(self, drift: Tensor, tokens: Tensor) -> Self:
        """Add the sums of `drift` (..., d_out) at `tokens` (..., d).

        The cross moment is updated in place, or goes on in float64 from here (`precision.needs_double`).
        """
        delta, x = drift.detach().reshape(-1, drift.shape[-1]), tokens.detach().reshape(-1, tokens.shape[-1])
        wide = delta.double()
        square = wide.square()
        of_delta = Extent.measure(delta, len(x), wide.sum(0), square.sum(0))
        of_tokens = Extent.measure(x, len(x), *sum_tokens(x)[:2])
        cross = self.cross.double() if needs_double(of_delta, of_tokens) else self.cross
        # δ is a difference of streams in the type of x, which have rounded it more than that.
        with multiply_narrowly(x):
            cross.addmm_(delta.to(cross.dtype).T, x.to(cross.dtype))
        return type(self)(cross, self.sum + wide.sum(0), self.energy + float(square.sum()))


@dataclass(frozen=True)
class Taylor:
    """LLM-Pruner's importances of the units of a site (scoring/README.md, section 6).

    They are of all samples together: sums of absolute values of sums, which do not add.

    Attributes:
        first: Σ |g w| over the weights of a unit, (units,) float64.
        second: Σ |g w − ½ Σ_s (g_s w)²|, (units,) float64.
    """

    first: Tensor
    second: Tensor

    def to(self, device: torch.device | str) -> "Taylor":
        """Move the importances to another device."""
        return Taylor(self.first.to(device), self.second.to(device))


def count_rows_at_once(width: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Count the tokens that are summed together."""
    row = 4 * width * choose_sum_type(dtype).itemsize
    return max(4, min(CACHED // row, 512) if device == "cpu" else AT_ONCE // row)


def choose_sum_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which some hundred tokens of a type are added up."""
    return torch.float32 if dtype == torch.bfloat16 else torch.float64


def sum_tokens(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return Σx, Σx², Σ|x| and how many |x| are above `ACTIVE_THRESHOLD`, of x (N, d): (4, d) float64.

    Squares of bfloat16 numbers are numbers of float32, in which up to 512 rows of them are added up on a CPU; all else
    is in float64. `dtype` overrides the type of these partial sums.
    """
    width, rows = x.shape[1], count_rows_at_once(x.shape[1], x.dtype, x.device.type)
    dtype = dtype or choose_sum_type(x.dtype)
    sums = torch.zeros(4, width, dtype=torch.float64, device=x.device)
    # All four side by side are one sum over rows, several times faster than one after the other.
    buffer = torch.empty(min(rows, len(x)), 4, width, dtype=dtype, device=x.device)
    for part in torch.split(x, rows):
        four = buffer[: len(part)]
        plain, square, absolute, active = four.unbind(1)
        plain.copy_(part)
        torch.mul(plain, plain, out=square)
        torch.abs(plain, out=absolute)
        torch.gt(absolute, ACTIVE_THRESHOLD, out=active)
        sums += four.sum(0)
    return sums


@dataclass(frozen=True)
class Moments:
    """Sums over N tokens x of width d: all that scores and closed forms need, and nothing of the tokens themselves.

    Attributes:
        count: N, tokens seen.
        sum: Σ x, (d,) float64.
        square: Σ x², (d,) float64.
        absolute: Σ |x|, (d,) float64.
        active: number of tokens with |x| above `ACTIVE_THRESHOLD`, (d,) float64.
        gram: Σ x xᵀ, (d, d) float32, or float64 if that is too coarse (`precision.needs_double`). None if only the
            vectors were collected.
        drift: of the same tokens, if the target corrects it; else None.
        taylor: importances of the site's units, whichever tokens these are; None if they were not collected.
        routed: tokens that the router sent to an expert; fewer than `count` if these were too few to measure on, so
            that all tokens of the layer were shown to it. None if there is no router.
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
        a, b, c, d = (torch.zeros(width, dtype=torch.float64, device=device) for _ in VECTORS)
        full = torch.zeros(width, width, dtype=torch.float32, device=device) if gram else None
        return cls(0, a, b, c, d, full)

    def accumulate(self, tokens: Tensor) -> Self:
        """Add the moments of `tokens` (..., d).

        The Gram is updated in place, or goes on in float64 from here (`precision.needs_double`).
        """
        x = tokens.detach().reshape(-1, tokens.shape[-1])
        count, sums, gram = self.count + x.shape[0], sum_tokens(x), self.gram
        extent = Extent.measure(x, count, self.sum + sums[0], self.square + sums[1])
        if needs_double(extent, extent):
            if choose_sum_type(x.dtype) != torch.float64:
                sums = sum_tokens(x, torch.float64)
            gram = None if gram is None else gram.double()
        if gram is not None:
            add_gram(gram, x)
        vectors: dict[str, Any] = {n: getattr(self, n) + more for n, more in zip(VECTORS, sums, strict=True)}
        return type(self)(count=count, gram=gram, **vectors)

    def __add__(self, other: "Moments") -> "Moments":
        """Add sums over other tokens. Gram, drift, Taylor and routed tokens are there only if both have them."""
        vectors: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in VECTORS}
        return Moments(
            count=self.count + other.count,
            gram=None if self.gram is None or other.gram is None else self.gram + other.gram,
            drift=None if self.drift is None or other.drift is None else self.drift + other.drift,
            taylor=None if other.taylor is None else self.taylor,
            routed=None if self.routed is None or other.routed is None else self.routed + other.routed,
            **vectors,
        )

    @property
    def few(self) -> int | None:
        """Tokens that the router sent to an expert, if they were too few to measure on; else None."""
        return self.routed if self.routed is not None and self.routed < self.count else None

    @property
    def is_finite(self) -> bool:
        """True if no token was NaN or Inf."""
        return all_finite(self.square)

    def _replace_vectors(self, change: Callable[[Tensor], Tensor], **changes: Any) -> "Moments":
        vectors: dict[str, Any] = {name: change(getattr(self, name)) for name in VECTORS}
        return replace(self, **vectors, **changes)

    def to(self, device: torch.device | str) -> "Moments":
        return self._replace_vectors(
            lambda vector: vector.to(device),
            gram=None if self.gram is None else self.gram.to(device),
            drift=None if self.drift is None else self.drift.to(device),
            taylor=None if self.taylor is None else self.taylor.to(device),
        )

    def pool(self, group: Group) -> "Moments":
        """Add the moments of all processes, at the first one."""
        counts = group.add(torch.tensor([self.count, self.routed or 0]))
        sums = group.add(torch.stack([getattr(self, name) for name in VECTORS]))
        vectors: dict[str, Any] = dict(zip(VECTORS, sums.unbind(), strict=True))
        return replace(
            self,
            count=int(counts[0]),
            gram=None if self.gram is None else add_widest(group, self.gram),
            drift=None if self.drift is None else self.drift.pool(group),
            routed=None if self.routed is None else int(counts[1]),
            **vectors,
        )

    def select_inputs(self, inputs: Tensor) -> "Moments":
        """Return the moments of some of the inputs alone, int64, ascending."""
        drift, gram = self.drift, self.gram
        return self._replace_vectors(
            lambda vector: vector[inputs],
            gram=None if gram is None else gram[inputs][:, inputs],
            drift=None if drift is None else replace(drift, cross=drift.cross[:, inputs]),
        )

    def change_basis(self, change: Callable[[Tensor], Tensor]) -> "Moments":
        """Return the moments of the inputs in another basis; `change` maps inputs (..., d) into it, and is linear.

        Sums of absolute values and numbers of active inputs do not follow from these: they are NaN.
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
            None if drift is None else replace(drift, cross=change(drift.cross.double())),
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


AnyMoments = TypeVar("AnyMoments", bound=_Additive)


def sum_folds(folds: Sequence[AnyMoments]) -> AnyMoments:
    """Add the moments of all folds. A single fold is returned as it is, without a copy."""
    combined: AnyMoments = reduce(add, folds)
    return combined
