"""Multiple choice: the answer of a causal language model is the continuation that it finds likeliest."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import count_windows, group_by_length
from ckpt_prune.evaluation.choice_items import Item
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.measure.samples.text import Bos, check_vocabulary, tokenise_text
from ckpt_prune.model.context import context_length


@dataclass(frozen=True)
class ChoiceScore(Figures):
    """How often a model's answers are right.

    Attributes:
        accuracy: share for which the right continuation has the largest log-probability, 0 to 1.
        accuracy_norm: the same by log-probability per character of the continuation.
        chance: accuracy of blind guessing: the mean of 1 / choices.
        picked, right: the choice of every item, by plain log-probability, and whether that is the right one.
    """

    columns = (
        ("accuracy", "accuracy", ".1%"),
        ("+/-", "stderr", ".1%"),
        ("norm.", "accuracy_norm", ".1%"),
        ("chance", "chance", ".1%"),
        ("items", "items", ","),
    )
    hidden = ("picked", "right")
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

    def data(self) -> dict[str, Any]:
        return super().data() | {"stderr": self.stderr}

    def compare(self, other: "ChoiceScore") -> dict[str, float]:
        """Compare with another's score of the same items.

        Returns:
            The share of items for which both choose the same, this accuracy less the other's, and the standard error of
            that, item by item.
        """
        differences = [int(ours) - int(theirs) for ours, theirs in zip(self.right, other.right, strict=True)]
        mean = sum(differences) / self.items
        variance = sum((value - mean) ** 2 for value in differences) / max(1, self.items - 1)
        return {
            "agreement": sum(map(int.__eq__, self.picked, other.picked)) / self.items,
            "difference": mean,
            "difference_stderr": math.sqrt(variance / self.items),
        }


@torch.inference_mode()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item], *, bos: Bos = "auto", what: str
) -> ChoiceScore:
    """Let a causal language model answer items, at least one.

    Context and continuation are tokenised together, and split after the context's own number of tokens. A text that is
    longer than the model's context loses its beginning.
    """
    texts: list[Tensor] = []
    tails: list[int] = []  # tokens of each continuation
    context_limit = context_length(model.config.get_text_config())
    for context, continuation in (option for item in items for option in item.options):
        ids = tokenise_text(tokenizer, context + continuation, bos=bos)
        before = len(tokenise_text(tokenizer, context, bos=bos))
        texts.append(ids if context_limit is None else ids[-context_limit:])
        # A tokenizer may join the last word of the context with the first of the continuation. The first token of a
        # text is predicted by nothing.
        tails.append(min(max(1, len(ids) - before), len(texts[-1]) - 1))
    scores = _sum_log_probabilities(model, texts, tails, what)
    right_norm = start = 0
    picked: list[int] = []
    for item in items:
        item_scores = scores[start : start + len(item.options)]
        start += len(item.options)
        lengths = [len(continuation) - 1 for _, continuation in item.options]  # without the space it begins with
        by_character = [score / length for score, length in zip(item_scores, lengths, strict=True)]
        picked.append(item_scores.index(max(item_scores)))
        right_norm += by_character.index(max(by_character)) == item.answer
    count = len(items)
    right = tuple(choice == item.answer for choice, item in zip(picked, items, strict=True))
    chance = sum(1 / len(item.options) for item in items) / count
    return ChoiceScore(count, sum(right) / count, right_norm / count, chance, tuple(picked), right)


def _sum_log_probabilities(
    model: PreTrainedModel, texts: Sequence[Tensor], tails: Sequence[int], what: str
) -> list[float]:
    """Return the log-probability of the last tokens of every text, so many as `tails` says, nats."""
    model.eval()
    check_vocabulary(torch.cat(list(texts)), model.config)
    sums = [0.0] * len(texts)
    most = count_windows(model, 1)
    for batch in track(group_by_length([len(ids) for ids in texts], most), what, unit="batch"):
        ids = pad_sequence([texts[index] for index in batch], batch_first=True)
        mask = pad_sequence([torch.ones_like(texts[index]) for index in batch], batch_first=True)
        logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
        for row, index in enumerate(batch):
            length, tail = len(texts[index]), tails[index]
            predicted = logits[row, length - tail - 1 : length - 1].float().log_softmax(-1).cpu()
            sums[index] = float(predicted.gather(1, texts[index][length - tail :, None]).double().sum())
    if not all(map(math.isfinite, sums)):
        raise UserError("the model's log-probabilities are not finite: it answers nothing")
    return sums
