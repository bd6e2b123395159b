"""transformers itself, by its Auto class and the code that the folder carries."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ckpt_prune.common.errors import UserError
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.tracing import get_cache
from ckpt_prune.runtimes.task import Array, RuntimeAnswer, RuntimeTask, compute


def run(task: RuntimeTask) -> RuntimeAnswer:
    torch.set_num_threads(task.threads)
    vars(torch)["load"] = _refuse_pickle  # of an adapter that lies there it would read a .bin file
    model = AutoModelForCausalLM.from_pretrained(
        task.folder, trust_remote_code=True, dtype=torch.float32, use_safetensors=True
    ).eval()

    def logits_of(ids: Array) -> Array:
        logits: Array = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
        return logits

    def steps(prompt: Array) -> Iterator[int]:
        ids = torch.from_numpy(prompt)[None]
        past: Any = cache_argument(model.forward)
        output = model(ids, use_cache=True)
        while True:
            ids = output.logits[:, -1:].argmax(-1)
            yield int(ids)
            output = model(ids, use_cache=True, **{past: get_cache(output)})

    with torch.inference_mode():
        return compute(task, logits_of, steps)


def _refuse_pickle(file: Any, *_: Any, **__: Any) -> Any:
    raise UserError(f"{file} is a pickle, which is never read: store it as safetensors")
