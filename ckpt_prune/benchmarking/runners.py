"""A loaded model that can be timed on a workload, in PyTorch or in onnxruntime."""

from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ckpt_prune.benchmarking.messages import Runtime, Seat, Timing
from ckpt_prune.benchmarking.two_four import pack
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.evaluation.device_map import spread
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.streams.readout import allow_several_texts
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.session import FILES, OnnxModel, Provider, complete, next_cache
from ckpt_prune.onnx.tasks import PRESENT
from ckpt_prune.onnx.tracing import returned_cache


class Runner(Protocol):
    """A loaded model.

    Attributes:
        device: where it runs.
        note: why that is not what was asked for.
    """

    device: str
    note: str | None

    def time(self, workload: Workload) -> Timing:
        """Run a workload once."""

    def gpu_memory(self) -> int | None:
        """Most bytes that were allocated on the GPU, where that is known."""


class TorchTimer:
    """A model in PyTorch, in inference mode.

    Args:
        model: on its device.
        device: which.
    """

    note = None

    def __init__(self, model: Any, device: torch.device) -> None:
        allow_several_texts(model)
        self._model, self._device, self.device = model, device, str(device)

    @torch.inference_mode()
    def time(self, workload: Workload) -> Timing:
        """Run a workload once. The choice of the next token is part of what is timed, as in onnxruntime."""
        inputs = {name: self._placed(value) for name, value in workload.inputs().items()}
        flags = {"use_cache": workload.cached} if workload.generates else {}
        start = self._now()
        result = self._model(**inputs, **flags)
        if not workload.steps:
            return {workload.phase: [self._now() - start]}
        ids = result.logits[:, -1:].argmax(-1)
        first, steps = self._now() - start, []
        mask = inputs["attention_mask"]
        past: Any = cache_argument(self._model.forward)
        for _ in range(workload.steps):
            start = self._now()
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            result = self._model(input_ids=ids, attention_mask=mask, use_cache=True, **{past: returned_cache(result)})
            ids = result.logits[:, -1:].argmax(-1)
            steps.append(self._now() - start)
        return {"prefill": [first], "decode": steps}

    def gpu_memory(self) -> int | None:
        """Most bytes that torch had allocated on the GPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self._device, self._model.dtype if value.is_floating_point() else None)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def timer_of(model: nn.Module, device: torch.device) -> TorchTimer:
    """A model that is in memory, moved to a device."""
    return TorchTimer(model.to(device), device)


class TorchRunner(TorchTimer):
    """A checkpoint as transformers loads it.

    Args:
        seat: what to load.

    Raises:
        UserError: it does not load.
    """

    def __init__(self, seat: Seat) -> None:
        torch.set_num_threads(seat.threads)
        device = torch.device(seat.device)
        dtype = torch.float16 if seat.dtype == "fp16" else torch.float32
        with spread(seat.spread):
            folder, trust = Path(seat.folder), seat.trust
            super().__init__(load_model(folder, device=device, dtype=dtype, trust_remote_code=trust), device)


class TwoFourRunner(TorchRunner):
    """The same, with weights that hold 2:4 packed for torch's semi-structured kernels.

    Args:
        seat: what to load.

    Raises:
        UserError: it does not load.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        pack(self._model)


class OnnxRunner:
    """A graph in onnxruntime.

    On the CPU it is called with arrays, as deployments do; binding every key and value by name took longer (measured:
    0.75 instead of 0.65 ms a step with 12 of them). On a GPU keys and values are bound there, so that they do not
    travel between steps; the other inputs come from the CPU and the other outputs, logits among them, go to it.

    Args:
        seat: what to load.

    Raises:
        UserError: onnxruntime cannot load it.
    """

    def __init__(self, seat: Seat) -> None:
        torch.set_num_threads(1)  # it only makes inputs
        device = torch.device(seat.device)
        provider: Provider = "cuda" if device.type == "cuda" else "cpu"
        self._gpu = device.index or 0
        self._model = OnnxModel(
            Path(seat.folder), FILES[seat.dtype], provider=provider, threads=seat.threads, device=self._gpu
        )
        session = self._model.session
        self.device = seat.device if session.provider == provider else session.provider
        self.note = session.note
        self._run = self._called if session.provider == "cpu" else self._bound

    def time(self, workload: Workload) -> Timing:
        """Run a workload once."""
        inputs = workload.inputs()
        feed = inputs
        if workload.modality == "text":
            feed = complete(inputs) | self._model.empty_cache(workload.batch)
        arrays = self._model.arrays(feed)
        start = perf_counter()
        result = self._run(arrays, {})
        if not workload.steps:
            return {workload.phase: [perf_counter() - start]}
        ids = _next(result)
        first, steps = perf_counter() - start, []
        mask = inputs["attention_mask"]
        for _ in range(workload.steps):
            start = perf_counter()
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            arrays = self._model.arrays(complete({"input_ids": ids, "attention_mask": mask}))
            result = self._run(arrays, next_cache(result))
            ids = _next(result)
            steps.append(perf_counter() - start)
        return {"prefill": [first], "decode": steps}

    def gpu_memory(self) -> int | None:
        """Unknown: onnxruntime does not say."""
        return None

    def _called(self, arrays: dict[str, Any], past: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name, arrays all of them."""
        values = self._model.session.inner.run(None, arrays | past)
        return dict(zip(self._model.outputs, values, strict=True))

    def _bound(self, arrays: dict[str, Any], past: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name as onnxruntime's values; keys and values stay on the device."""
        session = self._model.session.inner
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        for name, value in past.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._model.outputs:
            if name.startswith(PRESENT):
                binding.bind_output(name, self._model.session.provider, self._gpu)
            else:
                binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        return dict(zip(self._model.outputs, binding.get_outputs(), strict=True))


def _next(result: dict[str, Any]) -> Tensor:
    """The most likely next token of each text, (B, 1), by the first output."""
    first = next(iter(result.values()))
    logits = first if isinstance(first, np.ndarray) else first.numpy()
    return torch.from_numpy(logits[:, -1:].argmax(-1))


RUNNERS: dict[Runtime, Any] = {"PyTorch": TorchRunner, "onnxruntime": OnnxRunner, "PyTorch 2:4": TwoFourRunner}
