"""Running an exported graph in onnxruntime, as the model it came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.utils.generic import ModelOutput

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.evaluation.whole_model import config_of
from ckpt_prune.onnx.apart import new_session
from ckpt_prune.onnx.tasks import PAST, PRESENT

T = TypeVar("T")

FILES: dict[GraphType, str] = {
    "fp32": "model.onnx",
    "fp16": "model_fp16.onnx",
    "int8": "model_int8.onnx",
    "int4": "model_q4.onnx",
    "q4f16": "model_q4f16.onnx",
}
"""Type → file, by the names that the Hub's ONNX models have."""
DATA = "_data"
"""Ending of external data: the weights, where the graph's file would come near protobuf's limit of 2 GB with them."""

Provider = Literal["cpu", "cuda"]
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_WHY = "onnxruntime cannot load it here (no GPU, or not the CUDA libraries it was built for)"
_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


def provider_for(optimize: Literal["cpu", "cuda", "none"]) -> Provider:
    """What a graph is run on where nothing else is said: what it is fused for, else the CPU."""
    return "cpu" if optimize == "none" else optimize


@dataclass(frozen=True)
class Session:
    """An open graph."""

    inner: Any
    """onnxruntime's InferenceSession, or what stands for it in another process (`apart`)."""
    provider: Provider
    """What it runs on."""
    note: str | None
    """Why that is not what was asked for."""


def open_session(graph: Path, *, provider: Provider = "cpu", threads: int | None = None, device: int = 0) -> Session:
    """Load a graph into onnxruntime.

    Args:
        graph: an ONNX file; external data lies beside it.
        provider: what to run it on. Where CUDA is asked for and cannot be loaded, the CPU is used and `note` says so.
        threads: of one operator; by default as many as torch uses, which heeds the cores this process may run on.
        device: number of the GPU.

    Raises:
        UserError: onnxruntime cannot load it.
    """
    own = threads or torch.get_num_threads()
    note = None
    if provider == "cuda":
        # It would otherwise multiply float32 matrices with ten bits of mantissa, which PyTorch does not.
        cuda = (_PROVIDERS["cuda"], {"use_tf32": "0", "device_id": str(device)})
        there = _PROVIDERS["cuda"] in _built_for()
        found = _load(graph, own, [cuda, _PROVIDERS["cpu"]]) if there else "not built in"
        if not isinstance(found, str) and _PROVIDERS["cuda"] in found.get_providers():
            return Session(found, "cuda", None)
        note = f"CUDA was asked for and {_WHY}"
    found = _load(graph, own, [_PROVIDERS["cpu"]])
    if isinstance(found, str):
        more = f"; {note}" if note else ""
        raise UserError(f"{graph}: onnxruntime cannot load it: {found}{more}")
    return Session(found, "cpu", None if note is None else f"{note}: it runs on the CPU")


def _built_for() -> list[str]:
    providers: list[str] = onnxruntime.get_available_providers()
    return providers


def _load(graph: Path, threads: int, providers: list[Any]) -> Any:
    """An InferenceSession, or in one line why there is none."""
    try:
        return new_session(graph, threads, providers)
    except Exception as error:  # onnxruntime's exceptions share no base class
        return " ".join(str(error).split())[:300] or type(error).__name__


class OnnxModel:
    """A graph that is called like the transformers model it came from.

    Args:
        folder: with config.json.
        file: the graph, in it.
        provider: what to run it on.
        threads: of one operator.
        device: number of the GPU.
        described: the folder with config.json, where that is another one.

    Attributes:
        config: of the model.
        session: the open graph.
        inputs, outputs: names to onnxruntime's descriptions, in the graph's order.
        device: where outputs are: always the CPU.
        dtype: of the graph's floating-point outputs.

    Raises:
        UserError: onnxruntime cannot load it.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        folder: Path,
        file: str = FILES["fp32"],
        *,
        provider: Provider = "cpu",
        threads: int | None = None,
        device: int = 0,
        described: Path | None = None,
    ) -> None:
        self.config = config_of(folder if described is None else described)
        self.session = open_session(folder / file, provider=provider, threads=threads, device=device)
        self.inputs = {each.name: each for each in self.session.inner.get_inputs()}
        self.outputs = {each.name: each for each in self.session.inner.get_outputs()}
        self.dtype = next(_TYPES.get(each.type, torch.float32) for each in self.outputs.values())

    def eval(self) -> "OnnxModel":
        """A graph is always in evaluation mode."""
        return self

    @property
    def cached(self) -> bool:
        """Whether keys and values go in and out."""
        return any(name.startswith(PAST) for name in self.inputs)

    def empty_cache(self, batch: int) -> dict[str, Tensor]:
        """Keys and values of no tokens: `past_key_values.*`, (B, heads, 0, head_dim)."""
        return {
            name: torch.zeros([batch, each.shape[1], 0, each.shape[3]], dtype=_TYPES[each.type])
            for name, each in self.inputs.items()
            if name.startswith(PAST)
        }

    def arrays(self, feed: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
        """What onnxruntime is given: arrays of the graph's types, of what it has inputs for."""
        return {
            name: np.ascontiguousarray(value.to(_TYPES[self.inputs[name].type]).numpy())
            for name, value in feed.items()
            if name in self.inputs
        }

    def run(self, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run the graph: inputs by name to outputs by name, on the CPU; what it has no input for is left out.

        Raises:
            UserError: onnxruntime fails.
        """
        arrays = self.arrays(feed)
        try:
            values = self.session.inner.run(None, arrays)
        except Exception as error:  # onnxruntime's exceptions share no base class
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in list(arrays.items())[:4])
            reason = " ".join(str(error).split())
            raise UserError(f"onnxruntime cannot run the graph on {sizes}: {reason[:300]}") from error
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, values, strict=True)}

    def __call__(self, **inputs: Any) -> ModelOutput:
        """Run on whole texts or images, without earlier tokens.

        Args:
            inputs: `input_ids` (B, T), with `attention_mask`, `position_ids`, `token_type_ids` where they are not all
                ones, counted along the mask, and zeros; or `pixel_values` (B, C, H, W). Others are left out.
        """
        feed = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if "input_ids" in feed:
            feed = complete(feed) | self.empty_cache(len(feed["input_ids"]))
        return ModelOutput(self.run(feed))


def complete(feed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of text with all that a graph may ask for beside `input_ids`, (B, T) int64."""
    ids = feed["input_ids"]
    mask = feed.get("attention_mask", torch.ones_like(ids))
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return {"attention_mask": mask, "position_ids": positions, "token_type_ids": torch.zeros_like(ids)} | feed


def next_cache(found: Mapping[str, T]) -> dict[str, T]:
    """The keys and values that came out, as what goes in next."""
    return {name.replace(PRESENT, PAST, 1): value for name, value in found.items() if name.startswith(PRESENT)}
