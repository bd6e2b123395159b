"""Whole-model forward passes over windows of tokens, in batches whose logits fit in memory."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.architectures.context import context_length
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.text import check_vocabulary
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track

LOGIT_BYTES = 512 * 2**20
"""A default batch keeps the logits of one model, counted as float32, below this; one window may still exceed it."""

BATCH_TOKENS = 8192
"""A default batch has no more tokens than this: a small vocabulary says nothing of how wide the layers are."""


def check_windows(model: PreTrainedModel, windows: Tensor) -> None:
    """Refuse windows, int64 of shape (windows, window), that the model cannot read.

    Raises:
        UserError: The window is longer than the model's context, or a token id is outside its vocabulary.
    """
    config = model.config.get_text_config()
    context = context_length(config)
    if context is not None and windows.shape[1] > context:
        raise UserError(
            f"window of {windows.shape[1]} tokens is longer than the model's context of {context}; "
            f"use a window of at most {context}"
        )
    check_tokens(model, windows)


def check_tokens(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse token ids, int64 of any shape, that the model does not know.

    Raises:
        UserError: one is outside its vocabulary.
    """
    check_vocabulary(ids, model.config)


def check_same_vocabulary(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Refuse two models whose next-token predictions are over vocabularies of different size.

    Raises:
        UserError: The sizes differ.
    """
    sizes = [each.config.get_text_config().vocab_size for each in (model, reference)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the vocabularies differ, {sizes[0]} and {sizes[1]} tokens: predictions cannot be compared; "
            "compare a model with the one it was made from"
        )


def default_batch_size(model: PreTrainedModel, window: int) -> int:
    """Windows of `window` tokens within LOGIT_BYTES of float32 logits and BATCH_TOKENS: at least one."""
    bytes_per_window: int = window * model.config.get_text_config().vocab_size * 4
    return max(1, min(LOGIT_BYTES // bytes_per_window, BATCH_TOKENS // window))


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of texts of like length together, shortest first, as many as BATCH_TOKENS holds of the longest of them.

    Args:
        lengths: in tokens.
    """
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not found or (len(found[-1]) + 1) * lengths[index] > BATCH_TOKENS:
            found.append([])
        found[-1].append(index)
    return found


def batches(model: PreTrainedModel, windows: Tensor, *, batch_size: int | None, what: str) -> Iterator[Tensor]:
    """Yield the windows, with a progress bar, on the model's device as batches of shape (≤ batch_size, window)."""
    size = batch_size or default_batch_size(model, windows.shape[1])
    for start in track(range(0, len(windows), size), what, unit="batch"):
        yield windows[start : start + size].to(model.device)


def sample_batches(samples: Samples, what: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield samples, with a progress bar, in batches within BATCH_TOKENS, at least one: number of the first, inputs."""
    size = max(1, BATCH_TOKENS // samples.tokens)
    for start in track(range(0, len(samples), size), what, unit="batch"):
        yield start, samples.batch(slice(start, min(start + size, len(samples))))


def check_features(*, finite: bool) -> None:
    """Refuse features that are not numbers.

    Raises:
        UserError: they are not finite.
    """
    if not finite:
        raise UserError("the model's features are not numbers (NaN): its weights are damaged or overflow in this dtype")


def logits(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Run the model on a batch of windows without padding or cache: shape (batch, window, vocab), the model's dtype."""
    result: Tensor = model(input_ids=batch.to(model.device), use_cache=False).logits
    return result
