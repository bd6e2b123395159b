"""The index of a statistics folder: which model, tokenizer and data they are of, and what was measured."""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from ckpt_prune.measure.samples.shards import join_fingerprints
from ckpt_prune.measure.statistics.files import Collect
from ckpt_prune.model.family import Modality
from ckpt_prune.model.model import Width

Effect = tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0, allow_inf_nan=False)]]
"""Units dropped of one site (of q and k dimensions of every head), and how far that moves the model's output."""


def _check_ascending(effects: list[Effect]) -> list[Effect]:
    counts = [count for count, _ in effects]
    if not counts or counts != sorted(set(counts)):
        raise ValueError("units dropped must ascend")
    return effects


Effects = Annotated[list[Effect], AfterValidator(_check_ascending)]


class StreamDistances(BaseModel):
    """How far runs of blocks move the residual stream and the model's own output (`distances.Distances`)."""

    model_config = ConfigDict(extra="forbid")

    cosine: list[list[float]]
    divergence: list[list[float]]


class StatisticsIndex(BaseModel):
    """The facts about a statistics folder; measure/README.md, section 4, says what each key holds."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    model: str
    tokenizer: str | None
    dtype: str
    modality: Modality | Literal["image-text"] = "text"
    data: list[str]
    texts: str = ""
    seed: int
    samples: int = Field(ge=1)
    window: int = Field(ge=2)
    tokens: int = Field(ge=1)
    folds: int = Field(ge=1)
    collect: list[Collect]
    compute_dtype: str
    blocks: int = Field(ge=1)
    lacking: list[str] = Field(default_factory=list)
    consumers: dict[str, Width]
    queries: dict[str, tuple[int, int]] = Field(default_factory=dict)
    turned: dict[str, tuple[int, int]] = Field(default_factory=dict)
    routers: dict[str, int] = Field(default_factory=dict)
    linears: dict[str, int] = Field(default_factory=dict)
    files: dict[str, str]
    fisher: Annotated[int, Field(ge=0)] = 0
    predicted: dict[str, dict[str, Effects]] = Field(default_factory=dict)
    spaces: dict[str, Effects] = Field(default_factory=dict)
    scores: dict[str, str] = Field(default_factory=dict)
    spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    stream: StreamDistances | None = None
    effects: dict[str, Effects] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _omit_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Statistics without these keep the digest that they had before there were any.
        values: dict[str, Any] = handler(self)
        for key in (
            "lacking",
            "turned",
            "routers",
            "fisher",
            "predicted",
            "spaces",
            "scores",
            "spread",
            "stream",
            "effects",
            "texts",
        ):
            if not values.get(key):
                values.pop(key, None)
        return values

    @property
    def digest(self) -> str:
        """SHA-256 over the whole index, and through it over every file."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def add_index(a: StatisticsIndex, b: StatisticsIndex) -> StatisticsIndex:
    """Return the index of a sum, but for its files. Effects that both have are averaged, weighted by samples."""
    share = a.samples / (a.samples + b.samples)
    predicted = {
        name: _mean_effects(scores, b.predicted[name], a.fisher / (a.fisher + b.fisher))
        for name, scores in a.predicted.items()
        if name in b.predicted
    }
    return a.model_copy(
        update={
            "data": join_fingerprints([*a.data, *b.data]),
            "texts": ", ".join(filter(None, (a.texts, b.texts))),
            "samples": a.samples + b.samples,
            "tokens": a.tokens + b.tokens,
            "fisher": a.fisher + b.fisher,
            "predicted": predicted,
            "spaces": _mean_effects(a.spaces, b.spaces, share),
            "scores": {space: score for space, score in a.scores.items() if b.scores.get(space) == score},
            "spread": share * a.spread + (1 - share) * b.spread,
            "stream": _mean_stream(a, b),
            "effects": _mean_effects(a.effects, b.effects, share),
        }
    )


def _mean_stream(a: StatisticsIndex, b: StatisticsIndex) -> StreamDistances | None:
    if a.stream is None or b.stream is None:
        return None
    share = a.fisher / (a.fisher + b.fisher)

    def mean(ours: list[list[float]], theirs: list[list[float]]) -> list[list[float]]:
        rows = zip(ours, theirs, strict=True)
        return [[share * x + (1 - share) * y for x, y in zip(left, right, strict=True)] for left, right in rows]

    cosine = mean(a.stream.cosine, b.stream.cosine)
    return StreamDistances(cosine=cosine, divergence=mean(a.stream.divergence, b.stream.divergence))


def _mean_effects(
    a: Mapping[str, list[Effect]], b: Mapping[str, list[Effect]], share: float
) -> dict[str, list[Effect]]:
    """Return the mean of effects that both have at the same points; `share` is a's weight."""
    means: dict[str, list[Effect]] = {}
    for name, ours in a.items():
        theirs = b.get(name, [])
        if [count for count, _ in ours] == [count for count, _ in theirs]:
            pairs = zip(ours, theirs, strict=True)
            means[name] = [(count, share * x + (1 - share) * y) for (count, x), (_, y) in pairs]
    return means
