"""Records of rotations."""

from pydantic import Field

from ckpt_prune.common.records import Amount, Block, Count, Figure, FixedRecord

BIN, FARTHEST = 2, 60
"""Width of a bar of a histogram in decibels (10 of them are a factor of ten), and the last bar on either side."""


class Histogram(FixedRecord):
    """Numbers of weights by importance, in bars of two decibels of the mean (`importance.count_by_importance`).

    Attributes:
        kept, zeroed: of the weights that a mask by this importance keeps, and of the others.
    """

    kept: list[Count]
    zeroed: list[Count]


class ImportanceMap(FixedRecord):
    """Importance of the cells of a weight, before and after it was rotated (DenoiseRotator, Figure 2).

    Attributes:
        rows, columns: shape of the weight.
        before, after: means over cells, from the first row on, as shares of the mean over the whole weight.
        largest_before, largest_after: share of the importance in the largest hundredth of the weights.
        histograms: before and after, under these names.
    """

    optional = frozenset({"histograms"})

    weight: str
    rows: Count
    columns: Count
    before: list[list[Figure]]
    after: list[list[Figure]]
    largest_before: Figure = None
    largest_after: Figure = None
    histograms: dict[str, Histogram] = Field(default_factory=dict)


class Learned(FixedRecord):
    """The rotations of one block, or of all (block None): entropy of the importance in nats, and steps of training.

    Attributes:
        curve: steps and the entropy there, as it was computed while training; no more than a plot needs.
        map: of the output projection of the first block alone, if it is turned.
    """

    optional = frozenset({"curve", "map"})

    block: Block | None
    entropy_before: Figure = None
    entropy_after: Figure = None
    steps: Amount = None
    curve: list[tuple[Count, Figure]] = Field(default_factory=list)
    map: ImportanceMap | None = None


class RotationRecord(FixedRecord):
    """Rotations before the mask.

    Attributes:
        importance: whose importance of weights was to concentrate.
        turns: whether matrices between blocks stay in the model.
    """

    kind: str
    importance: str | None = None
    turns: bool = False
    learned: list[Learned]


class RotationFields(FixedRecord):
    """Rotations before the mask; None without any."""

    rotation: RotationRecord | None = None
