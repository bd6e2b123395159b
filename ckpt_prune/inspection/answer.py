"""The answer of `inspect`, as one model that `--json` prints."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class _Fixed(BaseModel):
    model_config = ConfigDict(frozen=True)


class SpaceDescription(_Fixed):
    """One space of a model.

    Attributes:
        unit: what one unit is.
        units: in each block.
        consumer: the module whose columns the space ends in; None for q and k.
        columns_per_unit: of the consumer.
        parameters: of the tensors that the space lies on, all blocks together.
        containers: of an output with fewer units: `weights` alone, and `weights and bias`; none where none can go.
    """

    unit: str
    units: int
    consumer: str | None
    columns_per_unit: int
    parameters: int
    containers: dict[str, str]


class SizeAtRatio(_Fixed):
    """What is left of a model at one ratio.

    Attributes:
        ratio: share of units to drop; None for the recipe's own.
        units: space → units kept in each block.
        container: of the output.
        parameters, bytes, flops, tokens, cache: as in `job.records.Cost`.
    """

    ratio: float | None
    units: dict[str, int]
    container: str
    parameters: int
    bytes: int
    flops: int
    tokens: int | None
    cache: int | None = None


class Zeros(_Fixed):
    """Zeros of several tensors together.

    Attributes:
        tensors: how many.
        weights: their elements.
        zeros: of them.
        min, mean, max: shares of zeros over the tensors.
        pattern: the tightest N:M that all hold, or None.
    """

    tensors: int
    weights: int
    zeros: int
    min: float
    mean: float
    max: float
    pattern: str | None


class TensorZeros(_Fixed):
    """Zeros of one tensor."""

    name: str
    shape: list[int]
    zeros: int
    share: float
    pattern: str | None


class SparsityDescription(_Fixed):
    """Zeros of the blocks' linear weights by module and together, and of every tensor."""

    modules: dict[str, Zeros]
    blocks: Zeros
    tensors: list[TensorZeros]


class Origin(_Fixed):
    """What an output of this tool was made from."""

    source: str
    recipe: str


def _single(args: Iterable[tuple[str | None, Any]]) -> list[tuple[str | None, Any]]:
    """Those of the arguments of a `repr` that are no collection and no record: the others have no end."""
    return [(name, value) for name, value in args if isinstance(value, str | int | float)]


class _Any(_Fixed):
    model: str
    family: str
    architecture: str
    purpose: str | None
    dtype: str
    files: int
    sparsity: SparsityDescription | None = None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        return _single(super().__repr_args__())

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return self.model_dump(exclude={key for key in _OPTIONAL if not getattr(self, key, True)})


_OPTIONAL = ("sparsity", "ignored")
"""Keys that are left out of JSON where they hold nothing."""


class BlockDescription(_Fixed):
    """A whole block.

    Attributes:
        parameters: of the last one.
        stay: why none can go; None where some can (recipes with depth).
    """

    parameters: int
    stay: str | None


class ModelDescription(_Any):
    """A model that can be pruned.

    Attributes:
        model: its folder.
        family: its model type.
        architecture: the class it loads as.
        purpose: what it is for, in the Hub's words; None where this package does nothing with such models.
        dtype: of its weights.
        files: safetensors files.
        blocks: of the model.
        block: one of them.
        tied_head: whether the head is the embedding.
        spaces: by name.
        parameters, bytes, flops, tokens, cache: as in `job.records.Cost`.
        weights: False where there is a config alone.
        ignored: tensors that outputs lack, because its class does not load them or another that it ties to them has
            the same values; left out of JSON without any.
        ignored_words: how many of the first kind, and which, in words.
        tied_words: what is stored otherwise than config.json ties it, in words.
        made_from: where it is an output of this tool.
        pruned: its size at the ratios that were asked for.
        messages: where units are too coarse for these.
        recipe: whose spaces they apply to.
        sparsity: where it was asked for.
    """

    blocks: int
    block: BlockDescription
    tied_head: bool
    spaces: dict[str, SpaceDescription]
    parameters: int
    bytes: int
    flops: int
    tokens: int | None
    cache: int | None = None
    weights: bool
    ignored: list[str] = Field(default_factory=list)
    ignored_words: str | None = Field(default=None, exclude=True)
    tied_words: str | None = Field(default=None, exclude=True)
    made_from: Origin | None
    pruned: list[SizeAtRatio]
    messages: list[str]
    recipe: str | None


class RemoteDescription(_Any):
    """An output with remote code of this tool, which loses no more units.

    Attributes:
        model: its folder.
        family: its model type.
        architecture: its class, of its own code.
        purpose: as of `ModelDescription`.
        dtype: of its weights.
        files: safetensors files.
        parameters, bytes: of its tensors.
        flops, tokens, cache: as in `job.records.Cost`; None where it has no report.
        source, recipe: what it was made from, and how.
        note: why no stock container holds it.
        sparsity: where it was asked for.
    """

    parameters: int
    bytes: int
    flops: int | None
    tokens: int | None
    cache: int | None = None
    source: str | None
    recipe: str | None
    note: str | None


class UnknownDescription(_Fixed):
    """What a model of an unknown family is like.

    Attributes:
        model: its folder.
        model_type, architecture: of its config, and the stock class that loads it.
        like: the known family that is nearest.
        lacking, extra: tensors that only that family, or only this model has, with `{block}`.
        keys: config keys that only this one's class has, with its values.
        code: classes of transformers that are not alike, by the ends of their names.
        undecided: keys of the description that this leaves open.
        draft: a description to start from.
    """

    model: str
    model_type: str
    architecture: str
    like: str
    lacking: list[str]
    extra: list[str]
    keys: dict[str, Any]
    code: list[str]
    undecided: list[str]
    draft: dict[str, Any]

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        return _single(super().__repr_args__())

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return self.model_dump()


Description = ModelDescription | RemoteDescription | UnknownDescription
