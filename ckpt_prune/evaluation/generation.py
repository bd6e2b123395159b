"""Greedy continuations of prompts, and how much they repeat themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.text import check_vocabulary, tokenise_text
from ckpt_prune.model.context import context_length

RUN = 4
"""Length of the runs of tokens that are looked for twice."""


@dataclass(frozen=True)
class GeneratedText:
    """How a model continues a prompt.

    `repeated` is the share of its runs of four tokens that were there before, 0 to 1: near 1 if the model loops.
    """

    text: str
    tokens: int
    repeated: float

    def describe(self, model: Path | None) -> str:
        # A model may write what a terminal would obey.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in self.text)
        return f"{model} ({self.tokens} tokens, {self.repeated:.0%} repeated):\n{text}"


@torch.inference_mode()
def continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, tokens: int
) -> list[GeneratedText]:
    """Continue prompts greedily, one by one, whatever the folder's generation config says, by at most so many tokens.

    There are fewer if the model ends the text or its context does.
    """
    model.eval()
    config = model.config.get_text_config()
    context = context_length(config)
    continuations = []
    for prompt in track(prompts, "generating", unit="prompt"):
        ids = tokenise_text(tokenizer, prompt)
        if not len(ids):
            raise UserError("a prompt is empty: give it a word")
        check_vocabulary(ids, model.config)
        room = tokens if context is None else min(tokens, context - len(ids))
        if room < 1:
            raise UserError(f"a prompt of {len(ids)} tokens fills the model's context of {context}: shorten it")
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=model.generation_config.eos_token_id if model.generation_config else config.eos_token_id,
            pad_token_id=0,
        )
        inputs = ids[None].to(model.device)
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=greedy)
        new = output[0, len(ids) :].tolist()
        text = tokenizer.decode(new, skip_special_tokens=True)
        continuations.append(GeneratedText(text, len(new), share_repeated(new)))
    return continuations


def share_repeated(tokens: Sequence[int]) -> float:
    """Return the share of the runs of `RUN` tokens that occurred before in the same sequence; 0 without any run."""
    runs = [tuple(tokens[start : start + RUN]) for start in range(len(tokens) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
