"""What is timed: the same inputs for both models, made from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ckpt_prune.benchmarking.messages import Phase
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.whole_model import config_of, read_config
from ckpt_prune.job.graph_settings import TaskName
from ckpt_prune.model.context import context_length
from ckpt_prune.onnx.manifest import Manifest
from ckpt_prune.onnx.tasks import chosen_task
from ckpt_prune.onnx.tracing import image_size

TOKENS, STEPS = 128, 16
"""Where none are asked for, and the context has room: tokens of a text, and tokens generated after it."""
SEED = 0


@dataclass(frozen=True)
class Reads:
    """What a model takes."""

    task: TaskName
    modality: Literal["text", "image"]
    vocabulary: int | None
    """Tokens it knows; None of a model of images."""
    context: int | None
    """Tokens it reads at most; None where its config sets no limit."""
    image: tuple[int, int, int] | None
    """Channels, height and width; None of a model of text."""
    cached: bool
    """Whether it keeps keys and values of earlier tokens, and its graph, where there is one, does too."""

    @property
    def generates(self) -> bool:
        """Whether it predicts the next token."""
        return self.task == "text-generation"


@dataclass(frozen=True)
class Workload:
    """One batch, and what is done with it."""

    modality: Literal["text", "image"]
    batch: int
    tokens: int
    """The length of each text; 0 for images."""
    steps: int
    """Tokens that are generated after the text, each with the keys and values of all before it."""
    generates: bool
    cached: bool
    """Whether keys and values are kept of the text."""
    vocabulary: int
    """Tokens are below this; 0 for images."""
    image: tuple[int, int, int]
    seed: int = SEED

    @property
    def phase(self) -> Phase:
        """What the whole batch is read in."""
        return "prefill" if self.generates else "forward"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is timed, in this order."""
        return (self.phase, "decode") if self.steps else (self.phase,)

    def items(self, phase: Phase) -> int:
        """Tokens or images that one timing of a phase is of; decode is timed by the step."""
        return self.batch * (self.tokens if self.modality == "text" and phase != "decode" else 1)

    def inputs(self) -> dict[str, Tensor]:
        """Random inputs, the same in every process.

        Text: `input_ids` and a mask of ones, (B, T) int64. Images: `pixel_values`, (B, C, H, W) float32, normal.
        """
        generator = torch.Generator().manual_seed(self.seed)
        if self.modality == "image":
            return {"pixel_values": torch.randn(self.batch, *self.image, generator=generator)}
        ids = torch.randint(self.vocabulary, (self.batch, self.tokens), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reads_of(folder: Path, manifest: Manifest | None, *, trust: bool = False) -> Reads:
    """What a model takes, by its config.

    Args:
        folder: of a checkpoint or an exported graph.
        manifest: record of its graph, where it has one already; a graph made of a checkpoint keeps what it can.
        trust: run the checkpoint's own code for its config, where it is not this tool's.

    Raises:
        UserError: the config cannot be read, wants code that is not trusted, is of no class that can be timed, or does
            not say how large an input is.
    """
    task = chosen_task(read_config(folder), folder=folder) if manifest is None else manifest.what
    config = config_of(folder, trust=trust)
    if task.modality == "image":
        size = (int(getattr(config, "num_channels", 3)), *image_size(config))
        return Reads(task.name, "image", vocabulary=None, context=None, image=size, cached=False)
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise UserError(f"{folder}: config.json has no vocab_size, so no tokens can be chosen for it")
    return Reads(
        task.name,
        "text",
        vocabulary=vocabulary,
        context=context_length(text),
        image=None,
        cached=task.cached,
    )


def choose_workloads(
    reads: Sequence[Reads], names: Sequence[str], *, batches: Sequence[int], tokens: int | None, steps: int | None
) -> list[Workload]:
    """The workloads that two models can both be timed on, one per batch size.

    Tokens are below the smaller vocabulary. Text and what is generated after it fit into the shorter context.

    Args:
        reads: what each takes.
        names: of both, for errors.
        batches: batch sizes.
        tokens: of a text; None for 128, or what the context has room for.
        steps: tokens to generate; None for 16, or half the context where that is less, where both models can.

    Raises:
        UserError: the two cannot read the same input, or not what is asked for.
    """
    if reads[0].modality != reads[1].modality:
        kinds = ["images" if each.modality == "image" else "text" for each in reads]
        what = " and ".join(f"{name} reads {kind}" for name, kind in zip(names, kinds, strict=True))
        raise UserError(f"{what}: they cannot be timed on the same input")
    if reads[0].task != reads[1].task:
        raise UserError(
            f"{names[0]} is for {reads[0].task} and {names[1]} for {reads[1].task}, so they do not do the same work: "
            "give two of one task"
        )
    if reads[0].modality == "image":
        return _images(reads, names, batches, tokens, steps)
    if reads[0].cached != reads[1].cached:
        with_cache = names[0] if reads[0].cached else names[1]
        raise UserError(
            f"of the two graphs only that of {with_cache} has a cache, so they do not do the same work: export both "
            "with --cache or both with --no-cache"
        )
    generates, cached = reads[0].generates, reads[0].cached
    if steps and not cached:
        raise UserError(f"--generate {steps}: {names[0]} generates no text with a cache; leave it out")
    context = min((each.context for each in reads if each.context is not None), default=None)
    if steps is None:
        steps = _default_steps(context, tokens) if cached else 0
    if tokens is None:
        tokens = TOKENS if context is None else min(TOKENS, context - steps)
    if context is not None and (tokens < 1 or tokens + steps > context):
        after = f" and {steps} generated after it are" if steps else " is"
        length = f"{tokens} tokens" if tokens > 1 else "1 token"
        raise UserError(
            f"a text of {length}{after} more than the context of {context} tokens: "
            f"say {'less with --tokens and --generate' if steps else f'--tokens {context} or less'}"
        )
    vocabulary = min(each.vocabulary for each in reads if each.vocabulary is not None)
    return [Workload("text", batch, tokens, steps, generates, cached, vocabulary, (0, 0, 0)) for batch in batches]


def _default_steps(context: int | None, tokens: int | None) -> int:
    if context is None:
        return STEPS
    return max(0, min(STEPS, context // 2 if tokens is None else context - tokens))


def _images(
    reads: Sequence[Reads], names: Sequence[str], batches: Sequence[int], tokens: int | None, steps: int | None
) -> list[Workload]:
    if tokens is not None or steps:
        raise UserError(f"--tokens and --generate are for text, and {names[0]} reads images: leave them out")
    sizes = [each.image or (0, 0, 0) for each in reads]
    if sizes[0] != sizes[1]:
        said = " and ".join(
            f"{name} reads images of {' x '.join(map(str, size))}" for name, size in zip(names, sizes, strict=True)
        )
        raise UserError(f"{said}: they cannot be timed on the same input")
    return [Workload("image", batch, 0, 0, False, False, 0, sizes[0]) for batch in batches]
