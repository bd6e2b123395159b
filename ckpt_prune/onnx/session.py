"""Running an exported graph in onnxruntime, as the model it came from."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import onnx_ir
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.graph_types import GRAPH_FILES
from ckpt_prune.common.memory import return_freed_memory
from ckpt_prune.evaluation.whole_model import config_of
from ckpt_prune.onnx.tasks import PAST, PRESENT

T = TypeVar("T")

DATA = "_data"
"""Ending of external data: the weights, if the graph's file would come near protobuf's limit of 2 GB with them."""

Provider = Literal["cpu", "cuda"]
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_NO_CUDA = "CUDA was asked for and onnxruntime cannot load it here (no GPU, or not the CUDA libraries it was built for)"
_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


def default_provider(optimize: Literal["cpu", "cuda", "none"]) -> Provider:
    """Return the device that a graph runs on by default: the one that it is fused for, else the CPU."""
    return "cpu" if optimize == "none" else optimize


@dataclass(frozen=True)
class Session:
    """An open graph; `note` says why it runs on another provider than was asked for."""

    inner: Any
    provider: Provider
    note: str | None


def open_session(graph: Path, *, provider: Provider = "cpu", threads: int | None = None, device: int = 0) -> Session:
    """Load a graph into onnxruntime. If CUDA is asked for and cannot be loaded, the CPU is used and `note` says so.

    Args:
        graph: an ONNX file; external data lies beside it.
        threads: of one operator; by default as many as torch uses, which heeds the cores this process may run on.
    """
    threads = threads or torch.get_num_threads()
    note = None
    if provider == "cuda":
        # It would otherwise multiply float32 matrices with ten bits of mantissa, which PyTorch does not.
        cuda = (_PROVIDERS["cuda"], {"use_tf32": "0", "device_id": str(device)})
        built_in = _PROVIDERS["cuda"] in onnxruntime.get_available_providers()
        session = _load(graph, threads, [cuda, _PROVIDERS["cpu"]]) if built_in else "not built in"
        if not isinstance(session, str) and _PROVIDERS["cuda"] in session.get_providers():
            return Session(session, "cuda", None)
        note = _NO_CUDA
    session = _load(graph, threads, [_PROVIDERS["cpu"]])
    if isinstance(session, str):
        raise UserError(f"{graph}: onnxruntime cannot load it: {session}{f'; {note}' if note else ''}")
    return Session(session, "cpu", None if note is None else f"{note}: it runs on the CPU")


def _load(graph: Path, threads: int, providers: list[Any]) -> onnxruntime.InferenceSession | str:
    """Return a session, or say in one line why there is none."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Threads that spin while they wait take the cores from whoever else computes (measured: PyTorch beside it 1.7 times
    # slower); alone on the machine it costs 0 to 6 %.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    onnxruntime.set_default_logger_severity(4)
    try:
        # Its own way back to other providers prints on stdout and does not say what it runs on.
        return onnxruntime.InferenceSession(str(graph), options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime's exceptions share no base class
        return one_line(error)
    finally:
        onnxruntime.set_default_logger_severity(2)


class OnnxModel:
    """A graph that is called like the transformers model it came from.

    Args:
        folder: of the graph, with config.json.
        described: the folder with config.json, if that is another one.

    Attributes:
        inputs, outputs: names → onnxruntime's descriptions, in the graph's order.
        device: where outputs are: always the CPU.
        dtype: of the graph's floating-point outputs.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        folder: Path,
        file: str = GRAPH_FILES["fp32"],
        *,
        provider: Provider = "cpu",
        threads: int | None = None,
        device: int = 0,
        described: Path | None = None,
    ) -> None:
        self.config = config_of(folder if described is None else described)
        self.session = open_session(folder / file, provider=provider, threads=threads, device=device)
        self.inputs = {port.name: port for port in self.session.inner.get_inputs()}
        self.outputs = {port.name: port for port in self.session.inner.get_outputs()}
        self.dtype = next(_TYPES.get(port.type, torch.float32) for port in self.outputs.values())

    def eval(self) -> "OnnxModel":
        return self

    def close(self) -> None:
        """Free the graph's memory; it can be run no more."""
        # Descriptions of inputs and outputs hold the session, too.
        self.session, self.inputs, self.outputs = replace(self.session, inner=None), {}, {}
        return_freed_memory()

    @property
    def cached(self) -> bool:
        """Whether keys and values go in and out."""
        return any(name.startswith(PAST) for name in self.inputs)

    def empty_cache(self, batch: int) -> dict[str, Tensor]:
        """Keys and values of no tokens: `past_key_values.*`, (B, heads, 0, head_dim)."""
        return {
            name: torch.zeros([batch, port.shape[1], 0, port.shape[3]], dtype=_TYPES[port.type])
            for name, port in self.inputs.items()
            if name.startswith(PAST)
        }

    def to_arrays(self, feed: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
        """Arrays of the graph's types; what the graph has no input for is left out."""
        return {
            name: np.ascontiguousarray(value.to(_TYPES[self.inputs[name].type]).numpy())
            for name, value in feed.items()
            if name in self.inputs
        }

    def run(self, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the graph: inputs by name → outputs by name, on the CPU; what it has no input for is left out."""
        arrays = self.to_arrays(feed)
        try:
            values = self.session.inner.run(None, arrays)
        except Exception as error:  # onnxruntime's exceptions share no base class
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in list(arrays.items())[:4])
            raise UserError(f"onnxruntime cannot run the graph on {sizes}: {one_line(error)}") from error
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, values, strict=True)}

    def __call__(self, **inputs: Any) -> ModelOutput:
        """Run on whole texts or images, without earlier tokens.

        `input_ids` (B, T), completed by `complete_inputs`, or `pixel_values` (B, C, H, W). Others are left out.
        """
        feed = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if "input_ids" in feed:
            feed = complete_inputs(feed) | self.empty_cache(len(feed["input_ids"]))
        return ModelOutput(self.run(feed))


def open_graph(graph: Path, provider: Provider) -> PreTrainedModel:
    """Return a graph that is called like the model it came from, to be measured in the place of a checkpoint."""
    model = OnnxModel(graph.parent, graph.name, provider=provider)
    if not {"logits", "last_hidden_state"} & set(model.outputs):
        raise UserError(f"{graph} returns {', '.join(list(model.outputs)[:3])}: neither logits nor last_hidden_state")
    return cast(PreTrainedModel, model)


def complete_inputs(feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of text with all that a graph may ask for beside `input_ids`, (B, T) int64.

    By default the mask is all ones, positions are counted along it, and `token_type_ids` are zeros.
    """
    ids = feed["input_ids"]
    mask = feed.get("attention_mask", torch.ones_like(ids))
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return {"attention_mask": mask, "position_ids": positions, "token_type_ids": torch.zeros_like(ids)} | feed


def next_cache(outputs: Mapping[str, T]) -> dict[str, T]:
    """Return the keys and values that came out, named as what goes in next."""
    return {name.replace(PRESENT, PAST, 1): value for name, value in outputs.items() if name.startswith(PRESENT)}


def read_graph(path: Path) -> onnx_ir.Model:
    """Return a graph that may be damaged, or anybody's; its weights are read when they are asked for.

    onnx_ir's warnings are dropped: other checks find the same, and they hold names with control characters.
    """
    logger = logging.getLogger("onnx_ir")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return onnx_ir.load(path)
    except Exception as error:  # protobuf's and onnx_ir's exceptions share no base class
        raise UserError(f"{path.name} cannot be read: {one_line(error)}") from error
    finally:
        logger.setLevel(before)
