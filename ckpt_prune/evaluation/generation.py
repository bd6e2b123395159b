"""What a model says: greedy continuations, and how much of them repeats itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ckpt_prune.architectures.context import context_length
from ckpt_prune.calibration.text import token_stream
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import check_tokens

N = 4
"""Length of the runs of tokens that are looked for twice."""


@dataclass(frozen=True)
class Continuation:
    """What a model says after a prompt.

    Attributes:
        text: without the prompt.
        tokens: of it.
        repeated: share of its runs of four tokens that were there before, 0 to 1: a model that loops is near 1.
    """

    text: str
    tokens: int
    repeated: float


@torch.inference_mode()
def continue_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    tokens: int,
    what: str = "generating",
) -> list[Continuation]:
    """Continue prompts greedily, whatever the folder's generation config says.

    Args:
        model: a causal language model.
        tokenizer: its own.
        prompts: to continue, one by one.
        tokens: at most so many; fewer where the model ends the text or its context does.
        what: said on the progress bar.

    Raises:
        UserError: a prompt is empty, fills the model's context, or is outside its vocabulary.
    """
    model.eval()
    config = model.config.get_text_config()
    context = context_length(config)
    found = []
    for prompt in track(prompts, what, unit="prompt"):
        ids = token_stream(tokenizer, prompt)
        if not len(ids):
            raise UserError("a prompt is empty: give it a word")
        check_tokens(model, ids)
        room = tokens if context is None else min(tokens, context - len(ids))
        if room < 1:
            raise UserError(f"a prompt of {len(ids)} tokens fills the model's context of {context}: shorten it")
        greedy = GenerationConfig(
            do_sample=False,
            max_new_tokens=room,
            eos_token_id=model.generation_config.eos_token_id if model.generation_config else config.eos_token_id,
            pad_token_id=0,
        )
        whole = model.generate(
            ids[None].to(model.device),
            attention_mask=torch.ones_like(ids)[None].to(model.device),
            generation_config=greedy,
        )
        new = whole[0, len(ids) :].tolist()
        found.append(Continuation(tokenizer.decode(new, skip_special_tokens=True), len(new), repeated(new)))
    return found


def repeated(tokens: Sequence[int]) -> float:
    """Share of the runs of `N` tokens that occurred before in the same sequence; 0 where there is none."""
    runs = [tuple(tokens[start : start + N]) for start in range(len(tokens) - N + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
