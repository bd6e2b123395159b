"""Loaded models that can be timed on a workload, in PyTorch or in onnxruntime."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ckpt_prune.benchmarking.participants import Participant, Timing
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GRAPH_FILES, GraphType
from ckpt_prune.evaluation.device_map import spread
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.measure.streams.readout import allow_several_texts
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.session import OnnxModel, Provider, complete_inputs, next_cache
from ckpt_prune.onnx.tasks import PRESENT
from ckpt_prune.onnx.tracing import get_cache
from ckpt_prune.sparsity.zeros import count_zeros

_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs whose tensor cores know 2:4."""
_MULTIPLE = 64
"""The kernels for 2:4 take float16 matrices whose rows and columns are multiples of this."""


def load_runner(participant: Participant) -> "TorchRunner | OnnxRunner":
    return OnnxRunner(participant) if participant.runtime == "onnxruntime" else TorchRunner(participant)


class TorchTimer:
    """A model in PyTorch, in inference mode, on its device."""

    note = None

    def __init__(self, model: Any, device: torch.device) -> None:
        allow_several_texts(model)
        self._model, self._device, self.device = model, device, str(device)

    @torch.inference_mode()
    def time(self, workload: Workload) -> Timing:
        """Run a workload once. The choice of the next token is part of what is timed, as in onnxruntime."""
        inputs = {name: self._place(value) for name, value in workload.make_inputs().items()}
        flags = {"use_cache": workload.cached} if workload.generates else {}
        start = self._now()
        output = self._model(**inputs, **flags)
        if not workload.steps:
            return {workload.phase: [self._now() - start]}
        ids = output.logits[:, -1:].argmax(-1)
        first, steps = self._now() - start, []
        mask = inputs["attention_mask"]
        past: Any = cache_argument(self._model.forward)
        for _ in range(workload.steps):
            start = self._now()
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            output = self._model(input_ids=ids, attention_mask=mask, use_cache=True, **{past: get_cache(output)})
            ids = output.logits[:, -1:].argmax(-1)
            steps.append(self._now() - start)
        return {"prefill": [first], "decode": steps}

    def gpu_memory(self) -> int | None:
        """Most bytes that torch had allocated on the GPU."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def _place(self, value: Tensor) -> Tensor:
        return value.to(self._device, self._model.dtype if value.is_floating_point() else None)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


class TorchRunner(TorchTimer):
    """A checkpoint as transformers loads it, with packed weights or without turns if the runtime says so."""

    def __init__(self, participant: Participant) -> None:
        torch.set_num_threads(participant.threads)
        device = torch.device(participant.device)
        dtype = torch.float16 if participant.dtype == "fp16" else torch.float32
        with spread(participant.spread):
            folder, trust = Path(participant.folder), participant.trust
            super().__init__(load_model(folder, device=device, dtype=dtype, trust_remote_code=trust), device)
        if participant.runtime.startswith("PyTorch 2:4"):
            pack_two_four(self._model)
        if participant.runtime.endswith("unturned"):
            stop_turning(self._model)
        self._blocks = find_blocks(self._model) if participant.blocks else []

    def time(self, workload: Workload) -> Timing:
        timing = super().time(workload)
        return {**timing, "block": self._time_blocks(workload)} if self._blocks else timing

    @torch.inference_mode()
    def _time_blocks(self, workload: Workload) -> list[float]:
        """Run the workload once more, without a cache, and return the seconds of each block."""
        inputs = {name: self._place(value) for name, value in workload.make_inputs().items()}
        flags = {"use_cache": False} if workload.generates else {}
        began, seconds = [0.0], []
        with ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(block.register_forward_pre_hook(lambda *_: began.append(self._now())))
                stack.enter_context(block.register_forward_hook(lambda *_: seconds.append(self._now() - began[-1])))
            self._model(**inputs, **flags)
        return seconds


class GraphTimer:
    """A graph that is loaded in onnxruntime.

    On the CPU it is called with arrays, as deployments do; binding every key and value by name took longer (measured:
    0.75 instead of 0.65 ms a step with 12 of them). On a GPU keys and values are bound there, so that they do not
    travel between steps; the other inputs come from the CPU and the other outputs, logits among them, go to it.
    """

    def __init__(self, model: OnnxModel, gpu: int = 0) -> None:
        self._model, self._gpu = model, gpu
        self._run = self._call if model.session.provider == "cpu" else self._run_bound

    def time(self, workload: Workload) -> Timing:
        inputs = workload.make_inputs()
        feed = inputs
        if workload.modality == "text":
            feed = complete_inputs(inputs) | self._model.empty_cache(workload.batch)
        arrays = self._model.to_arrays(feed)
        start = perf_counter()
        outputs = self._run(arrays, {})
        if not workload.steps:
            return {workload.phase: [perf_counter() - start]}
        ids = _choose_next(outputs)
        first, steps = perf_counter() - start, []
        mask = inputs["attention_mask"]
        for _ in range(workload.steps):
            start = perf_counter()
            mask = torch.cat([mask, mask[:, :1]], dim=1)
            arrays = self._model.to_arrays(complete_inputs({"input_ids": ids, "attention_mask": mask}))
            outputs = self._run(arrays, next_cache(outputs))
            ids = _choose_next(outputs)
            steps.append(perf_counter() - start)
        return {"prefill": [first], "decode": steps}

    def gpu_memory(self) -> int | None:
        """Unknown: onnxruntime does not say."""
        return None

    def _call(self, arrays: dict[str, Any], past: dict[str, Any]) -> dict[str, Any]:
        values = self._model.session.inner.run(None, arrays | past)
        return dict(zip(self._model.outputs, values, strict=True))

    def _run_bound(self, arrays: dict[str, Any], past: dict[str, Any]) -> dict[str, Any]:
        """Outputs as onnxruntime's values; keys and values stay on the device."""
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


