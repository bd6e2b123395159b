"""What an exported folder says of itself."""

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import onnx
import onnx_ir
import onnxruntime
import onnxscript
from pydantic import BaseModel, ValidationError

from ckpt_prune.checkpoint.inputs import read_input
from ckpt_prune.errors import UserError
from ckpt_prune.exporting.session import Provider
from ckpt_prune.exporting.tasks import Task
from ckpt_prune.filenames import GRAPH_RECORD
from ckpt_prune.planning.export_recipe import TaskName
from ckpt_prune.versions import versions

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


class Manifest(BaseModel):
    """`ckpt_prune_onnx.json`."""

    version: Literal[1] = 1
    versions: dict[str, str]
    source: Source
    task: TaskName
    modality: Literal["text", "image"]
    cached: bool
    dtype: Literal["fp32", "fp16"]
    opset: int
    optimize: Provider | Literal["none"]
    inputs: list[Port]
    outputs: list[Port]
    files: dict[str, str]
    """File → its sha256: all but this record, the card and validation.json."""
    tensors: dict[str, str]
    """Initializer of the graph → sha256 of its bytes."""

    @property
    def what(self) -> Task:
        """What the graph is for."""
        return Task(self.task, self.modality, self.cached)

    @property
    def float_type(self) -> str:
        """The type of its floating-point inputs and outputs, as numpy names it."""
        return "float16" if self.dtype == "fp16" else "float32"


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
