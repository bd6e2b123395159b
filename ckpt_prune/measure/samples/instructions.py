"""Rows of an instruction, an input and an output, written in Alpaca's prompt; their answers are what is learned."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.text_encoding import check_unicode, parse_json_rows
from ckpt_prune.measure.samples.text import check_vocabulary, encode_text, read_content, tokenizer_of
from ckpt_prune.model.context import context_length
from ckpt_prune.model.model import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DESCRIBES = "Below is an instruction that describes a task"
_RESPOND = "Write a response that appropriately completes the request."
WITH_INPUT = (
    f"{_DESCRIBES}, paired with an input that provides further context. {_RESPOND}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = f"{_DESCRIBES}. {_RESPOND}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n"
"""The two prompts of Alpaca (Taori et al. 2023)."""
IGNORED = -100
"""Stands in the labels where there is nothing to learn."""


@dataclass(frozen=True, eq=False)
class AnswerRows:
    """Examples of a prompt and its answer, padded to one length.

    Attributes:
        ids: token ids, (N, T) int64.
        labels: of the answers' tokens; elsewhere `IGNORED`, (N, T) int64.
        lengths: tokens of each before its padding, (N,) int64.
    """

    ids: Tensor
    labels: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[1])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of ids, labels and lengths."""
        digest = hashlib.sha256()
        for part in (self.ids, self.labels, self.lengths):
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Return what the model is called with, and the labels."""
        mask = torch.arange(self.tokens) < self.lengths[rows, None]
        return {"input_ids": self.ids[rows], "attention_mask": mask.long(), "labels": self.labels[rows]}


def read_answers(model: Model, file: Path, *, cutoff: int, most: int | None, seed: int) -> AnswerRows:
    """Read rows of instruction, input and output; those whose answer is cut off are left out.

    As in LLM-Pruner's tuning (Ma et al. 2023): the prompt and the answer are one text, cut to so many tokens, with the
    tokenizer's own tokens before it and an end-of-sequence token behind it where it fits. The answer's tokens are those
    behind as many as the prompt alone has.

    Args:
        cutoff: tokens of an example at most; not more than the model's context.
        most: rows, at random by the seed, if there are more.
    """
    if model.family.purpose != "text-generation":
        raise UserError(f"--data is for models that generate text, which {model.checkpoint.path} does not")
    tokenizer = tokenizer_of(model.checkpoint)
    cutoff = min(cutoff, context_length(model.config) or cutoff)
    rows = list(_read_rows(file))
    if most is not None and most < len(rows):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most]
        rows = [rows[place] for place in order.sort().values.tolist()]
    pairs = [each for prompt, answer in rows if (each := encode_answer(tokenizer, prompt, answer, cutoff)) is not None]
    if len(pairs) < 2:
        raise UserError(f"{file}: fewer than 2 rows have an answer within {cutoff} tokens: say a longer --window")
    lengths = torch.tensor([len(ids) for ids, _ in pairs])
    ids, labels = (torch.full((len(pairs), int(lengths.max())), fill) for fill in (0, IGNORED))
    for row, (own, prompt_tokens) in enumerate(pairs):
        ids[row, : len(own)] = torch.tensor(own)
        labels[row, prompt_tokens : len(own)] = torch.tensor(own[prompt_tokens:])
    check_vocabulary(ids, model.config)
    return AnswerRows(ids, labels, lengths)


def encode_answer(
    tokenizer: "PreTrainedTokenizerBase", prompt: str, answer: str, cutoff: int
) -> tuple[list[int], int] | None:
    """Return the tokens of a prompt with its answer, and how many are the prompt's; None if no answer is left."""
    ids = encode_text(tokenizer, prompt + answer, special=True)[:cutoff]
    end = tokenizer.eos_token_id
    if isinstance(end, int) and len(ids) < cutoff and ids[-1] != end:
        ids.append(end)
    before = encode_text(tokenizer, prompt, special=True)
    if len(before) > 1 and before[-1] == end:  # the tokenizer ends every text with it
        before = before[:-1]
    # The first token of all is never predicted.
    return (ids, len(before)) if max(1, len(before)) < len(ids) else None


def _read_rows(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the answer of every row."""
    for where, row in parse_json_rows(file, read_content(file)):
        instruction, given, output = (_text_of(where, row, key) for key in ("instruction", "input", "output"))
        prompt = WITH_INPUT if given else WITHOUT_INPUT
        yield prompt.format(instruction=instruction, input=given), output


def _text_of(where: str, row: Any, key: str) -> str:
    value = row.get(key, "" if key == "input" else None) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise UserError(
            f'{where}: no string under "{key}"; each row must be {{"instruction": "…", "input": "…", "output": "…"}}, '
            "of which input may be left out"
        )
    check_unicode(where, value)
    return value
