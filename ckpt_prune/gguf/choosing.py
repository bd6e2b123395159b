"""Types of a file's matrices, and columns of its MLPs, that lose least at a size, or are smallest at a loss."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import gguf
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.budget.choices import BudgetError, Choices, save, solve_each, spend
from ckpt_prune.budget.columns import ColumnLosses, list_sites, read_choices
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.gguf.file_plan import FilePlan, FilePlanner, aligned
from ckpt_prune.gguf.layout import lay_out
from ckpt_prune.gguf.losses import types_for
from ckpt_prune.gguf.mixtures import MIXTURES
from ckpt_prune.gguf.timing import FileTimes
from ckpt_prune.gguf.types import OUTER, bits_of
from ckpt_prune.rounding.codes import CODES

Losses = Mapping[str, Mapping[Kind, float]]
"""Name of a matrix in the file → type → divergence that it adds, in nats a token."""
_WHOLE = Fraction(1)
_NAMES: dict[Kind, GgufType] = {
    mixture.experts or mixture.base: name  # type: ignore[misc]
    for name, mixture in MIXTURES.items()
    if name in ("q8_0", "q6_k", "q5_k_s", "q5_1", "q5_0", "q4_k_s", "q4_1", "iq4_nl", "iq4_xs")
    or name in ("q3_k_s", "iq3_s", "iq3_xxs", "q2_k", "q4_0", "mxfp4")
}
"""Type of most of a file → the name of such a file."""


@dataclass(frozen=True)
class TypeChoice:
    """Types of a file's matrices.

    Attributes:
        chosen: type that the file says it has.
        others: types of its matrices, each of which is named.
        bytes: of the file.
        kl: what it is predicted to lose, in nats a token.
        by_pruning: part of it that fewer columns and fewer tokens add.
        columns: block → columns that its MLP keeps, if any MLP loses some.
        rows: tokens that stay; None: all.
        time: that it is predicted to take, in nanoseconds; None if no times are known.
    """

    chosen: GgufType
    others: OtherTypes
    bytes: int
    kl: float
    by_pruning: float = 0.0
    columns: Mapping[int, int] = field(default_factory=dict)
    rows: int | None = None
    time: float | None = None

    def words(self) -> str:
        """Say which types matrices of each kind have, of how many blocks, and how many columns stay."""
        by_matrix: dict[str, Counter[str]] = {}
        for pattern, kind in self.others.matrices.items():
            matrix, blocks = _read_pattern(pattern)
            by_matrix.setdefault(matrix, Counter())[kind] += blocks
        shown: dict[str, str | None] = {"embedding": self.others.embedding, "head": self.others.output}
        for matrix, kinds in by_matrix.items():
            parts = [f"{kind} in {plural(count, 'block')}" for kind, count in kinds.most_common()]
            shown[matrix] = ", ".join(parts) if len(parts) > 1 else next(iter(kinds))
        if self.columns:
            least, most = min(self.columns.values()), max(self.columns.values())
            shown["columns of MLPs"] = f"{most}" if least == most else f"{least} to {most}"
        if self.rows is not None:
            shown["tokens"] = f"{self.rows:,}"
        return "; ".join(f"{name} {kinds}" for name, kinds in shown.items() if kinds)


@dataclass(frozen=True)
class TypeBudget:
    """The choices of types that a file's matrices have, and of the columns that its MLPs keep.

    A matrix of an MLP that keeps a share of its columns takes that share of its bytes, and rounding it adds that share
    of what it adds to the whole matrix.

    Attributes:
        planner: of the model's files.
        losses: of every matrix whose type is chosen.
        columns: of blocks whose MLPs may keep fewer columns than they have, the full number among them.
        alike: all blocks keep as many.
        rows: tokens that stay of a model with more; None: all.
        by_rows: what the others' absence adds.
        fitted: matrices will be rounded by what reaches them, which the file says.
        times: of weights, if what is asked for is a time (`at_time`).
        rerouting: of a mixture of experts (`TypeLosses`).
    """

    planner: FilePlanner
    losses: Losses
    columns: ColumnLosses = field(default_factory=dict)
    alike: bool = False
    fitted: bool = False
    rows: int | None = None
    by_rows: float = 0.0
    times: FileTimes | None = None
    rerouting: float = 0.0

    @cached_property
    def _plan(self) -> FilePlan:
        return self.planner.plan("q8_0", weighted=True, fitted=self.fitted)

    @cached_property
    def _elements(self) -> dict[str, int]:
        plan = self._plan
        return {
            name: plan.tensor_bytes[name] // gguf.GGML_QUANT_SIZES[kind][1] * gguf.GGML_QUANT_SIZES[kind][0]
            for name, kind in plan.kinds.items()
        }

    @cached_property
    def _row_lengths(self) -> dict[str, int]:
        return {name: int(weight.shape[-1]) for name, weight in lay_out(self.planner.model).tensors.items()}

    def size(self, name: str, kind: Kind, share: Fraction = _WHOLE) -> int:
        """Return the bytes that a share of a matrix of a type takes in the file, aligned."""
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        there = int(self._elements[name] * share)
        return aligned(there // elements * size)

    @cached_property
    def _outside(self) -> int:
        """Bytes of the file that no choice changes."""
        return self._plan.bytes - sum(self.size(name, self._plan.kinds[name]) for name in self.losses)

    @cached_property
    def _unchosen(self) -> dict[str, Kind]:
        """Matrices of which it is not known what types lose, such as those of convolutions: they keep 8 bits."""
        return {name: kind for name, kind in self._plan.kinds.items() if kind == Kind.Q8_0 and name not in self.losses}

    @cached_property
    def _variants(self) -> list[list[Choices]]:
        """Return the choices of all sites: several times if all blocks keep as many columns, once for each number."""
        if not self.alike or not self.columns:
            return [self._choices(self.columns)]
        widths = sorted(set.intersection(*(set(by_width) for by_width in self.columns.values())))
        return [self._choices({b: {width: own[width]} for b, own in self.columns.items()}) for width in widths]

    def _choices(self, columns: ColumnLosses) -> list[Choices]:
        inside = {block: [name for name in self.losses if _has_columns(name, block)] for block in columns}
        units = {block: max(by_width) for block, by_width in self.columns.items()}
        return list_sites(self.losses, inside, columns, units, self._kinds_of)

    def _kinds_of(self, name: str, share: Fraction) -> list[tuple[Kind, float, float]]:
        by_kind = self.losses[name]
        if share < 1 and ".ffn_down" in name:  # its rows are shorter, and may not divide into blocks
            columns = int(self._row_lengths[name] * share)
            by_kind = {kind: _nearest(by_kind, kind) for kind in types_for(columns)} or by_kind
        return [
            (kind, self._cost(name, kind, share), float(share) * loss)
            for kind, loss in by_kind.items()
            if self.times is None or kind in self.times.by_kind
        ]

    def _cost(self, name: str, kind: Kind, share: Fraction) -> float:
        """Return what a budget is spent on: bytes, or nanoseconds if times are known."""
        if self.times is None:
            return self.size(name, kind, share)
        return self.time_of(name, kind, self.times, share)

    def time_of(self, name: str, kind: Kind, times: FileTimes, share: Fraction = _WHOLE) -> float:
        """Return the nanoseconds that a share of a matrix of a type takes."""
        return times.of(name, kind, self._elements[name] * float(share))

    @property
    def least(self) -> int:
        """The bytes of the smallest file."""
        return self._outside + int(min(sum(each.costs[0] for each in sites) for sites in self._variants))

    def at_bytes(self, limit: int) -> TypeChoice:
        """Return what is predicted to lose least in a file of at most `limit` bytes; BudgetError if nothing fits."""
        return min(self._solve(spend, limit - self._outside), key=lambda choice: choice.kl)

    def at_time(self, limit: float, times: FileTimes) -> TypeChoice:
        """Return what is predicted to lose least in a file that takes at most `limit` ns; BudgetError if none does."""
        timed = replace(self, times=times)
        try:
            return min(timed._solve(spend, limit - times.outside), key=lambda choice: choice.kl)
        except BudgetError as error:
            raise BudgetError(limit, times.outside + error.least) from error

    def at_loss(self, limit: float) -> TypeChoice:
        """Return the smallest file that is predicted to lose at most `limit`; BudgetError if none does."""
        root = math.sqrt(max(0.0, limit - self.by_rows) + self.rerouting**2 / 4) - self.rerouting / 2
        allowed = root**2 if self.rerouting else limit - self.by_rows  # of the sum of losses
        return min(self._solve(save, allowed), key=lambda choice: choice.bytes)

    def _solve(self, solve: Callable[[Sequence[Choices], float], list[int]], limit: float) -> list[TypeChoice]:
        def choose(sites: Sequence[Choices]) -> TypeChoice:
            return self.of(*read_choices(sites, solve(sites, limit)))

        failed: list[BudgetError] = []
        found = solve_each(choose, self._variants, failed)
        if not found:
            raise failed[-1]
        return found

    def of(self, kinds: Mapping[str, Kind], widths: Mapping[int, int] | None = None) -> TypeChoice:
        """Return a choice of these types, one for each matrix, and of the columns that the MLPs of blocks keep."""
        shares = self._shares(widths or {})
        sizes: Counter[Kind] = Counter()
        for name, kind in kinds.items():
            if name not in OUTER:
                sizes[kind] += int(self._elements[name] * shares.get(name, 1))
        chosen = _NAMES[max(sizes or Counter(kinds.values()), key=lambda kind: sizes[kind])]
        embedding, head = (kinds[name].name.lower() if name in kinds else None for name in OUTER)
        others = OtherTypes(embedding, head, _patterns({**kinds, **self._unchosen}))  # type: ignore[arg-type]
        size = self._outside + sum(self.size(name, kind, shares.get(name, _WHOLE)) for name, kind in kinds.items())
        by_pruning = self.by_rows + sum(self.columns[block][width] for block, width in (widths or {}).items())
        fewer = {block: width for block, width in (widths or {}).items() if width < max(self.columns[block])}
        kept = {block: (widths or {})[block] for block in self.columns} if fewer else {}
        kl = self.predict(kinds, shares) + by_pruning
        time = None if self.times is None else self.time(kinds, self.times, shares)
        return TypeChoice(chosen, others, size, kl, by_pruning, kept, self.rows, time)

    def time(self, kinds: Mapping[str, Kind], times: FileTimes, shares: Mapping[str, Fraction] | None = None) -> float:
        """Return the nanoseconds that a file of these types is predicted to take; inf if one of them was not timed."""
        share_of, spent = shares or {}, times.outside
        for name in self.losses:
            if kinds[name] not in times.by_kind:
                return math.inf
            spent += self.time_of(name, kinds[name], times, share_of.get(name, _WHOLE))
        return spent

    def _shares(self, widths: Mapping[int, int]) -> dict[str, Fraction]:
        """Return the share that stays of matrices of MLPs with so many columns."""
        return {
            name: Fraction(width, max(self.columns[block]))
            for block, width in widths.items()
            for name in self.losses
            if _has_columns(name, block)
        }

    def predict(self, kinds: Mapping[str, Kind], shares: Mapping[str, Fraction] | None = None) -> float:
        """Return what types are predicted to lose; a type that was not tried follows from the nearest in bits."""
        share_of = shares or {}
        lost = sum(
            float(share_of.get(name, 1)) * _nearest(by_kind, kinds[name]) for name, by_kind in self.losses.items()
        )
        return lost + self.rerouting * math.sqrt(max(0.0, lost))

    def of_mixture(self, chosen: GgufType) -> tuple[FilePlan, float]:
        """Return the file of one of llama.cpp's own mixtures, and what it is predicted to lose."""
        plan = self.plan(chosen)
        return plan, self.predict(plan.kinds)

    def plan(self, chosen: GgufType) -> FilePlan:
        """Return the file of one of llama.cpp's own mixtures."""
        return self.planner.plan(chosen, weighted=True)


