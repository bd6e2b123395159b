"""The records of an exported folder: `ckpt_prune_onnx.json`, what it is, and `validation.json`, what it computes."""

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import onnx
import onnx_ir
import onnxruntime
import onnxscript
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_RECORD, VALIDATION
from ckpt_prune.common.graph_types import GraphStack, GraphType
from ckpt_prune.common.versions import versions
from ckpt_prune.evaluation.quality import judge
from ckpt_prune.job.report import Loss
from ckpt_prune.onnx.session import DATA, Provider
from ckpt_prune.onnx.tasks import GraphTask
from ckpt_prune.onnx.writing import get_bytes
from ckpt_prune.options.graphs import TaskName

R = TypeVar("R", bound=BaseModel)

# ---- what a folder is ----------------------------------------------------------------------------------------------


class Port(BaseModel):
    """An input or output of the graph: its type as numpy names it; dynamic axes of its shape have names."""

    name: str
    type: str
    shape: list[int | str]


class GraphSource(BaseModel):
    """The checkpoint a graph was made from."""

    name: str
    fingerprint: str


class KeptWeight(BaseModel):
    """A weight that is stored in more bits than most, since it costs too much in few."""

    name: str
    harm: float
    """Loss of the outputs if it alone is in few bits; its share by bytes if several were measured at once."""
    at_once: int = 1
    """How many weights were measured at once, itself included."""


class Quantization(BaseModel):
    """How the weights of a graph are rounded."""

    scheme: Literal["blocks", "dynamic", "static"]
    """Weights in blocks; or weights and inputs in int8, ranges of inputs taken at each call or once for all."""
    bits: Literal[4, 8]
    block_size: int
    symmetric: bool
    accuracy_level: int
    rounding: Literal["nearest", "gptq"]
    weights: dict[str, int]
    """How weights are stored (`4-bit blocks`, `8-bit blocks`, `int8`) → how many are."""
    padded: int
    """Weights whose last blocks are padded with zeros, since the block size does not divide their inputs."""
    kept: list[KeptWeight]
    """The most harmful by the byte first."""
    loss: float | None
    """Loss of the outputs with this choice, on the data that weights were chosen by; None if it was not measured."""
    allowed: float
    unit: Literal["KL", "energy"] = "KL"
    """Unit of both: nats of each prediction, or a share of the features' energy."""
    measured_on: str

    @property
    def kinds(self) -> dict[str, int]:
        """`weights`, with the size of their blocks in all names: `4-bit blocks of 32`."""
        usual = f" of {self.block_size}"
        return {f"{kind}{usual * kind.endswith('blocks')}": count for kind, count in self.weights.items()}


class GraphEntry(BaseModel):
    """One graph of a folder."""

    file: str
    """Its name; weights may be in a file beside it that is called the same with `_data` at its end."""
    dtype: GraphType
    stack: GraphStack | None = None
    """Of an encoder-decoder, the stack that it computes."""
    opset: int
    inputs: list[Port]
    outputs: list[Port]
    tensors: dict[str, str]
    """Initializer of the graph → sha256 of its bytes."""
    quantization: Quantization | None = Field(validation_alias=AliasChoices("quantization", "quantised"))

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [("file", self.file), ("dtype", self.dtype), ("opset", self.opset)]


