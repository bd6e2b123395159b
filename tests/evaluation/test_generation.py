"""Greedy continuations, and how much of them repeats itself."""

import pytest
import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.generation import continue_prompts, share_repeated
from tests.evaluation.tiny import tiny_llama, tiny_tokenizer


def test_each_token_is_the_likeliest():
    model, tokenizer = tiny_llama(eos_token_id=None), tiny_tokenizer()
    (continuation,) = continue_prompts(model, tokenizer, ["the cat"], tokens=5)
    ids = tokenizer("the cat")["input_ids"]
    new = []
    with torch.inference_mode():
        for _ in range(5):
            new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    assert (continuation.text, continuation.tokens, continuation.repeated) == (
        tokenizer.decode(new, skip_special_tokens=True),
        5,
        share_repeated(new),
    )


def test_it_ends_with_the_context_and_samples_nothing():
    model, tokenizer = tiny_llama(eos_token_id=None), tiny_tokenizer()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 100.0
    first, second = continue_prompts(model, tokenizer, ["the cat sat on", "the cat sat on"], tokens=50)
    assert first == second
    assert first.tokens == 16 - len("the cat sat on")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "a prompt is empty: give it a word"),
        ("the dog ran far away", r"a prompt of 20 tokens fills the model's context of 16: shorten it"),
    ],
)
def test_prompts_that_do_not_suit(prompt, message):
    with pytest.raises(UserError, match=message):
        continue_prompts(tiny_llama(), tiny_tokenizer(), [prompt], tokens=4)
