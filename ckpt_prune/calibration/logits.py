"""Additive moments of one layer's queries and keys: what scores and compensation of logits need.

See compensation/README.md, section 7.

The logits of a sample are Q Kᵀ, head by head. The error of replacing them by Q_S X K_Sᵀ depends on Q and K through the
sample's Grams A = QᵀQ and B = KᵀK alone, and over many samples through Σ A ⊗ B alone. So a head's moments are either
the Grams of every sample or the sum of their products, exact either way: whichever takes less room.
"""

from typing import Literal, Self

import torch
from torch import Tensor

Form = Literal["per-sample", "fourth-order"]


def packed_width(head_dim: int) -> int:
    """Entries in the upper triangle of a symmetric (d, d) matrix, d (d + 1) / 2; p in what follows."""
    return head_dim * (head_dim + 1) // 2


def packed_positions(dims: int, device: torch.device | str = "cpu") -> Tensor:
    """Where entry (i, j) of a symmetric matrix lies in its upper triangle packed row by row, (dims, dims) int64."""
    rows, columns = torch.triu_indices(dims, dims, device=device)
    positions = torch.empty(dims, dims, dtype=torch.int64, device=device)
    order = torch.arange(packed_width(dims), device=device)
    positions[rows, columns] = order
    positions[columns, rows] = order
    return positions


def smaller_form(samples: int, head_dim: int) -> Form:
    """The form that takes less room for `samples` samples: 2 N p floats a head, or p². Equal: per sample."""
    return "per-sample" if 2 * samples <= packed_width(head_dim) else "fourth-order"