class Manifest(BaseModel):
    """`ckpt_prune_onnx.json`: of a folder, or, as `select` and `split` give it, of one of its graphs."""

    version: Literal[2] = 2
    versions: dict[str, str]
    source: GraphSource
    task: TaskName
    modality: Literal["text", "image", "pairs"]
    cached: bool
    optimize: Provider | Literal["none"]
    files: dict[str, str]
    """File → its sha256: all but this record, the card and validation.json."""
    graphs: list[GraphEntry] = Field(min_length=1)

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [("source", self.source.name), ("task", self.task), ("cached", self.cached), ("graphs", self.graphs)]

    def select(self, dtype: GraphType) -> "Manifest":
        """Return the record of the graphs of one type alone: one, or those of two stacks."""
        entries = [entry for entry in self.graphs if entry.dtype == dtype]
        if not entries:
            types = ", ".join(entry.dtype for entry in self.graphs)
            raise UserError(f"there is no graph of {dtype} in the folder, only {types}")
        return self._of(entries)

    def _of(self, entries: list[GraphEntry]) -> "Manifest":
        """Return the record of some graphs, with no files but their own and those that all share."""
        others = {entry.file for entry in self.graphs if entry not in entries}
        others |= {f"{name}{DATA}" for name in others}
        files = {name: digest for name, digest in self.files.items() if name not in others}
        return self.model_copy(update={"graphs": entries, "files": files})

    def split(self) -> "list[Manifest]":
        """Return the record of each graph."""
        return [self._of([entry]) for entry in self.graphs]

    def split_by_type(self) -> "list[Manifest]":
        """Return the record of the graphs of each type."""
        return [self.select(dtype) for dtype in dict.fromkeys(entry.dtype for entry in self.graphs)]

    @property
    def graph(self) -> GraphEntry:
        return self.graphs[0]

    @property
    def file(self) -> str:
        return self.graph.file

    @property
    def dtype(self) -> GraphType:
        return self.graph.dtype

    @property
    def inputs(self) -> list[Port]:
        return self.graph.inputs

    @property
    def outputs(self) -> list[Port]:
        return self.graph.outputs

    @property
    def is_rounded(self) -> bool:
        return self.graph.quantization is not None

    @property
    def is_stock(self) -> bool:
        """Whether the graph has ONNX's own operators alone, which its checker knows."""
        return self.optimize == "none" and not self.is_rounded

    @property
    def full_task(self) -> GraphTask:
        shapes = [port.shape for graph in self.graphs for port in graph.inputs if port.name == "pixel_values"]
        sizes = [size for size in shapes[0][2:] if isinstance(size, int)] if shapes else []
        image = (sizes[0], sizes[1]) if len(sizes) == 2 else None
        return GraphTask(self.task, self.modality, self.cached, image=image)

    @property
    def float_type(self) -> str:
        """The type of floating-point inputs and outputs, as numpy names it."""
        return "float16" if self.dtype in ("fp16", "q4f16") else "float32"


def describe_ports(values: Any) -> list[Port]:
    """Inputs or outputs of a graph of onnx_ir."""
    return [
        Port(
            name=value.name,
            type=value.dtype.numpy().name,
            shape=[size if isinstance(size, int) else str(size.value) for size in value.shape],
        )
        for value in values
    ]


def hash_tensors(graph: onnx_ir.Model) -> dict[str, str]:
    """Initializer → sha256 of its bytes."""
    return {
        name: hashlib.sha256(get_bytes(value.const_value)).hexdigest()
        for name, value in graph.graph.initializers.items()
        if value.const_value is not None
    }


def runtime_versions() -> dict[str, str]:
    """Versions of all that makes and runs a graph."""
    modules = {"onnx": onnx, "onnxscript": onnxscript, "onnxruntime": onnxruntime}
    return versions() | {name: module.__version__ for name, module in modules.items()}


# ---- what its graphs compute ---------------------------------------------------------------------------------------

CheckName = Literal["files", "checker", "interface", "range", "load", "outputs", "generation", "metric"]
Padding = Literal["none", "left", "right"]


class ProofCheck(BaseModel):
    """One check: passed is None if it could not be made."""

    name: CheckName
    passed: bool | None
    detail: str


class OutputPlace(BaseModel):
    """An element of an output, and its value on both sides (None: no finite number)."""

    batch: int
    token: int | None
    """Number of the token, padding counted, or of the image's patch. None if outputs are of a whole text or image."""
    unit: int
    """Vocabulary entry, class or dimension; of keys and values, head x head_dim + dimension."""
    onnxruntime: float | None
    pytorch: float | None


class Case(BaseModel):
    """One output for one input. Figures are None if they are infinite, or if there is no output to compare."""

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
    """Share of texts, tokens or images for which both put the same token or class first; None for other outputs."""
    passed: bool
    where: OutputPlace | None = None
    """The largest difference of a failed case."""
    note: str | None = None
    """The reason why a case failed, if it is not an inexact number."""


