"""What came out when an exported graph was held against the model it was made from: the file `validation.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from torch import Tensor

from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.filenames import VALIDATION
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.onnx.cases import (
    Padding,
)
from ckpt_prune.onnx.manifest import Source, read_record
from ckpt_prune.onnx.metrics import Metric
from ckpt_prune.onnx.session import Provider

CheckName = Literal["files", "checker", "interface", "load", "outputs", "generation", "metric"]


@dataclass(frozen=True)
class ProofSamples:
    """What to compare a graph and its model on. Neither: noise, made for the model, which no metric is measured on."""

    windows: Tensor | None = None
    """int64 (N, T): real text, no padding."""
    images: ImageSamples | None = None
    measured: Tensor | ImageSamples | None = None
    """What rounding is measured on: windows or images like those, others where there are enough of them."""
    description: dict[str, Any] | None = None
    """For the record: where from, how many, window, seed."""

    @property
    def seed(self) -> int:
        """The seed of noise."""
        return int((self.description or {}).get("seed") or 0)


class ProofCheck(BaseModel):
    """One thing that was checked: passed is None where it could not be."""

    name: CheckName
    passed: bool | None
    detail: str


class Place(BaseModel):
    """An element of an output, and its value on both sides (None: no finite number)."""

    batch: int
    token: int | None
    """Of the batch's text, padding counted; or patch of an image. None where outputs are of a whole text or image."""
    unit: int
    """Vocabulary entry, class or dimension; of keys and values, head x head_dim + dimension."""
    onnxruntime: float | None
    pytorch: float | None


class Case(BaseModel):
    """One output for one input. Figures are None where they are infinite, or where there is no output to compare."""

    batch: int
    tokens: int | None
    """The tokens of each text, generated ones included; None for images."""
    padding: Padding
    cache: Literal["none", "chunks", "steps"]
    """Whether the text went through it in one pass, in pieces or token by token."""
    segments: bool = False
    """Whether the second half of each text had `token_type_ids` of one."""
    output: str
    max_abs: float | None = None
    mean_abs: float | None = None
    max_rel: float | None = None
    mean_rel: float | None = None
    largest: float | None = None
    """Largest absolute output in PyTorch."""
    agreement: float | None = None
    """Share of texts, tokens or images where both put the same token or class first; None for other outputs."""
    passed: bool
    where: Place | None = None
    """Where the difference of a failed case is largest."""
    note: str | None = None
    """What is wrong with a failed case, where that is no matter of rounding."""


class Continuation(BaseModel):
    """What both say after a prompt, each taking its own likeliest token."""

    prompt: str
    onnxruntime: str
    pytorch: str
    tokens: int
    """That each generates."""
    same: int
    """How many are the same before the first that is not."""


class Validation(BaseModel):
    """What came out of one graph."""

    file: str
    passed: bool
    provider: Provider
    note: str | None
    """Why that is not the provider that was asked for."""
    dtype: GraphType | None
    """None of a graph without a record: another tool made it."""
    tolerance: float | None
    """In units of the largest output of a case; means are held to a tenth of it. None of a graph that is rounded."""
    max_loss: float | None
    """What a graph that is rounded may lose of the task's metric; None of others."""
    against: Source
    data: dict[str, Any]
    checks: list[ProofCheck]
    cases: list[Case]
    metrics: list[Metric]
    continuations: list[Continuation]
    """Of a graph that is rounded and generates text."""
    versions: dict[str, str]
    files: dict[str, str]
    """Those that this is about: name → sha256."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        failed = [case for case in self.cases if not case.passed]
        return [
            ("file", self.file),
            ("passed", self.passed),
            ("provider", self.provider),
            ("dtype", self.dtype),
            ("cases", len(self.cases)),
            ("failed", len(failed)),
        ]


class Validations(BaseModel):
    """`validation.json`."""

    version: Literal[2] = 2
    passed: bool
    graphs: list[Validation]

    @classmethod
    def of(cls, graphs: list[Validation]) -> "Validations":
        """Of all graphs of a folder."""
        return cls(passed=all(each.passed for each in graphs), graphs=graphs)

    def write(self, folder: Path) -> None:
        """Put it into the exported folder.

        Raises:
            UserError: the folder cannot be written.
        """
        write_atomically(folder / VALIDATION, self.model_dump_json(indent=2) + "\n")


def read_validation(folder: Path) -> Validations:
    """The record of an exported folder's last validation.

    Raises:
        UserError: there is none, or it is damaged.
    """
    return read_record(
        folder / VALIDATION, Validations, absent="`ckpt-prune validate` writes it", damaged="validate again"
    )
