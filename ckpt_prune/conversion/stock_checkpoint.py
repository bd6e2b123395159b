"""A stock checkpoint to be written: its files, and how each of its tensors is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.checkpoint.side_files import carried_files
from ckpt_prune.common.filenames import CONVERSION_RECORD
from ckpt_prune.common.records import FixedRecord


class RuntimeComparison(Protocol):
    """How a new checkpoint compares with its source in another runtime: see `runtimes.comparison.Proof`."""

    @property
    def passed(self) -> bool:
        """Whether both compute the same."""

    def lines(self) -> list[str]:
        """Return lines for the user."""

    def model_dump(self) -> dict[str, Any]:
        """Return all of it for JSON."""


Compare = Callable[[Path], RuntimeComparison]
"""Compares a finished folder, before it takes its place, with its source in another runtime."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor of the new checkpoint. `read` makes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        names: Sequence[str],
        shape: tuple[int, ...],
        make: Callable[..., Tensor] = lambda tensor: tensor,
    ) -> "NewTensor":
        """Return what `make` makes of tensors of a checkpoint, in the dtype of the first."""
        return cls(source.tensors[names[0]].dtype, shape, lambda: make(*source.read(names).values()))


@dataclass(frozen=True)
class StockCheckpoint:
    """A stock checkpoint to be written.

    Attributes:
        name: of the source.
        fingerprint: of the source.
        tensors: on-disk name → how it is made, in the order of the file.
        texts: other files that are made. They replace files of the same name that the source has.
        source: whose side files are copied, if it is a checkpoint.
        notes: lines for the user.
    """

    name: str
    fingerprint: str
    config: dict[str, Any]
    tensors: Mapping[str, NewTensor]
    texts: Mapping[str, str] = field(default_factory=dict)
    source: Checkpoint | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, source: Checkpoint, config: dict[str, Any], tensors: Mapping[str, NewTensor], **changes: Any
    ) -> "StockCheckpoint":
        return cls(source.name, source.fingerprint, config, tensors, source=source, **changes)

    @property
    def copied(self) -> dict[str, Path]:
        """Files of the source that are copied; UserError if one changed since the source was opened."""
        files = {} if self.source is None else carried_files(self.source)
        return {name: path for name, path in files.items() if name not in self.texts}


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint: its folder, the stock class that loads it, lines for the user, perhaps a comparison."""

    output: Path
    model_type: str
    architecture: str
    parameters: int
    notes: tuple[str, ...]
    proof: RuntimeComparison | None = None

    @property
    def passed(self) -> bool:
        """Whether it was written: it is not if it computes something else than its source."""
        return self.proof is None or self.proof.passed

    def data(self) -> dict[str, Any]:
        plain = asdict(replace(self, proof=None)) | {"output": str(self.output), "notes": list(self.notes)}
        del plain["proof"]
        validation = None if self.proof is None else self.proof.model_dump()
        return plain | {"written": self.passed, "validation": validation}


class ConversionRecord(FixedRecord):
    """Content of `ckpt_prune_converted.json`.

    Attributes:
        fingerprint: of the source.
        files: file → sha256.
        side_files: names of other files written.
        job: digest of all that the output depends on.
    """

    source: str
    fingerprint: str = ""
    notes: list[str] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    side_files: list[str] = Field(default_factory=list)
    job: str = ""

    def data(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def find_conversion(folder: Path) -> ConversionRecord | None:
    """Return the record of a converted checkpoint; None if it is missing or damaged."""
    try:
        return ConversionRecord.read(parse_json_object(read_input(folder / CONVERSION_RECORD)))
    except (OSError, ValueError):
        return None
