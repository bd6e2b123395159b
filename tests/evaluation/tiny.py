"""Tiny random models and a character tokenizer, made on the spot."""

from string import ascii_lowercase

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, UNKNOWN = 0, 1, 2
VOCAB = 40
CONTEXT = 16


def tiny_llama(seed: int = 0, vocab: int = VOCAB, **changes) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{
            "vocab_size": vocab,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.5,  # large enough for the logits, and so the divergences, not to be near zero
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer(template: str | None = None, bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """One token a character; `template` is what the tokenizer itself adds, for instance "<s> $A </s>"."""
    symbols = ["<s>", "</s>", "<unk>", *ascii_lowercase, " ", "\n"]
    tokenizer = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    if template:
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>", unk_token="<unk>", model_max_length=CONTEXT
    )


def random_windows(count: int, window: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab, (count, window), generator=torch.Generator().manual_seed(seed))
