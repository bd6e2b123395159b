"""Tasks for runtimes, and their answers. `run(task)` of every module here returns an answer."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class RuntimeTask:
    """Windows of tokens to run an output on.

    Attributes:
        folder: that the runtime loads.
        windows: token ids, (windows, length), int64.
        positions: after how many tokens of a window the next one is predicted.
        generate: tokens to generate, to be timed.
        threads: of the processor.
        texts: that the runtime's own tokenizer is to split, if it has one.
    """

    folder: str
    windows: Array
    positions: list[int]
    generate: int
    threads: int
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RuntimeAnswer:
    """The answer of a runtime.

    Attributes:
        logs: log-probabilities of the next token, (windows, positions, vocabulary), float32.
        read: tokens a second of a prompt.
        generated: tokens a second of generation.
        memory: the most bytes that it took, if it ran in another process than the task.
        tokens: ids of the task's texts by the runtime's own tokenizer; None if it has none.
    """

    logs: Array
    read: float
    generated: float
    memory: int = 0
    tokens: list[list[int]] | None = None


def log_softmax(logits: Array) -> Array:
    """Return log-probabilities over the last axis, float32."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    logs: Array = (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)
    return logs


def compute(
    task: RuntimeTask, logits_of: Callable[[Array], Array], steps: Callable[[Array], Iterator[int]]
) -> RuntimeAnswer:
    """Run a model on the windows, and time it.

    Args:
        logits_of: token ids, (length,) → logits, (length, vocabulary).
        steps: a prompt, (length,) → the tokens that follow it, greedily, as many as are taken. Making the first reads
            the prompt.
    """
    places = [position - 1 for position in task.positions]
    logs = np.stack([log_softmax(logits_of(window[:-1])[places]) for window in task.windows])
    prompt = task.windows[0][: task.windows.shape[1] - task.generate]
    tokens = steps(prompt)
    start = time.perf_counter()
    next(tokens)
    first = time.perf_counter()
    for _ in range(task.generate - 1):
        next(tokens)
    end = time.perf_counter()
    return RuntimeAnswer(logs, len(prompt) / (first - start), max(task.generate - 1, 1) / max(end - first, 1e-9))