class Metric(BaseModel):
    """One figure in both runtimes."""

    name: str
    """perplexity, masked perplexity, top-1, agreement or cosine."""
    onnxruntime: float | None
    """None if it overflows."""
    against: str | None = None
    """The other model that PyTorch's figure is of, a dense one. None: the graph's own."""
    pytorch: float | None
    """None also of agreement and cosine, which are of both at once."""
    of: str
    """The data that it was measured on."""
    difference: float | None
    """The number that is compared with the tolerance; None if it overflows.

    Perplexities: of the mean negative log-likelihoods, in nats per token. Top-1 and agreement: share of the images, or
    of a text's predictions, that the two put into different classes. Cosine: relative error of the features. Of a graph
    that is rounded, what is lost: of a perplexity the share it grows by, of top-1 what it falls by, of agreement and
    cosine what is missing to 1.
    """
    kl: float | None = None
    """Mean KL(PyTorch ‖ onnxruntime) in nats of each prediction; None if there are no classes."""
    same: float | None = None
    """Share of the predictions for which both put the same class or token first."""
    tolerance: float | None
    """The most that passes; None if it is only measured. Top-1 and agreement: share of the images that the two put
    into different classes which PyTorch itself has nearer than two errors that pass, so that either may come first."""
    passed: bool
    windows: int | None = None
    """How many windows of text it was measured on; None of images."""

    def loss(self, source: str, data: str) -> Loss:
        """Return what is lost beside a model: the other one, or the graph's own, which `source` names."""
        values: dict[str, Any] = {"of": self.name, "after": self.onnxruntime, "before": self.pytorch}
        if self.name == "agreement":
            values = {"of": self.name}
        elif self.name == "top-1":
            values["of"] = "top-1 accuracy"
        elif self.name == "cosine":
            values["of"] = "cosine of the embeddings" if "embedding" in self.of else "cosine of the features"
        return judge(
            Loss(
                **values,
                kl=self.kl,
                agreement=self.onnxruntime if self.name == "agreement" else self.same,
                windows=self.windows,
                data=f"{self.of} of {data}",
                against=self.against or source,
            )
        )


class Continuation(BaseModel):
    """The words of both after a prompt, each taking its own likeliest token.

    `tokens` is how many each generates, `same` how many are the same before the first that is not.
    """

    prompt: str
    onnxruntime: str
    pytorch: str
    tokens: int
    same: int


class Validation(BaseModel):
    """The proof of one graph."""

    file: str
    passed: bool
    provider: Provider
    note: str | None
    """Why that is not the provider that was asked for."""
    dtype: GraphType
    tolerance: float | None
    """In units of the largest output of a case; means are held to a tenth of it. None of a graph that is rounded."""
    max_loss: float | None
    """Allowed loss of the task's metric, for a rounded graph; None for others."""
    against: GraphSource
    data: dict[str, Any]
    checks: list[ProofCheck]
    cases: list[Case]
    metrics: list[Metric]
    continuations: list[Continuation]
    """Continued texts, for a rounded graph that generates text."""
    versions: dict[str, str]
    files: dict[str, str]
    """The files that were validated: name → sha256."""

    def losses(self) -> list[Loss]:
        """Return what is lost beside the graph's own model and beside each other one."""
        return [metric.loss(self.against.name, str(self.data.get("what"))) for metric in self.metrics]

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        failed = sum(not case.passed for case in self.cases)
        shown = {name: getattr(self, name) for name in ("file", "passed", "provider", "dtype")}
        return [*shown.items(), ("cases", len(self.cases)), ("failed", failed)]


class Validations(BaseModel):
    """`validation.json`."""

    version: Literal[2] = 2
    passed: bool
    graphs: list[Validation]

    @classmethod
    def of(cls, graphs: list[Validation]) -> "Validations":
        return cls(passed=all(graph.passed for graph in graphs), graphs=graphs)

    def write(self, folder: Path) -> None:
        write_atomically(folder / VALIDATION, self.model_dump_json(indent=2) + "\n")


# ---- reading them --------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    return _read(folder / GRAPH_RECORD, Manifest, "it was not written by `ckpt-prune export`", "export again")


def read_validation(folder: Path) -> Validations:
    """Return the record of an exported folder's last validation."""
    return _read(folder / VALIDATION, Validations, "`ckpt-prune validate` writes it", "validate again")


def _read(path: Path, model: type[R], absent: str, damaged: str) -> R:
    try:
        return model.model_validate_json(read_input(path))
    except OSError as error:
        raise UserError(f"{path.parent} has no {path.name}: {absent}") from error
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {damaged}") from error
