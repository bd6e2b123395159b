"""Multiple choice: the answer of a causal language model is the continuation that it holds likeliest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.architectures.context import context_length
from ckpt_prune.calibration.text import Bos, token_stream
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import check_tokens, default_batch_size
from ckpt_prune.evaluation.choice_items import Item


@dataclass(frozen=True)
class ChoiceScore:
    """What a model makes of items.

    Attributes:
        items: answered.
        accuracy: share where the right continuation has the largest log-probability, 0 to 1.
        accuracy_norm: the same by log-probability per character of the continuation.
        chance: accuracy of blind guessing: the mean of 1 / choices.
        picked: the choice of every item, by plain log-probability.
        right: whether that is the right one.
    """

    items: int
    accuracy: float
    accuracy_norm: float
    chance: float
    picked: tuple[int, ...] = field(repr=False)
    right: tuple[bool, ...] = field(repr=False)

    @property
    def stderr(self) -> float:
        """Standard error of the accuracy, of a sample of so many items."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.items - 1))

    def difference(self, other: "ChoiceScore") -> tuple[float, float]:
        """This accuracy less another's of the same items, and the standard error of that, item by item."""
        each = [int(ours) - int(theirs) for ours, theirs in zip(self.right, other.right, strict=True)]
        mean = sum(each) / self.items
        spread = sum((value - mean) ** 2 for value in each) / max(1, self.items - 1)
        return mean, math.sqrt(spread / self.items)


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    *,
    bos: Bos = "auto",
    what: str = "answering",
) -> ChoiceScore:
    """Let a model answer items.

    Context and continuation are tokenised together, and split where the context alone ends; what is longer than the
    model's context loses its beginning.

    Args:
        model: a causal language model.
        tokenizer: its own.
        items: to answer, at least one.
        bos: begin-of-sequence token before each text.
        what: said on the progress bar.

    Raises:
        UserError: a token id is outside the vocabulary, or a log-probability is not a number.
    """
    texts = [option for item in items for option in item.options]
    scores = _log_probabilities(model, [_pair(tokenizer, *text, bos) for text in texts], what)
    right_norm = 0
    picked: list[int] = []
    right: list[bool] = []
    start = 0
    for item in items:
        own = scores[start : start + len(item.options)]
        lengths = [len(continuation) - 1 for _, continuation in item.options]  # without the space it begins with
        start += len(item.options)
        choice = max(range(len(own)), key=own.__getitem__)
        per_character = [score / length for score, length in zip(own, lengths, strict=True)]
        picked.append(choice)
        right.append(choice == item.answer)
        right_norm += max(range(len(own)), key=per_character.__getitem__) == item.answer
    count = len(items)
    chance = sum(1 / len(item.options) for item in items) / count
    return ChoiceScore(count, sum(right) / count, right_norm / count, chance, tuple(picked), tuple(right))


def _pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, bos: Bos) -> tuple[Tensor, int]:
    """Token ids of both together, int64 (T,), and how many of them the continuation is: at least one."""
    whole = token_stream(tokenizer, context + continuation, bos=bos)
    before = len(token_stream(tokenizer, context, bos=bos))
    # A tokenizer may join the last word of the context with the first of the continuation.
    return whole, max(1, len(whole) - before)


def _log_probabilities(model: PreTrainedModel, texts: Sequence[tuple[Tensor, int]], what: str) -> list[float]:
    """Of every text the log-probability of its last tokens, nats."""
    model.eval()
    config = model.config.get_text_config()
    check_tokens(model, torch.cat([ids for ids, _ in texts]))
    context = context_length(config)
    cut = [(ids if context is None else ids[-context:], tail) for ids, tail in texts]
    order = sorted(range(len(cut)), key=lambda index: len(cut[index][0]))
    found = [0.0] * len(cut)
    for batch in track(list(_batches(model, cut, order)), what, unit="batch"):
        for index, value in zip(batch, _batch(model, [cut[index] for index in batch]), strict=True):
            found[index] = value
    if not all(map(math.isfinite, found)):
        raise UserError("the model's log-probabilities are not finite: it answers nothing")
    return found


def _batches(model: PreTrainedModel, texts: Sequence[tuple[Tensor, int]], order: Sequence[int]) -> list[list[int]]:
    """Numbers of texts of like length together, as many as fit."""
    found: list[list[int]] = []
    for index in order:
        # Sorted by length: the one that comes is the longest so far.
        if not found or len(found[-1]) >= default_batch_size(model, len(texts[index][0])):
            found.append([])
        found[-1].append(index)
    return found


def _batch(model: PreTrainedModel, texts: Sequence[tuple[Tensor, int]]) -> list[float]:
    longest = max(len(ids) for ids, _ in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (own, _) in enumerate(texts):
        ids[row, : len(own)] = own
        mask[row, : len(own)] = 1
    logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
    found = []
    for row, (own, tail) in enumerate(texts):
        # The first token of a text is predicted by nothing.
        tail = min(tail, len(own) - 1)
        predicted = logits[row, len(own) - tail - 1 : len(own) - 1].float().log_softmax(-1).cpu()
        found.append(float(predicted.gather(1, own[len(own) - tail :, None]).double().sum()))
    return found
