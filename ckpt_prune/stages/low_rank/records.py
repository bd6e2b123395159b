"""Records of linear modules that two thin ones stand in for."""

from typing import Annotated

from pydantic import Field

from ckpt_prune.common.records import Block, Figure, FixedRecord


class FactoredRecord(FixedRecord):
    """One linear module of one block that two thin ones stand in for.

    Attributes:
        weight: on-disk name of the weight that is gone.
        kind: what tables call the module (`Family.labels`).
        rows, columns: of that weight.
        rank: outputs of the first factor and inputs of the second.
        error: Σ‖y − ŷ‖² / Σ‖y‖² at the module's output on the calibration tokens, before factors are rounded to the
            checkpoint's type; None without Grams.
        change: ‖W − Ŵ‖ / ‖W‖ of the factors as they are stored.
    """

    block: Block
    weight: str
    kind: str | None = None
    rows: Annotated[int, Field(ge=1, le=2**31)]
    columns: Annotated[int, Field(ge=1, le=2**31)]
    rank: Annotated[int, Field(ge=1, le=2**31)]
    error: Figure = None
    change: Figure = None

    @property
    def size(self) -> int:
        """Weights that are gone."""
        return self.rows * self.columns

    @property
    def left(self) -> int:
        """Weights of the factors."""
        return self.rank * (self.rows + self.columns)


class LowRankFields(FixedRecord):
    """Linear modules that became two thin ones."""

    optional = frozenset({"factored"})

    factored: list[FactoredRecord] = Field(default_factory=list)
