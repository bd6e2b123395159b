"""onnxruntime-genai, with the graph that genai_config.json names."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime_genai

from ckpt_prune.runtimes.task import Array, RuntimeAnswer, RuntimeTask, compute


def run(task: RuntimeTask) -> RuntimeAnswer:
    model = onnxruntime_genai.Model(task.folder)

    def generator(prompt: Array) -> Any:
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=task.windows.shape[1] + 1, do_sample=False)
        new_generator = onnxruntime_genai.Generator(model, parameters)
        new_generator.append_tokens(prompt.astype(np.int32))
        return new_generator

    def logits_of(ids: Array) -> Array:
        logits: Array = generator(ids).get_output("logits")[0]
        return logits

    def steps(prompt: Array) -> Iterator[int]:
        running = generator(prompt)
        while True:
            # Greedily, and past the end of the text: what is timed is a number of tokens.
            logits = running.get_output("logits")[0, -1]
            token = int(logits.argmax())
            yield token
            running.append_tokens(np.array([token], np.int32))

    tokenizer = onnxruntime_genai.Tokenizer(model)
    tokens = [[int(index) for index in tokenizer.encode(text)] for text in task.texts]
    return replace(compute(task, logits_of, steps), tokens=tokens)
