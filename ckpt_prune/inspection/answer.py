"""The answer of `inspect`, as models that `--json` prints."""

from typing import Any

from pydantic import Field

from ckpt_prune.common.fields import Frozen
from ckpt_prune.model.family_keys import Found


class SpaceDescription(Frozen):
    """One space of a model.

    Attributes:
        units: in each block.
        step: by which the config of a part can state them; 1 if by any.
        consumer: the module whose columns the space ends in; None for q and k.
        parameters: of the tensors that the space lies on, all blocks together.
        containers: `model_type` of an output with fewer units, for `weights` alone and for `weights and bias`; none if
            no unit can go, or if no stock class fits a part of another model, which has no code of its own.
    """

    unit: str
    units: int
    step: int = 1
    consumer: str | None
    columns_per_unit: int
    parameters: int
    containers: dict[str, str]
    whole: str | None = None


class SizeAtRatio(Frozen):
    """The size of a model at one ratio, or at the recipe's own (None); sizes as in `job.records.Cost`."""

    ratio: float | None
    units: dict[str, int]
    container: str
    parameters: int
    bytes: int
    flops: int
    tokens: int | None
    cache: int | None = None


class Zeros(Frozen):
    """Zeros of several tensors together.

    Attributes:
        weights: elements of all tensors.
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


class TensorZeros(Frozen):
    """Zeros of one tensor."""

    name: str
    shape: list[int]
    zeros: int
    share: float
    pattern: str | None


class SparsityDescription(Frozen):
    """Zeros of the blocks' linear weights by module and together, and of every tensor."""

    modules: dict[str, Zeros]
    blocks: Zeros
    tensors: list[TensorZeros]


class MadeFrom(Frozen):
    """The model and recipe that an output of this tool was made from."""

    source: str
    recipe: str


class BlockDescription(Frozen):
    """A whole block.

    Attributes:
        parameters: of the last one.
        fewest, most: parameters of the smallest and of the largest.
        stay: why none can go; None if some can.
    """

    parameters: int
    fewest: int
    most: int
    stay: str | None


class _Answer(Frozen):
    model: str

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [(name, value) for name, value in super().__repr_args__() if isinstance(value, str | int | float)]

    def data(self) -> dict[str, Any]:
        return self.model_dump(exclude={key for key in _OPTIONAL if not getattr(self, key, True)})


_OPTIONAL = ("sparsity", "ignored", "image", "stored")
"""Keys that JSON leaves out if they hold nothing."""


class _KnownDescription(_Answer):
    family: str
    architecture: str
    purpose: str | None
    dtype: str
    files: int
    sparsity: SparsityDescription | None = None


class ModelDescription(_KnownDescription):
    """A model that can be pruned.

    Attributes:
        purpose: in the Hub's words; None if this package has no use for such models.
        parameters, bytes, flops, tokens, cache: as in `job.records.Cost`.
        image: height and width of the image that FLOPs are for, of a model of images in stages.
        stored: how weights of few bits are stored, which are read as `dtype`, and all bytes; None if all are plain.
        parts: how the parameters are divided (`model.cost.count_by_part`).
        weights: False if there is a config alone.
        ignored: tensors that outputs lack, because the class does not load them, or because another tensor that is tied
            to them has the same values.
        ignored_words, tied_words: sentences about these, and about tensors stored otherwise than config.json ties them.
        made_from: set for an output of this tool.
        kinds: kind of blocks, in words → these blocks; empty if all are alike. Blocks of a kind have the same spaces,
            and where config.json names a type of each block, the same type.
        pruned: sizes at the given ratios.
        messages: say if units are too coarse for these.
        recipe: whose spaces the ratios apply to.
        found: how spaces of a family that was not known were proven; None if its description was given.
        description: of a family from outside the package, as for `--family`.
    """

    blocks: int
    block: BlockDescription
    kinds: dict[str, list[int]] = Field(default_factory=dict)
    tied_head: bool
    spaces: dict[str, SpaceDescription]
    parameters: int
    parts: dict[str, int]
    bytes: int
    flops: int
    tokens: int | None
    image: tuple[int, int] | None = None
    cache: int | None = None
    weights: bool
    stored: str | None = None
    ignored: list[str] = Field(default_factory=list)
    ignored_words: str | None = Field(default=None, exclude=True)
    tied_words: str | None = Field(default=None, exclude=True)
    made_from: MadeFrom | None
    pruned: list[SizeAtRatio]
    messages: list[str]
    recipe: str | None
    found: Found | None = None
    description: dict[str, Any] | None = None


class RemoteDescription(_KnownDescription):
    """An output with remote code of this tool, which loses no more units.

    Sizes are as in `job.records.Cost`, None without a report; `note` says why no stock container holds it.
    """

    parameters: int
    bytes: int
    flops: int | None
    tokens: int | None
    cache: int | None = None
    source: str | None
    recipe: str | None
    note: str | None


class GraphDescription(Frozen):
    """One ONNX graph.

    Attributes:
        dtype: as `export --dtype` names it.
        stack: of an encoder-decoder, the one that it computes.
        bytes: with those of a file of weights beside it.
        weights: way to store a rounded weight → how many are; empty if none is rounded.
        proven: whether it computed what its model does when both were compared last; None if they were not.
    """

    file: str
    dtype: str
    stack: str | None
    opset: int
    bytes: int
    weights: dict[str, int]
    proven: bool | None


class GraphsDescription(_Answer):
    """A folder of ONNX graphs, as `export` writes it.

    Attributes:
        cached: graphs that generate text take keys and values of what was read before.
        provider: of onnxruntime that the graphs are fused for; None if they are not.
        source, fingerprint: of the checkpoint that they were made from.
        compared_on: data of the last comparison; None if there was none.
        versions: of what made them.
    """

    task: str
    cached: bool
    provider: str | None
    source: str
    fingerprint: str
    bytes: int
    graphs: list[GraphDescription]
    compared_on: str | None
    versions: dict[str, str]


Description = ModelDescription | RemoteDescription | GraphsDescription


class PartsDescription(Frozen):
    """A model of which several parts are described, each by its name, in the order in which `prune` takes them."""

    model: str
    parts: dict[str, Description]

    def data(self) -> dict[str, Any]:
        return {"model": self.model, "parts": {name: each.data() for name, each in self.parts.items()}}
