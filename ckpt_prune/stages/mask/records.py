"""Records of masks."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from ckpt_prune.common.records import Amount, Block, Count, Figure, FixedRecord
from ckpt_prune.options.training import Part


class MaskShares(FixedRecord):
    """How the zeros of a mask are shared out over blocks (sparsity/README.md, section 6).

    Attributes:
        ratios: share of zeros of every block.
        kept: N of every block's N:M; None if the mask is unstructured.
        figures: what was measured of every block: its outlier ratio, its exponent, or what its zeros alone are
            predicted to do to the model's output, in nats a sample.
    """

    ratios: list[Annotated[float, Field(ge=0, lt=1)]]
    kept: list[Annotated[int, Field(ge=1, le=32)]] | None = None
    figures: Sequence[Figure] = ()


class MaskedLinear(FixedRecord):
    """The mask of one linear module of one block.

    Attributes:
        weight: on-disk name.
        kind: what tables call the module (`Family.labels`); None in old files.
        zeros: weights that the mask zeroed. Weights that were zero before are among them.
        error: Σ‖y − ŷ‖² / Σ‖y‖² at the module's output on the calibration tokens; None without Grams.
        damp: what SparseGPT added to the diagonal of the Hessian, as a share of its mean.
        dead: inputs that were zero on every calibration token. SparseGPT zeroes their columns.
    """

    block: Block
    weight: str
    kind: str | None = None
    rows: Annotated[int, Field(ge=1, le=2**31)]
    columns: Annotated[int, Field(ge=1, le=2**31)]
    zeros: Count
    error: Figure = None
    damp: Figure = None
    dead: Amount = None

    @model_validator(mode="after")
    def _check_zeros(self) -> Self:
        if self.zeros > self.size:
            raise ValueError("more zeros than weights")
        return self

    @property
    def size(self) -> int:
        return self.rows * self.columns


class MaskRecord(FixedRecord):
    """Which weights were zeroed.

    Attributes:
        ratio: the share of zeros that the recipe asks for.
        only: the part of every block whose linear modules were masked; None if all were.
        allocation, shares: how blocks came by shares of their own; None if all have one.
    """

    optional = frozenset({"only", "allocation", "shares"})

    method: str
    pattern: str
    ratio: Figure = None
    only: Part | None = None
    allocation: str | None = None
    shares: MaskShares | None = None


class MaskFields(FixedRecord):
    """Which weights were zeroed, and what that did to every linear module."""

    mask: MaskRecord | None = None
    linears: list[MaskedLinear] = Field(default_factory=list)
