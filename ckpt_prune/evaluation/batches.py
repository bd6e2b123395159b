"""Batches for forward passes of whole models that fit in memory, and checks of what goes in and comes out."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.samples.text import check_vocabulary
from ckpt_prune.model.context import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_BYTES = 512 * 2**20
"""A batch keeps the logits of one model, counted as float32, below this; one window may still exceed it."""
BATCH_TOKENS = 8192
"""A batch has no more tokens than this: a small vocabulary does not mean that the layers are narrow."""


class Configured(Protocol):
    """Any model, in memory or not."""

    @property
    def config(self) -> Any:
        """The config of transformers."""


def check_windows(model: Configured, windows: Tensor) -> None:
    """Refuse windows, int64 of shape (windows, window), that the model cannot read."""
    context = context_length(model.config.get_text_config())
    if context is not None and windows.shape[1] > context:
        raise UserError(
            f"window of {windows.shape[1]} tokens is longer than the model's context of {context}; "
            f"use a window of at most {context}"
        )
    check_vocabulary(windows, model.config)


def check_same_vocabulary(model: Configured, reference: Configured) -> None:
    """Refuse two models whose vocabularies differ in size."""
    sizes = [each.config.get_text_config().vocab_size for each in (model, reference)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the vocabularies differ, {sizes[0]} and {sizes[1]} tokens: predictions cannot be compared; "
            "compare a model with the one it was made from"
        )


def check_finite(what: str, *values: Tensor) -> None:
    """Refuse numbers of a model, named `what`, that are not finite."""
    if not all(map(all_finite, values)):
        raise UserError(f"the {what} are not finite numbers: the weights are damaged or overflow in this dtype")


def count_windows(model: Configured, window: int) -> int:
    """Return how many windows of so many tokens make a batch: at least one."""
    bytes_per_window: int = window * model.config.get_text_config().vocab_size * 4
    return max(1, min(LOGIT_BYTES // bytes_per_window, BATCH_TOKENS // window))


def iterate_rows(model: Configured, windows: Tensor, *, what: str, longest: int = 1) -> Iterator[slice]:
    """Yield slices of windows (windows, window) that make a batch each, with a progress bar.

    Args:
        longest: tokens of what is read besides a window, such as the source of a target.
    """
    size = min(count_windows(model, windows.shape[1]), max(1, BATCH_TOKENS // longest))
    for start in track(range(0, len(windows), size), what, unit="batch"):
        yield slice(start, start + size)


def iterate_windows(model: "PreTrainedModel", windows: Tensor, *, what: str) -> Iterator[Tensor]:
    """Yield the windows, with a progress bar, in batches on the model's device (`iterate_rows`)."""
    for rows in iterate_rows(model, windows, what=what):
        yield windows[rows].to(model.device)


def iterate_samples(samples: Samples, what: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield samples, with a progress bar, in batches of at most BATCH_TOKENS: the number of the first, and inputs."""
    size = max(1, BATCH_TOKENS // samples.tokens)
    for start in track(range(0, len(samples), size), what, unit="batch"):
        yield start, samples.batch(slice(start, min(start + size, len(samples))))


def group_by_length(lengths: Sequence[int], most: int = BATCH_TOKENS) -> list[list[int]]:
    """Group texts by their lengths in tokens, shortest first, so that no batch has more than `most` when it is padded.

    A longer text is a batch of its own. Returns places in `lengths`.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or (len(groups[-1]) + 1) * lengths[index] > most:
            groups.append([])
        groups[-1].append(index)
    return groups
