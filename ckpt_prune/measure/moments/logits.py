"""Moments of one layer's queries and keys, which scores and compensation of logits need; they add.

See compensation/README.md, section 7.

The logits of a sample are Q Kᵀ, head by head. The error of replacing them by Q_S X K_Sᵀ depends on the sample's Grams
A = QᵀQ and B = KᵀK alone, and over many samples on Σ A ⊗ B alone. So a head's moments are either
the Grams of every sample or the sum of their products, exact either way: whichever takes less room.

The softmax does not see what is constant over the keys of a sample. So moments may also hold the Grams of keys less
their mean over the sample, for a fit that does not spend anything on it.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal, Self

import torch
from torch import Tensor

from ckpt_prune.common.finite import all_finite
from ckpt_prune.measure.moments.inputs import sum_tokens
from ckpt_prune.measure.moments.precision import PAIRS, Extent, needs_double
from ckpt_prune.measure.moments.sums import add_widest
from ckpt_prune.parallel.group import Group

LogitForm = Literal["per-sample", "fourth-order"]


def packed_width(head_dim: int) -> int:
    """Count the entries in the upper triangle of a symmetric (d, d) matrix, p = d (d + 1) / 2."""
    return head_dim * (head_dim + 1) // 2


def packed_positions(dims: int, device: torch.device | str = "cpu") -> Tensor:
    """Locate entry (i, j) of a symmetric matrix in its upper triangle packed row by row: (dims, dims) int64."""
    rows, columns = torch.triu_indices(dims, dims, device=device)
    positions = torch.empty(dims, dims, dtype=torch.int64, device=device)
    order = torch.arange(packed_width(dims), device=device)
    positions[rows, columns] = order
    positions[columns, rows] = order
    return positions


def choose_form(samples: int, head_dim: int) -> LogitForm:
    """Return the form that takes less room: 2 N p floats a head, or p². Per sample if both take the same."""
    return "per-sample" if 2 * samples <= packed_width(head_dim) else "fourth-order"


def choose_logit_type(queries: Tensor, keys: Tensor) -> torch.dtype:
    """Return the type for Grams of queries (N, d_q) and keys (N, d_k) of the same tokens."""
    pair = (projection.detach() for projection in (queries, keys))
    left, right = (Extent.measure(x, len(x), *sum_tokens(x)[:2]) for x in pair)
    return torch.float64 if needs_double(left, right, PAIRS) else torch.float32


class LogitMoments:
    """Moments of the queries and keys of N samples in one layer, head by head.

    With A_b = Q_bᵀ Q_b and B_b = K_bᵀ K_b of sample b (Q, K: tokens × d, what the logits multiply, before their scale)
    and vech the upper triangle packed row by row into p = d (d + 1) / 2 numbers, these hold either each vech(A_b) and
    vech(B_b), or Σ_b vech(A_b) vech(B_b)ᵀ. Centred moments also hold the same of B_b with keys less their mean.

    Args:
        samples: N.
        tokens: over all samples.
        heads: H.
        head_dim: d.
        queries: vech(A_b), (H, N, p) float32, or float64 if that is too coarse; with `keys`.
        keys: vech(B_b), (H, N, p), likewise.
        fourth: Σ_b vech(A_b) vech(B_b)ᵀ, (H, p, p), likewise; instead of the two.
        centred: `keys`, or `fourth`, with keys less their mean over each sample; None if that is not measured.
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
        centred: Tensor | None = None,
    ) -> None:
        if (queries is None) != (keys is None) or (queries is None) == (fourth is None):
            raise ValueError("logit moments are either queries and keys, or fourth")
        self.samples = samples
        self.tokens = tokens
        self.heads = heads
        self.head_dim = head_dim
        self.fourth = fourth
        self._centred = centred if fourth is not None else None
        # Batches are joined when first read: joining at every batch would copy all that came before it.
        self._batches: tuple[tuple[Tensor, ...], ...] = ()
        if queries is not None and keys is not None:
            self._batches = ((queries, keys) if centred is None else (queries, keys, centred),)

    @classmethod
    def zeros(
        cls, heads: int, head_dim: int, *, form: LogitForm, centred: bool = False, device: torch.device | str = "cpu"
    ) -> Self:
        p = packed_width(head_dim)
        names = (["fourth"] if form == "fourth-order" else ["queries", "keys"]) + ["centred"] * centred
        rows = p if form == "fourth-order" else 0
        return cls(0, 0, heads, head_dim, **{name: torch.zeros(heads, rows, p, device=device) for name in names})

    @property
    def form(self) -> LogitForm:
        """Which of the two forms these have."""
        return "per-sample" if self.fourth is None else "fourth-order"

    @property
    def queries(self) -> Tensor | None:
        """vech(A_b), (H, N, p) contiguous, or None in fourth-order form."""
        return self.grams()[0] if self._batches else None

    @property
    def keys(self) -> Tensor | None:
        """vech(B_b), (H, N, p) contiguous, or None in fourth-order form."""
        return self.grams()[1] if self._batches else None

    @property
    def has_centred(self) -> bool:
        """True if these are measured with centred keys, too."""
        return self._centred is not None or any(len(parts) > 2 for parts in self._batches)

    @property
    def centred(self) -> Tensor | None:
        """`keys`, or `fourth`, of keys less their mean; None if that is not measured."""
        if not self._batches:
            return self._centred
        parts = self._join_batches()
        return parts[2] if len(parts) > 2 else None

    def with_keys(self, *, centred: bool) -> "LogitMoments":
        """Return the moments with keys as they are alone, or with keys less their mean over each sample alone.

        Raises:
            ValueError: these are not measured with keys less their mean.
        """
        shape = (self.samples, self.tokens, self.heads, self.head_dim)
        of_centred = self.centred
        if centred and of_centred is None:
            raise ValueError("these logit moments are not of centred keys")
        if of_centred is None:
            return self
        if self.fourth is not None:
            return LogitMoments(*shape, fourth=of_centred if centred else self.fourth)
        queries, keys = self.grams()
        return LogitMoments(*shape, queries, of_centred if centred else keys)

    @property
    def device(self) -> torch.device:
        return self._batches[0][0].device if self.fourth is None else self.fourth.device

    def grams(self) -> tuple[Tensor, Tensor]:
        """Return `queries` and `keys`.

        Raises:
            ValueError: samples are summed, not held one by one.
        """
        if not self._batches:
            raise ValueError("these logit moments are summed over samples")
        queries, keys, *_ = self._join_batches()
        return queries, keys

    def _join_batches(self) -> tuple[Tensor, ...]:
        if len(self._batches) > 1:
            self._batches = (tuple(torch.cat(parts, 1) for parts in zip(*self._batches, strict=True)),)
        return self._batches[0]

    def _with_batches(self, samples: int, tokens: int, batches: tuple[tuple[Tensor, ...], ...]) -> Self:
        """Return per-sample moments of `batches`, each (H, n, p), not yet joined."""
        queries, keys, *_ = batches[0]
        moments = type(self)(samples, tokens, self.heads, self.head_dim, queries, keys)
        moments._batches = batches
        return moments

    def accumulate(self, queries: Tensor, keys: Tensor) -> Self:
        """Add a batch of B samples of T tokens: queries and keys (B, T, H d), biases included.

        Products are taken in float32, or in float64 if that is too coarse (`precision.needs_double`). A fourth-order
        sum is updated in place.
        """
        batch, tokens, _ = queries.shape
        dtype = choose_logit_type(queries.flatten(0, 1), keys.flatten(0, 1))
        queries, keys = queries.detach().to(dtype), keys.detach().to(dtype)
        packed = [self._pack_grams(queries), self._pack_grams(keys)]
        if self.has_centred:
            packed.append(self._pack_grams(keys - keys.mean(1, keepdim=True)))
        samples, tokens = self.samples + batch, self.tokens + batch * tokens
        if self.fourth is None:
            return self._with_batches(samples, tokens, (*self._batches, tuple(packed)))
        dtype = torch.promote_types(dtype, self.fourth.dtype)
        left, *others = (grams.to(dtype) for grams in packed)
        pairs = zip(self._sum_fourth_order(), others, strict=True)
        return self._of_sums(samples, tokens, [sums.to(dtype).baddbmm_(left.mT, right) for sums, right in pairs])

    def _pack_grams(self, projection: Tensor) -> Tensor:
        """Return the packed Gram of each sample of a projection (B, T, H d), head by head: (H, B, p), in its type."""
        batch, tokens, _ = projection.shape
        x = projection.view(batch, tokens, self.heads, self.head_dim).permute(2, 0, 1, 3)
        rows, columns = torch.triu_indices(self.head_dim, self.head_dim, device=x.device)
        return (x.mT @ x)[..., rows, columns]

    def __add__(self, other: "LogitMoments") -> "LogitMoments":
        """Add moments of other samples: fourth-order if either is, or if that takes less room by now.

        Raises:
            ValueError: one of the two is measured with centred keys, and the other is not.
        """
        if self.has_centred != other.has_centred:
            raise ValueError("moments of centred keys do not add to moments without")
        samples, tokens = self.samples + other.samples, self.tokens + other.tokens
        summed = self.fourth if self.fourth is not None else other.fourth
        if summed is None and choose_form(samples, self.head_dim) == "per-sample":
            return self._with_batches(samples, tokens, self._batches + other._batches)
        dtype = torch.promote_types(self._dtype, other._dtype)
        sums = [x + y for x, y in zip(self._sum_fourth_order(dtype), other._sum_fourth_order(dtype), strict=True)]
        return self._of_sums(samples, tokens, sums)

    @property
    def _dtype(self) -> torch.dtype:
        """The widest type of these sums: of the Grams of single samples, each batch has its own."""
        tensors = [self.fourth] if self.fourth is not None else [queries for queries, *_ in self._batches]
        return reduce(torch.promote_types, [tensor.dtype for tensor in tensors])

    def as_fourth(self, dtype: torch.dtype | None = None) -> "LogitMoments":
        """Return these moments in fourth-order form, summed in float64 and rounded once, by default to their type."""
        if self.fourth is not None:
            return self
        return self._of_sums(self.samples, self.tokens, self._sum_fourth_order(dtype))

    def _of_sums(self, samples: int, tokens: int, sums: Sequence[Tensor]) -> Self:
        """Return fourth-order moments of these heads, of keys as they are and perhaps of centred ones."""
        fourth, *centred = sums
        shape = (samples, tokens, self.heads, self.head_dim)
        return type(self)(*shape, fourth=fourth, centred=centred[0] if centred else None)

    def _sum_fourth_order(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return sums of products with keys, and with centred ones if these are measured, (H, p, p) each."""
        dtype = dtype or self._dtype
        if self.fourth is not None:
            return [self.fourth] if self._centred is None else [self.fourth, self._centred]
        queries, *others = self._join_batches()
        return [
            torch.stack([(q.double().T @ k.double()).to(dtype) for q, k in zip(queries, keys, strict=True)])
            for keys in others
        ]

    def _map(self, change: Callable[[Tensor], Tensor], heads: int, head_dim: int) -> "LogitMoments":
        """Return moments of other heads or dimensions; every tensor is changed alike."""
        shape = (self.samples, self.tokens, heads, head_dim)
        centred = None if self.centred is None else change(self.centred)
        if self.fourth is not None:
            return LogitMoments(*shape, fourth=change(self.fourth), centred=centred)
        queries, keys = self.grams()
        return LogitMoments(*shape, change(queries), change(keys), centred=centred)

    def select_head(self, head: int) -> "LogitMoments":
        """Return the moments of one head, as views."""
        return self._map(lambda tensor: tensor[head : head + 1], 1, self.head_dim)

    def restrict(self, kept: Tensor) -> "LogitMoments":
        """Return the moments of the dimensions `kept` (H, d') int64 of each head, in the same form."""
        size = kept.shape[1]
        rows, columns = torch.triu_indices(size, size, device=kept.device)
        positions = packed_positions(self.head_dim, kept.device)
        # One row of positions a head: the kept pairs, in the order of a packed (d', d') triangle.
        pairs = positions[kept[:, rows], kept[:, columns]]

        def select(tensor: Tensor) -> Tensor:
            by_head = zip(tensor, pairs, strict=True)
            if self.fourth is not None:
                return torch.stack([matrix[at[:, None], at] for matrix, at in by_head])
            return torch.stack([matrix[:, at] for matrix, at in by_head])

        return self._map(select, self.heads, size)

    def to(self, device: torch.device | str) -> "LogitMoments":
        return self._map(lambda tensor: tensor.to(device), self.heads, self.head_dim)

    def pool(self, group: Group) -> "LogitMoments":
        """Pool the samples of all processes, in their order, at the first one; the form stays."""
        samples, tokens = group.add(torch.tensor([self.samples, self.tokens])).tolist()
        shape = (samples, tokens, self.heads, self.head_dim)
        centred = self.centred
        if self.fourth is not None:
            pooled_centred = None if centred is None else add_widest(group, centred)
            return LogitMoments(*shape, fourth=add_widest(group, self.fourth), centred=pooled_centred)
        queries, keys = (group.join(grams, 1) for grams in self.grams())
        return LogitMoments(*shape, queries, keys, centred=None if centred is None else group.join(centred, 1))

    @property
    def is_finite(self) -> bool:
        tensors = (self.queries, self.keys, self.fourth, self.centred)
        return all(all_finite(tensor) for tensor in tensors if tensor is not None)

    def logit_energy(self) -> Tensor:
        """Return E_b[‖q_j‖² ‖k_j‖²] of dimension j (CORP's ranking), norms over a sample's tokens: (H, d) float64."""
        if self.fourth is not None:
            diagonal = packed_positions(self.head_dim, self.fourth.device).diagonal()
            return self.fourth[:, diagonal, diagonal].double() / self.samples
        queries, keys = self.grams()
        diagonal = packed_positions(self.head_dim, queries.device).diagonal()
        return (queries[..., diagonal].double() * keys[..., diagonal].double()).sum(1) / self.samples
