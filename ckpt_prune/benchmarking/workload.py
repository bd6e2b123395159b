"""Workloads that are timed: the same inputs for both models, made from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ckpt_prune.benchmarking.participants import Phase
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import config_of, read_config
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.records import Manifest
from ckpt_prune.onnx.tasks import choose_task
from ckpt_prune.onnx.tracing import get_image_size
from ckpt_prune.options.graphs import TaskName

TOKENS, STEPS = 128, 16
"""Default length of a text and of what is generated after it, if the context has room."""
SEED = 0


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model."""

    task: TaskName
    modality: Literal["text", "image"]
    vocabulary: int | None
    """Number of tokens it knows; None of a model of images."""
    context: int | None
    """Tokens it reads at most; None if its config sets no limit."""
    image: tuple[int, int, int] | None
    """Channels, height and width; None of a model of text."""
    cached: bool
    """Whether it keeps keys and values of earlier tokens, and its graph, if there is one, does too."""


@dataclass(frozen=True)
class Workload:
    """One batch, and what is done with it."""

    modality: Literal["text", "image"]
    batch: int
    tokens: int
    """The length of each text; 0 for images."""
    steps: int
    """Tokens generated after the text, each with the keys and values of all before it."""
    generates: bool
    cached: bool
    """Whether keys and values of the text are kept."""
    vocabulary: int
    """Tokens are below this; 0 for images."""
    image: tuple[int, int, int]
    seed: int = SEED

    @property
    def phase(self) -> Phase:
        """The phase that reads the whole batch."""
        return "prefill" if self.generates else "forward"

    @property
    def phases(self) -> tuple[Phase, ...]:
        return (self.phase, "decode") if self.steps else (self.phase,)

    def count_items(self, phase: Phase) -> int:
        """Tokens or images that one timing of a phase covers; decode is timed by the step."""
        return self.batch * (self.tokens if self.modality == "text" and phase != "decode" else 1)

    def make_inputs(self) -> dict[str, Tensor]:
        """Random inputs, the same in every process.

        Text: `input_ids` and a mask of ones, (B, T) int64. Images: `pixel_values`, (B, C, H, W) float32, normal.
        """
        generator = torch.Generator().manual_seed(self.seed)
        if self.modality == "image":
            return {"pixel_values": torch.randn(self.batch, *self.image, generator=generator)}
        ids = torch.randint(self.vocabulary, (self.batch, self.tokens), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def read_model_inputs(folder: Path, manifest: Manifest | None = None, *, trust: bool = False) -> ModelInputs:
    """Return the inputs of a model by its config, or of an exported folder by the record of its graph."""
    task = choose_task(read_config(folder), folder=folder) if manifest is None else manifest.full_task
    if task.modality == "pairs":
        raise UserError(f"{folder} is an encoder-decoder: benchmark takes models with one stack of blocks alone")
    config = config_of(folder, trust=trust)
    if task.modality == "image":
        size = (int(getattr(config, "num_channels", 3)), *get_image_size(config, task))
        return ModelInputs(task.name, "image", vocabulary=None, context=None, image=size, cached=False)
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise UserError(f"{folder}: config.json has no vocab_size, so no tokens can be chosen for it")
    return ModelInputs(task.name, "text", vocabulary, context_length(text), image=None, cached=task.cached)


def choose_workloads(
    inputs: Sequence[ModelInputs],
    names: Sequence[str],
    *,
    batches: Sequence[int],
    tokens: int | None,
    steps: int | None,
) -> list[Workload]:
    """Return the workloads that two models can both be timed on, one per batch size.

    Tokens are below the smaller vocabulary. Text and what is generated after it fit into the shorter context.

    Args:
        tokens: of a text; None for 128, or what the context has room for.
        steps: tokens to generate; None for 16 if both models can, or half the context if that is less.
    """
    a, b = inputs[0], inputs[1]
    if a.modality != b.modality:
        pairs = zip(names, inputs, strict=True)
        kinds = " and ".join(f"{name} reads {'images' if each.modality == 'image' else 'text'}" for name, each in pairs)
        raise UserError(f"{kinds}: they cannot be timed on the same input")
    if a.task != b.task:
        raise UserError(
            f"{names[0]} is for {a.task} and {names[1]} for {b.task}, so they do not do the same work: give two of one "
            "task"
        )
    if a.modality == "image":
        return _choose_for_images(inputs, names, batches, tokens, steps)
    if a.cached != b.cached:
        raise UserError(
            f"only the graph of {names[0] if a.cached else names[1]} has a cache, so the two do not do the same work: "
            "export both with --cache or both with --no-cache"
        )
    if steps and not a.cached:
        raise UserError(f"--generate {steps}: {names[0]} generates no text with a cache; leave it out")
    context = min((each.context for each in inputs if each.context is not None), default=None)
    if steps is None and not a.cached:
        steps = 0
    elif steps is None:
        room = STEPS if context is None else context // 2 if tokens is None else context - tokens
        steps = max(0, min(STEPS, room))
    if tokens is None:
        tokens = TOKENS if context is None else min(TOKENS, context - steps)
    if context is not None and (tokens < 1 or tokens + steps > context):
        length = f"{tokens} tokens" if tokens > 1 else "1 token"
        after = f" and {steps} generated after it are" if steps else " is"
        remedy = "use smaller --tokens and --generate" if steps else f"use --tokens {context} or less"
        raise UserError(f"a text of {length}{after} more than the context of {context} tokens: {remedy}")
    vocabulary = min(each.vocabulary for each in inputs if each.vocabulary is not None)
    generates = a.task == "text-generation"
    return [Workload("text", batch, tokens, steps, generates, a.cached, vocabulary, (0, 0, 0)) for batch in batches]


def _choose_for_images(
    inputs: Sequence[ModelInputs], names: Sequence[str], batches: Sequence[int], tokens: int | None, steps: int | None
) -> list[Workload]:
    if tokens is not None or steps:
        raise UserError(f"--tokens and --generate are for text, and {names[0]} reads images: leave them out")
    sizes = [each.image or (0, 0, 0) for each in inputs]
    if sizes[0] != sizes[1]:
        pairs = zip(names, sizes, strict=True)
        kinds = " and ".join(f"{name} reads images of {' x '.join(map(str, size))}" for name, size in pairs)
        raise UserError(f"{kinds}: they cannot be timed on the same input")
    return [Workload("image", batch, 0, 0, False, False, 0, sizes[0]) for batch in batches]