class OnnxRunner(GraphTimer):
    """A graph in onnxruntime, in a process of its own."""

    def __init__(self, participant: Participant) -> None:
        torch.set_num_threads(1)  # it only makes inputs
        device = torch.device(participant.device)
        provider: Provider = "cuda" if device.type == "cuda" else "cpu"
        gpu, folder, file = device.index or 0, Path(participant.folder), GRAPH_FILES[participant.dtype]
        super().__init__(OnnxModel(folder, file, provider=provider, threads=participant.threads, device=gpu), gpu)
        session = self._model.session
        self.device = participant.device if session.provider == provider else session.provider
        self.note = session.note


def _choose_next(outputs: dict[str, Any]) -> Tensor:
    """Return the most likely next token of each text, (B, 1), by the first output."""
    first = next(iter(outputs.values()))
    logits = first if isinstance(first, np.ndarray) else first.numpy()
    return torch.from_numpy(logits[:, -1:].argmax(-1))


def why_not_two_four(checkpoint: Checkpoint, device: str, dtype: GraphType | None) -> str | None:
    """Return why a checkpoint is not timed by torch's kernels for 2:4; None if it is.

    Its linear weights are read until one holds the pattern.
    """
    kind = torch.device(device)
    if kind.type != "cuda":
        return f"torch's kernels for 2:4 run on NVIDIA GPUs alone, and this is {device}"
    if torch.cuda.get_device_capability(kind) < _CAPABILITY:
        return f"{device} has no kernels for 2:4: its compute capability is below {'.'.join(map(str, _CAPABILITY))}"
    if dtype != "fp16":
        return "torch's kernels for 2:4 compute in fp16: say --dtype fp16"
    matrices = (name for name, info in checkpoint.tensors.items() if len(info.shape) == 2 and _fits(info.shape))
    if not any(_holds_two_four(checkpoint.read([name])[name]) for name in matrices):
        return "none of its weights holds 2:4"
    return None


def pack_two_four(module: nn.Module, pack: Callable[[Tensor], Tensor] = torch.sparse.to_sparse_semi_structured) -> int:
    """Pack the weights of a model's linear modules that hold 2:4, in place, and return how many there are."""
    count = 0
    for linear in module.modules():
        if not isinstance(linear, nn.Linear) or not _fits(tuple(linear.weight.shape)):
            continue
        if _holds_two_four(linear.weight.detach().cpu()):
            linear.weight = nn.Parameter(pack(linear.weight.detach().contiguous()), requires_grad=False)
            count += 1
    return count


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: of the lists of modules that are in no other, those of the one with most weights.

    Raises UserError if it has no such list.
    """
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    inner = {id(inside) for each in lists for inside in each.modules() if inside is not each}
    outer = [each for each in lists if id(each) not in inner]
    if not outer:
        raise UserError(f"{type(module).__name__} has no list of blocks to time")
    blocks = max(outer, key=lambda each: sum(weight.numel() for weight in each.parameters()))
    return list(blocks)


def stop_turning(module: nn.Module) -> None:
    """Take out the matrices that turn the residual stream as it enters and leaves blocks."""
    for each in module.modules():
        for side in ("entry_rotation", "exit_rotation"):
            if hasattr(each, side):
                setattr(each, side, None)


def _fits(shape: tuple[int, ...]) -> bool:
    return all(size % _MULTIPLE == 0 for size in shape)


def _holds_two_four(weight: Tensor) -> bool:
    return count_zeros("", weight).holds("2:4")