class LogitMoments:
    """Moments of the queries and keys of N samples in one layer, head by head.

    With A_b = Q_bᵀ Q_b and B_b = K_bᵀ K_b of sample b (Q, K: tokens × d, what the logits multiply, before their scale)
    and vech the upper triangle packed row by row into p = d (d + 1) / 2 numbers, these hold either each vech(A_b) and
    vech(B_b), or Σ_b vech(A_b) vech(B_b)ᵀ.

    Args:
        samples: N.
        tokens: over all samples.
        heads: H.
        head_dim: d.
        queries: vech(A_b), (H, N, p) float32; with `keys`.
        keys: vech(B_b), (H, N, p) float32.
        fourth: Σ_b vech(A_b) vech(B_b)ᵀ, (H, p, p) float32; instead of the two.

    Raises:
        ValueError: neither form, or both.
    """

    def __init__(
        self,
        samples: int,
        tokens: int,
        heads: int,
        head_dim: int,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
        fourth: Tensor | None = None,
    ) -> None:
        if (queries is None) != (keys is None) or (queries is None) == (fourth is None):
            raise ValueError("logit moments are either queries and keys, or fourth")
        self.samples = samples
        self.tokens = tokens
        self.heads = heads
        self.head_dim = head_dim
        self.fourth = fourth
        # Batches are joined when first read: joining at every batch would copy all that came before it.
        self._batches: tuple[tuple[Tensor, Tensor], ...] = ()
        if queries is not None and keys is not None:
            self._batches = ((queries, keys),)

    @classmethod
    def zeros(cls, heads: int, head_dim: int, *, form: Form, device: torch.device | str = "cpu") -> Self:
        """The moments of no sample."""
        p = packed_width(head_dim)
        if form == "fourth-order":
            return cls(0, 0, heads, head_dim, fourth=torch.zeros(heads, p, p, device=device))
        return cls(0, 0, heads, head_dim, *(torch.zeros(heads, 0, p, device=device) for _ in range(2)))

    @property
    def form(self) -> Form:
        """Which of the two these hold."""
        return "per-sample" if self.fourth is None else "fourth-order"

    @property
    def queries(self) -> Tensor | None:
        """vech(A_b), (H, N, p) contiguous, or None in fourth-order form."""
        return self.grams()[0] if self._batches else None

    @property
    def keys(self) -> Tensor | None:
        """vech(B_b), (H, N, p) contiguous, or None in fourth-order form."""
        return self.grams()[1] if self._batches else None

    def grams(self) -> tuple[Tensor, Tensor]:
        """`queries` and `keys` where the samples are held one by one.

        Raises:
            ValueError: they are summed.
        """
        if not self._batches:
            raise ValueError("these logit moments are summed over samples")
        if len(self._batches) > 1:
            queries, keys = zip(*self._batches, strict=True)
            self._batches = ((torch.cat(queries, 1), torch.cat(keys, 1)),)
        return self._batches[0]

    def _with_batches(self, samples: int, tokens: int, batches: tuple[tuple[Tensor, Tensor], ...]) -> Self:
        """Per-sample moments of `batches`, each (H, n, p), not yet joined."""
        made = type(self)(samples, tokens, self.heads, self.head_dim, *batches[0])
        made._batches = batches
        return made

    def accumulate(self, queries: Tensor, keys: Tensor) -> Self:
        """These moments and those of another batch of samples; a fourth-order sum is updated in place.

        Args:
            queries: (B, T, H d), biases included, of B samples of T tokens; products are taken in float32.
            keys: (B, T, H d), likewise.
        """
        batch, tokens, _ = queries.shape
        packed = (self._packed_grams(queries), self._packed_grams(keys))
        samples, tokens = self.samples + batch, self.tokens + batch * tokens
        if self.fourth is None:
            return self._with_batches(samples, tokens, (*self._batches, packed))
        self.fourth.baddbmm_(packed[0].mT, packed[1])
        return type(self)(samples, tokens, self.heads, self.head_dim, fourth=self.fourth)

    def _packed_grams(self, projection: Tensor) -> Tensor:
        """The packed Gram of each sample of `projection` (B, T, H d), head by head: (H, B, p) float32."""
        batch, tokens, _ = projection.shape
        x = projection.detach().float().view(batch, tokens, self.heads, self.head_dim).permute(2, 0, 1, 3)
        rows, columns = torch.triu_indices(self.head_dim, self.head_dim, device=x.device)
        return (x.mT @ x)[..., rows, columns]

    def __add__(self, other: "LogitMoments") -> "LogitMoments":
        """Moments of the samples of both; fourth-order where either is, or where that takes less room by now."""
        samples, tokens = self.samples + other.samples, self.tokens + other.tokens
        summed = self.fourth if self.fourth is not None else other.fourth
        if summed is None and smaller_form(samples, self.head_dim) == "per-sample":
            return self._with_batches(samples, tokens, self._batches + other._batches)
        dtype = torch.float32 if summed is None else summed.dtype
        fourth = self._fourth_order(dtype) + other._fourth_order(dtype)
        return LogitMoments(samples, tokens, self.heads, self.head_dim, fourth=fourth)

    def as_fourth(self, dtype: torch.dtype = torch.float32) -> "LogitMoments":
        """These moments in fourth-order form: exact, summed in float64 and rounded once to `dtype`."""
        if self.fourth is not None:
            return self
        return LogitMoments(self.samples, self.tokens, self.heads, self.head_dim, fourth=self._fourth_order(dtype))

    def _fourth_order(self, dtype: torch.dtype) -> Tensor:
        if self.fourth is not None:
            return self.fourth
        queries, keys = self.grams()
        p = queries.shape[2]
        fourth = torch.empty(self.heads, p, p, dtype=dtype, device=queries.device)
        for head in range(self.heads):
            fourth[head] = queries[head].double().T @ keys[head].double()
        return fourth

    def of_head(self, head: int) -> "LogitMoments":
        """The moments of one head, as views."""
        one = slice(head, head + 1)
        if self.fourth is not None:
            return LogitMoments(self.samples, self.tokens, 1, self.head_dim, fourth=self.fourth[one])
        queries, keys = self.grams()
        return LogitMoments(self.samples, self.tokens, 1, self.head_dim, queries[one], keys[one])

    def restricted(self, kept: Tensor) -> "LogitMoments":
        """The moments of the dimensions `kept` (H, d') int64 of each head, in the same form."""
        size = kept.shape[1]
        rows, columns = torch.triu_indices(size, size, device=kept.device)
        positions = packed_positions(self.head_dim, kept.device)
        # One row of positions a head: the kept pairs, in the order of a packed (d', d') triangle.
        pairs = positions[kept[:, rows], kept[:, columns]]
        shape = (self.samples, self.tokens, self.heads, size)
        if self.fourth is not None:
            fourth = [matrix[at[:, None], at] for matrix, at in zip(self.fourth, pairs, strict=True)]
            return LogitMoments(*shape, fourth=torch.stack(fourth))
        queries, keys = (
            torch.stack([matrix[:, at] for matrix, at in zip(packed, pairs, strict=True)]) for packed in self.grams()
        )
        return LogitMoments(*shape, queries, keys)

    def to(self, device: torch.device | str) -> "LogitMoments":
        """The same moments on another device."""
        shape = (self.samples, self.tokens, self.heads, self.head_dim)
        if self.fourth is not None:
            return LogitMoments(*shape, fourth=self.fourth.to(device))
        queries, keys = self.grams()
        return LogitMoments(*shape, queries.to(device), keys.to(device))

    @property
    def finite(self) -> bool:
        """Whether no moment is NaN or Inf."""
        return all(bool(torch.isfinite(t).all()) for t in (self.queries, self.keys, self.fourth) if t is not None)

    def logit_energy(self) -> Tensor:
        """E_b[‖q_j‖² ‖k_j‖²] of each dimension j, norms over a sample's tokens: (H, d) float64 (CORP's ranking)."""
        if self.fourth is not None:
            diagonal = packed_positions(self.head_dim, self.fourth.device).diagonal()
            return self.fourth[:, diagonal, diagonal].double() / self.samples
        queries, keys = self.grams()
        diagonal = packed_positions(self.head_dim, queries.device).diagonal()
        return (queries[..., diagonal].double() * keys[..., diagonal].double()).sum(1) / self.samples
