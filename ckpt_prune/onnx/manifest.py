"""What an exported folder says of itself."""

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import onnx
import onnx_ir
import onnxruntime
import onnxscript
from pydantic import BaseModel, Field, ValidationError

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.versions import versions
from ckpt_prune.onnx.quantization.record import Quantised
from ckpt_prune.onnx.session import DATA, Provider
from ckpt_prune.onnx.tasks import Task
from ckpt_prune.options.graphs import TaskName

R = TypeVar("R", bound=BaseModel)


class Port(BaseModel):
    """An input or output of the graph."""

    name: str
    type: str
    """float32, float16 or int64."""
    shape: list[int | str]
    """Sizes; dynamic axes by name."""


class Source(BaseModel):
    """The checkpoint a graph was made from."""

    name: str
    fingerprint: str


class GraphEntry(BaseModel):
    """One graph of a folder."""

    file: str
    """Its name; weights may be in a file beside it that is called the same with `_data` at its end."""
    dtype: GraphType
    opset: int
    inputs: list[Port]
    outputs: list[Port]
    tensors: dict[str, str]
    """Initializer of the graph → sha256 of its bytes."""
    quantised: Quantised | None
    """How its weights are rounded."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        return [("file", self.file), ("dtype", self.dtype), ("opset", self.opset)]


class Manifest(BaseModel):
    """`ckpt_prune_onnx.json`: of a folder, or, as `of` gives it, of one of its graphs."""

    version: Literal[2] = 2
    versions: dict[str, str]
    source: Source
    task: TaskName
    modality: Literal["text", "image"]
    cached: bool
    optimize: Provider | Literal["none"]
    files: dict[str, str]
    """File → its sha256: all but this record, the card and validation.json."""
    graphs: list[GraphEntry] = Field(min_length=1)
    """In the order they were asked for."""

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        return [("source", self.source.name), ("task", self.task), ("cached", self.cached), ("graphs", self.graphs)]

    def of(self, dtype: GraphType) -> "Manifest":
        """The record of one graph alone, with no files but its own and those that all share.

        Raises:
            UserError: there is none of that type.
        """
        chosen = [each for each in self.graphs if each.dtype == dtype]
        if not chosen:
            there = ", ".join(each.dtype for each in self.graphs)
            raise UserError(f"there is no graph of {dtype} in the folder, only {there}")
        others = {each.file for each in self.graphs if each.dtype != dtype}
        others |= {f"{name}{DATA}" for name in others}
        files = {name: digest for name, digest in self.files.items() if name not in others}
        return self.model_copy(update={"graphs": chosen, "files": files})

    @property
    def each(self) -> "list[Manifest]":
        """One record for each of its graphs."""
        return [self.of(entry.dtype) for entry in self.graphs]

    @property
    def entry(self) -> GraphEntry:
        """The graph, or the first one."""
        return self.graphs[0]

    @property
    def file(self) -> str:
        """Name of the graph."""
        return self.entry.file

    @property
    def dtype(self) -> GraphType:
        """Type of the graph."""
        return self.entry.dtype

    @property
    def opset(self) -> int:
        """Opset of the graph."""
        return self.entry.opset

    @property
    def inputs(self) -> list[Port]:
        """Inputs of the graph."""
        return self.entry.inputs

    @property
    def outputs(self) -> list[Port]:
        """Outputs of the graph."""
        return self.entry.outputs

    @property
    def tensors(self) -> dict[str, str]:
        """Initializers of the graph → sha256 of their bytes."""
        return self.entry.tensors

    @property
    def stock(self) -> bool:
        """Whether the graph has ONNX's own operators alone, which its checker knows."""
        return self.optimize == "none" and self.entry.quantised is None

    @property
    def what(self) -> Task:
        """What the graph is for."""
        return Task(self.task, self.modality, self.cached)

    @property
    def float_type(self) -> str:
        """The type of its floating-point inputs and outputs, as numpy names it."""
        return "float16" if self.dtype in ("fp16", "q4f16") else "float32"


def ports(values: Any) -> list[Port]:
    """Inputs or outputs of a graph of onnx_ir."""
    return [
        Port(
            name=value.name,
            type=value.dtype.numpy().name,
            shape=[size if isinstance(size, int) else str(size.value) for size in value.shape],
        )
        for value in values
    ]


def tensor_digests(graph: onnx_ir.Model) -> dict[str, str]:
    """Initializer → sha256 of its bytes."""
    return {
        name: hashlib.sha256(value.const_value.tobytes()).hexdigest()
        for name, value in graph.graph.initializers.items()
        if value.const_value is not None
    }


def runtime_versions() -> dict[str, str]:
    """Versions of all that makes and runs a graph."""
    return versions() | {
        "onnx": onnx.__version__,
        "onnxscript": onnxscript.__version__,
        "onnxruntime": onnxruntime.__version__,
    }


def read_manifest(folder: Path) -> Manifest:
    """The record of an exported folder.

    Raises:
        UserError: it is not one, or the record is damaged.
    """
    return read_record(
        folder / GRAPH_RECORD, Manifest, absent="it was not written by `ckpt-prune export`", damaged="export again"
    )


def read_record(path: Path, model: type[R], *, absent: str, damaged: str) -> R:
    """One of the JSON files of an exported folder.

    Args:
        path: of the file.
        model: what it holds.
        absent: what it means that it is not there.
        damaged: what is to be done where it is damaged.

    Raises:
        UserError: it is not there, or damaged.
    """
    try:
        return model.model_validate_json(read_input(path))
    except OSError as error:
        raise UserError(f"{path.parent} has no {path.name}: {absent}") from error
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {damaged}") from error