def _has_columns(name: str, block: int) -> bool:
    """Return whether a matrix is of a block's MLP, or of its experts but those that all tokens are sent to."""
    return name.startswith(f"blk.{block}.ffn_") and "_shexp." not in name


def _nearest(by_kind: Mapping[Kind, float], kind: Kind) -> float:
    if kind in by_kind:
        return by_kind[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return 0.0
    # Levels of a table come first: those of iq4_nl and q4_k are far apart on weights that were in q4_1 before.
    near = min(by_kind, key=lambda other: (_table(other) != _table(kind), abs(bits_of(other) - bits_of(kind))))
    # Each bit less makes squared errors four times as large.
    return by_kind[near] * float(4 ** (bits_of(near) - bits_of(kind)))


def _table(kind: Kind) -> tuple[int, ...] | None:
    return CODES[kind].table if kind in CODES else None


def _patterns(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """Return expressions that together name each matrix of the blocks once → type."""
    blocks: dict[tuple[str, Kind], list[int]] = {}
    for name, kind in kinds.items():
        if name.startswith("blk."):
            _, block, matrix = name.removesuffix(".weight").split(".", 2)
            blocks.setdefault((matrix, kind), []).append(int(block))
    several = Counter(matrix for matrix, _ in blocks)
    patterns = dict[str, str]()
    for (matrix, kind), own in blocks.items():
        which = f"({'|'.join(map(str, own))})" if several[matrix] > 1 else "[0-9]+"
        patterns[f"^blk\\.{which}\\.{re.escape(matrix)}\\."] = kind.name.lower()
    return patterns


def _read_pattern(pattern: str) -> tuple[str, int]:
    """Return the matrix that an expression of `_patterns` names, and in how many blocks: 1 where it has one type."""
    _, blocks, *matrix, _ = pattern.split("\\.")
    return ".".join(matrix), blocks.count("|") + 1
