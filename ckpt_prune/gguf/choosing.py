"""Types of a file's matrices that lose least at a size of the file, or are smallest at a loss."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import gguf
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.budget.choices import Choices, save, spend
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.gguf.file_plan import FilePlan, FilePlanner
from ckpt_prune.gguf.mixtures import MIXTURES
from ckpt_prune.gguf.types import OUTER, bits_of

Losses = Mapping[str, Mapping[Kind, float]]
"""Name of a matrix in the file → type → divergence that it adds, in nats a token."""
_NAMES: dict[Kind, GgufType] = {
    mixture.base: name  # type: ignore[misc]
    for name, mixture in MIXTURES.items()
    if name in ("q8_0", "q6_k", "q5_k_s", "q5_1", "q5_0", "q4_k_s", "q4_1", "iq4_nl", "iq4_xs")
    or name in ("q3_k_s", "iq3_s", "iq3_xxs", "q2_k", "q4_0")
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
    """

    chosen: GgufType
    others: OtherTypes
    bytes: int
    kl: float

    def words(self) -> str:
        """Say which types matrices of each kind have, and of how many blocks."""
        by_matrix: dict[str, Counter[str]] = {}
        for pattern, kind in self.others.matrices.items():
            matrix, blocks = _read_pattern(pattern)
            by_matrix.setdefault(matrix, Counter())[kind] += blocks
        shown: dict[str, str | None] = {"embedding": self.others.embedding, "head": self.others.output}
        for matrix, kinds in by_matrix.items():
            shown[matrix] = ", ".join(f"{kind} in {count}" for kind, count in kinds.most_common())
        return "; ".join(f"{name} {kinds}" for name, kinds in shown.items() if kinds)


@dataclass(frozen=True)
class TypeBudget:
    """The choices of types that a file's matrices have.

    Attributes:
        planner: of the model's files.
        losses: of every matrix whose type is chosen.
    """

    planner: FilePlanner
    losses: Losses

    @cached_property
    def _plan(self) -> FilePlan:
        return self.planner.plan("q8_0", weighted=True)

    @cached_property
    def _elements(self) -> dict[str, int]:
        plan = self._plan
        return {
            name: plan.tensor_bytes[name] // gguf.GGML_QUANT_SIZES[kind][1] * gguf.GGML_QUANT_SIZES[kind][0]
            for name, kind in plan.kinds.items()
        }

    def size(self, name: str, kind: Kind) -> int:
        """Return the bytes that a matrix of a type takes in the file, aligned."""
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        return int(gguf.GGUFWriter.ggml_pad(self._elements[name] // elements * size, gguf.GGUF_DEFAULT_ALIGNMENT))

    @cached_property
    def _outside(self) -> int:
        """Bytes of the file that no choice changes."""
        return self._plan.bytes - sum(self.size(name, self._plan.kinds[name]) for name in self.losses)

    @cached_property
    def _choices(self) -> dict[str, Choices]:
        return {
            name: Choices.of((kind, self.size(name, kind), loss) for kind, loss in by_kind.items())
            for name, by_kind in self.losses.items()
        }

    @property
    def least(self) -> int:
        """The bytes of the smallest file."""
        return self._outside + int(sum(each.costs[0] for each in self._choices.values()))

    def at_bytes(self, limit: int) -> TypeChoice:
        """Return the types of the least predicted loss in a file of at most `limit` bytes; BudgetError if none fits."""
        return self._choose(spend(list(self._choices.values()), limit - self._outside))

    def at_loss(self, limit: float) -> TypeChoice:
        """Return the types of the smallest file that is predicted to lose at most `limit`; BudgetError if none does."""
        return self._choose(save(list(self._choices.values()), limit))

    def _choose(self, at: list[int]) -> TypeChoice:
        pairs = zip(self._choices.items(), at, strict=True)
        return self.of({name: choices.labels[index] for (name, choices), index in pairs})

    def of(self, kinds: Mapping[str, Kind]) -> TypeChoice:
        """Return a choice of these types, one for each matrix."""
        sizes: Counter[Kind] = Counter()
        for name, kind in kinds.items():
            if name not in OUTER:
                sizes[kind] += self._elements[name]
        chosen = _NAMES[max(sizes or Counter(kinds.values()), key=lambda kind: sizes[kind])]
        embedding, head = (kinds[name].name.lower() if name in kinds else None for name in OUTER)
        others = OtherTypes(embedding, head, _patterns(kinds))  # type: ignore[arg-type]
        size = self._outside + sum(self.size(name, kind) for name, kind in kinds.items())
        return TypeChoice(chosen, others, size, self.predict(kinds))

    def predict(self, kinds: Mapping[str, Kind]) -> float:
        """Return what types are predicted to lose; a type that was not tried counts as the nearest finer one."""
        return sum(_nearest(by_kind, kinds[name]) for name, by_kind in self.losses.items())

    def of_mixture(self, chosen: GgufType) -> tuple[FilePlan, float]:
        """Return the file of one of llama.cpp's own mixtures, and what it is predicted to lose."""
        plan = self.planner.plan(chosen, weighted=True)
        return plan, self.predict(plan.kinds)

    @property
    def elements(self) -> int:
        return sum(self._elements[name] for name in self.losses)


def _nearest(by_kind: Mapping[Kind, float], kind: Kind) -> float:
    if kind in by_kind:
        return by_kind[kind]
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return 0.0
    near = min(by_kind, key=lambda other: abs(bits_of(other) - bits_of(kind)))
    # Each bit less makes squared errors four times as large.
    return by_kind[near] * float(4 ** (bits_of(near) - bits_of(kind)))


def _patterns(kinds: Mapping[str, Kind]) -> dict[str, str]:
    """Return expressions that together name each matrix of the blocks once → type."""
    blocks: dict[tuple[str, Kind], list[int]] = {}
    for name, kind in kinds.items():
        if name.startswith("blk."):
            _, block, matrix, _ = name.split(".")
            blocks.setdefault((matrix, kind), []).append(int(block))
    return {
        f"^blk\\.({'|'.join(map(str, own))})\\.{re.escape(matrix)}\\.": kind.name.lower()
        for (matrix, kind), own in blocks.items()
    }


def _read_pattern(pattern: str) -> tuple[str, int]:
    """Return the matrix that an expression of `_patterns` names, and in how many blocks."""
    _, blocks, matrix, _ = pattern.split("\\.")
    return matrix, blocks.count("|") + 1
