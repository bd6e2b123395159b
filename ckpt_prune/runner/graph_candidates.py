"""Candidates of a frontier for onnxruntime: what each graph is, and what it is worth."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.gguf.score import FileScore


@dataclass(frozen=True)
class GraphCandidate:
    """A graph that may be made.

    Attributes:
        name: in words.
        dtype: of its weights, by which its file is named.
        kl: what it is predicted to lose, as weights rounded in the float graph do; None if that is not known.
        rounding: of weights in few bits.
        kinds: how weights are stored → how many are.
        by_budget: forms of weights are chosen, so that the size must be named to make it again.
        columns: that the MLP of each block keeps, if the model was pruned first; else empty.
        commands: that make it.
    """

    name: str
    dtype: GraphType
    kl: float | None
    rounding: Literal["nearest", "gptq"]
    kinds: dict[str, int] = field(default_factory=dict)
    by_budget: bool = False
    columns: tuple[int, ...] = ()
    commands: tuple[str, ...] = ()
    rows: None = None

    @property
    def types(self) -> str:
        if self.dtype == "fp32":
            return "float32"
        words = ", ".join(f"{count} in {kind}" for kind, count in self.kinds.items())
        return f"{words}, rounded {'by GPTQ' if self.rounding == 'gptq' else 'to the nearest'}"


@dataclass(frozen=True)
class MeasuredGraph:
    """A candidate, and what it is worth."""

    candidate: GraphCandidate
    score: FileScore

    def note(self) -> dict[str, Any]:
        return {"candidate": asdict(self.candidate), "score": asdict(self.score)}

    @classmethod
    def read(cls, note: dict[str, Any]) -> "MeasuredGraph":
        own, score = dict(note["candidate"]), dict(note["score"])
        own |= {name: tuple(own[name]) for name in ("columns", "commands")}
        score["speeds"] = tuple(score["speeds"])
        return cls(GraphCandidate(**own), FileScore(**score))
