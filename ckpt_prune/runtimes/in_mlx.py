"""MLX-LM, which builds an output by the `model_file` that it carries."""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from ckpt_prune.runtimes.task import Array, RuntimeAnswer, RuntimeTask, compute


def run(task: RuntimeTask) -> RuntimeAnswer:
    model, _ = load_model(Path(task.folder), trust_remote_code=True)
    model.set_dtype(mx.float32)

    def logits_of(ids: Array) -> Array:
        return np.array(model(mx.array(ids)[None])[0].astype(mx.float32))

    def steps(prompt: Array) -> Iterator[int]:
        cache, ids = make_prompt_cache(model), mx.array(prompt)[None]
        while True:
            ids = model(ids, cache=cache)[:, -1:].argmax(-1)
            yield int(ids.item())

    return compute(task, logits_of, steps)
