"""Candidates of a frontier: GGUF files, ONNX graphs and checkpoints for vLLM, with their measured losses and sizes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeVar

from ckpt_prune.common.formatting import decimal_bytes
from ckpt_prune.common.graph_types import GgufType, GraphType, OtherTypes
from ckpt_prune.evaluation.file_score import FileScore
from ckpt_prune.stages.quantize.scheme import DENSE, PackingScheme

LOST_ENERGY = "lost energy"
"""The loss of models that make vectors."""


@dataclass(frozen=True)
class FileCandidate:
    """A file that may be made.

    Attributes:
        name: in words.
        chosen, others: types of its matrices.
        bytes: of the file, to the byte.
        kl: what it is predicted to lose, nats a token; None if that is not known.
        by_pruning: part of it that fewer columns and tokens add; once they are gone, what was measured of that.
        columns: that the MLP of each block keeps; empty: all.
        types: in words.
        feedback: matrices are also rounded by error feedback, behind those that are rounded.
        rows: tokens that stay; None: all.
    """

    name: str
    chosen: GgufType
    others: OtherTypes
    bytes: int
    kl: float | None
    columns: tuple[int, ...] = ()
    types: str = ""
    feedback: bool = False
    by_pruning: float = 0.0
    rows: int | None = None

    @property
    def kinds(self) -> dict[str, Any]:
        """Types of matrices, as JSON has them."""
        return {"file": self.chosen} | {name: each for name, each in asdict(self.others).items() if each}

    @property
    def advice(self) -> str:
        """Which types to take, in words."""
        if self.others.options:
            return f"take llama.cpp's types: {self.types}"
        return f"take {self.types or self.chosen}"

    @property
    def prunes(self) -> bool:
        return bool(self.columns) or self.rows is not None

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> "FileCandidate":
        return cls(**dict(note) | {"others": OtherTypes(**note["others"]), "columns": tuple(note["columns"])})


@dataclass(frozen=True)
class RoundedCandidate:
    """An ONNX graph, or a checkpoint in compressed-tensors, whose weights are rounded.

    Attributes:
        name: in words.
        dtype: of its weights; `export --dtype` and `quantize --format` take it.
        kl: what its weights are predicted to lose, run in float once rounded; None if that is not known.
        rounding: of weights in few bits.
        kinds: way to store a weight → how many are stored so.
        counted: which weights `kinds` counts, in words.
        by_budget: a budget chose how each weight is stored, so that the size must be named to make it again.
        columns: that the MLP of each block keeps, of the encoder first, if the model was pruned; else empty.
        heads: heads went, too.
        commands: that make it.
        rows: tokens that stay; None: all.
        recipe: that prunes and rounds it, if one does both.
    """

    name: str
    dtype: GraphType
    kl: float | None
    rounding: Literal["nearest", "gptq"]
    kinds: dict[str, int] = field(default_factory=dict)
    counted: str = ""
    by_budget: bool = False
    columns: tuple[int, ...] = ()
    heads: bool = False
    commands: tuple[str, ...] = ()
    rows: int | None = None
    recipe: dict[str, Any] | None = None

    @property
    def advice(self) -> str:
        """How to store the weights, in words."""
        if self.dtype == "fp32":
            return "store them in float32"
        if set(self.kinds) == {DENSE}:
            return "store what stays as it is"
        how = "by GPTQ" if self.rounding == "gptq" else "to the nearest"
        most_first = sorted(self.kinds.items(), key=lambda kind: -kind[1])
        words = [f"{count} {_words_of_kind(kind)}" for kind, count in most_first]
        if len(words) == 1:
            kind, count = most_first[0]
            return f"store all {count} {self.counted} {_words_of_kind(kind)}, rounded {how}"
        return f"of the {sum(self.kinds.values())} {self.counted} store {', '.join(words)}, rounded {how}"

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> "RoundedCandidate":
        return cls(**dict(note) | {name: tuple(note[name]) for name in ("columns", "commands")})


def _words_of_kind(kind: str) -> str:
    """Return words for a way to store a weight, which a graph or a checkpoint calls `kind`."""
    if kind == DENSE:
        return "as they are"
    scheme = PackingScheme.parse(kind) if ":" in kind else None
    if scheme is None:
        return f"in {kind}"
    kind, _, shared = scheme.words.partition(", ")
    return f"in {kind} ({shared})"


C = TypeVar("C", FileCandidate, RoundedCandidate)


@dataclass(frozen=True)
class Measured(Generic[C]):
    """A candidate, and what it is worth."""

    candidate: C
    score: FileScore

    def line(self, dense: float | None) -> str:
        score, predicted = self.score, self.candidate.kl
        foreseen = "" if predicted is None else f" (predicted {predicted:.3f})"
        if dense is None:
            return (
                f"{self.candidate.name}: {decimal_bytes(score.bytes)}, {LOST_ENERGY} {score.words_of_kl}{foreseen}, "
                f"cosine {score.top1 or 0:.1%}"
            )
        return (
            f"{self.candidate.name}: {decimal_bytes(score.bytes)}, KL {score.words_of_kl}{foreseen}, perplexity "
            f"{score.perplexity or 0:.2f} (dense {dense:.2f})"
        )

    def note(self) -> dict[str, Any]:
        """Return what a journal keeps of it."""
        return {"candidate": asdict(self.candidate), "score": asdict(self.score)}

    @classmethod
    def read(cls, kind: type[C], note: Mapping[str, Any]) -> "Measured[C]":
        """Read a note of a journal."""
        score = dict(note["score"]) | {"speeds": tuple(note["score"]["speeds"])}
        return cls(kind.read(note["candidate"]), FileScore(**score))


MeasuredFile = Measured[FileCandidate]
MeasuredRounded = Measured[RoundedCandidate]
