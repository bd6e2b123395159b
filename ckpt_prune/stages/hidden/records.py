"""Records of a narrower residual stream."""

from typing import Annotated, Literal

from pydantic import Field

from ckpt_prune.common.records import Figure, FixedRecord
from ckpt_prune.job.records import Tried


class TriedHidden(Tried):
    """So many dimensions of the residual stream stayed."""

    kept: Annotated[int, Field(ge=1, le=10**7)]


class HiddenRecord(FixedRecord):
    """The dimensions that are left of a model's residual stream.

    Attributes:
        signal: what its principal directions are of.
        dimensions: of the dense stream.
        tied: of a shared basis, whether one table is still embedding and head; None if it was not.
        energy: share of the signals' energy that lies in the kept directions, basis by basis: those of attention and
            mlp of every block in order, or one of all; empty if the stream stays as it is.
        tried: descending, or ascending beside each number of blocks; empty if one number was given.
    """

    kind: Literal["per-block", "shared"]
    signal: Literal["normed", "stream"]
    dimensions: Annotated[int, Field(ge=1, le=10**7)]
    kept: Annotated[int, Field(ge=1, le=10**7)]
    tied: bool | None = None
    energy: list[Figure] = Field(default_factory=list)
    tried: list[TriedHidden] = Field(default_factory=list)


class HiddenFields(FixedRecord):
    """The narrower residual stream; None if it is whole."""

    optional = frozenset({"hidden"})

    hidden: HiddenRecord | None = None
