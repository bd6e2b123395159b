"""OpenVINO, which reads the exported ONNX graph in float32 and makes its own of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from ckpt_prune.runtimes.task import Array, RuntimeAnswer, RuntimeTask, compute

_PAST, _PRESENT = "past_key_values.", "present."


def run(task: RuntimeTask) -> RuntimeAnswer:
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": task.threads, "KV_CACHE_PRECISION": "f32"}
    model = openvino.Core().compile_model(Path(task.folder) / "model.onnx", "CPU", hints)
    shapes = {port.any_name: port.partial_shape for port in model.inputs}
    empty = {
        name: np.zeros((1, shape[1].get_length(), 0, shape[3].get_length()), np.float32)
        for name, shape in shapes.items()
        if name.startswith(_PAST)
    }

    def call(ids: Array, past: dict[str, Array]) -> dict[str, Array]:
        seen = next(iter(past.values())).shape[2] if past else 0
        feed: dict[str, Any] = {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, seen + len(ids)), np.int64),
            "position_ids": np.arange(seen, seen + len(ids))[None],
        }
        outputs = model({name: value for name, value in feed.items() if name in shapes} | past)
        return {port.any_name: np.array(value) for port, value in outputs.items()}

    def steps(prompt: Array) -> Iterator[int]:
        ids, past = prompt, empty
        while True:
            outputs = call(ids, past)
            ids = outputs["logits"][0, -1:].argmax(-1)
            yield int(ids[0])
            past = {name: outputs[_PRESENT + name.removeprefix(_PAST)] for name in empty}

    return compute(task, lambda ids: call(ids, empty)["logits"][0], steps)
