"""The keys of a GGUF file. Each is taken, changes nothing, or is refused by its name: none is passed over."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_prune.common.errors import UserError

_MOST = 2**31
_EXPERTS = ("expert_", "leading_dense_block_count", "interleave_moe_layer_step", "moe_every_n_layers")
"""Beginnings of keys that change nothing in a model without experts."""
MIXTURE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
}
"""Key of a mixture of experts → the values at which it changes nothing where it is not taken."""
MODEL_WITHOUT_EFFECT = {
    "vocab_size": "the rows of token_embd.weight say it",
    "tensor_data_layout": "a note for people",
    "pooling_type": "of embeddings, not of generated text",
    "rope.scaling.finetuned": "a note for people, but in granite",
    "rope.scaling.original_context_length": "of scaled rotary positions, where it is taken",
    "use_parallel_residual": "llama.cpp looks for the norm in between",
    "activation_sparsity_scale": "llama.cpp knows by heart what blocks of gemma3n keep",
    "n_deepstack_layers": "of images, which come with a second file",
    "attention.layer_norm_epsilon": "of norms of the other kind",
    "attention.layer_norm_rms_epsilon": "of norms of the other kind",
    "attention.sliding_window": "llama.cpp applies none in architectures that do not take it",
    "attention.sliding_window_pattern": "of windows",
    "rope.freq_base_swa": "of windows",
}
"""Key of a model → why it changes nothing where it is not taken, by llama.cpp's `llama-model.cpp` and `models/`."""
MODEL_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": ([0, 0, 0, 0],),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Key of a model → the values at which it changes nothing where it is not taken."""
TOKENIZER_WITHOUT_EFFECT = {
    **dict.fromkeys(("ggml.seperator_token_id", "ggml.cls_token_id", "ggml.mask_token_id"), "of encoders"),
    **{
        f"ggml.{name}_token_id": "of code that is filled in, which only llama.cpp's server does"
        for name in ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
    },
    "ggml.add_sep_token": "of pairs of texts",
    "ggml.token_type_count": "of encoders",
    **dict.fromkeys(
        ("ggml.remove_extra_whitespaces", "ggml.precompiled_charsmap"), "of the tokenizers t5 and bert, not of these"
    ),
    **dict.fromkeys(
        ("ggml.normalizer.lowercase", "ggml.normalizer.strip_accents"), "of the tokenizers t5 and bert, not of these"
    ),
    **dict.fromkeys(("huggingface.json", "rwkv.world"), "llama.cpp does not read it"),
    "chat_templates": "names of templates that have keys of their own",
}
"""Key of a tokenizer → why it changes nothing. By llama.cpp's `llama-vocab.cpp`."""


class Keys:
    """The keys below a prefix, such as "llama" or "tokenizer". It remembers which of them were taken.

    An absent key has the value that llama.cpp takes for it, which is what the caller gives.
    """

    def __init__(self, values: Mapping[str, Any], where: Path, prefix: str) -> None:
        self.where = where
        self._values = {
            key.removeprefix(f"{prefix}."): value for key, value in values.items() if key.startswith(f"{prefix}.")
        }
        self.prefix, self._taken = prefix, set[str]()

    def take(self, key: str) -> Any:
        """Return a value, whatever it is; None if there is none."""
        self._taken.add(key)
        return self._values.get(key)

    def refuse(self, key: str, why: str) -> UserError:
        """Return the error that names a key, its value, and why it cannot be."""
        value = repr(str(self._values[key])[:60]) if key in self._values else "missing"
        return UserError(f"{self.where}: {self.prefix}.{key[:80]} is {value}, {why}")

    def number(self, key: str, absent: int | None = None, *, least: int = 1) -> int:
        """Return a whole number that all blocks share."""
        value = self.take(key)
        if isinstance(value, list):
            if len({str(each) for each in value}) != 1:
                raise UserError(f"{self.where}: its blocks differ ({key}); prune the checkpoint that it was made from")
            value = value[0]
        value = absent if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
            raise self.refuse(key, f"not a whole number from {least} on; download it again")
        return value

    def decimal(self, key: str, absent: float | None = None) -> float:
        """Return a number, with as few digits as float32 tells it by. It is finite, and not below 0."""
        value = self.take(key)
        value = absent if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= np.finfo(np.float32).max:
            raise self.refuse(key, "not a finite number from 0 on; download it again")
        return float(str(np.float32(value)))

    def flag(self, key: str, absent: bool) -> bool:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "not true or false; download it again")
        return absent if value is None else value

    def entries(self, key: str, kind: type, absent: list[Any] | None = None) -> list[Any]:
        """Return a list whose entries are of one type."""
        value = self.take(key)
        value = absent if value is None else value
        if not isinstance(value, list) or not all(type(each) is kind for each in value):
            raise UserError(f"{self.where}: {self.prefix}.{key} is no list of {kind.__name__}; download it again")
        return value

    def others(self, start: str) -> dict[str, Any]:
        """Take all keys that begin so. Return what follows → value."""
        return {key.removeprefix(start): self.take(key) for key in self._values if key.startswith(start)}

    def check_others(
        self, without_effect: Mapping[str, str], neutral: Mapping[str, tuple[Any, ...]], *, experts: bool = False
    ) -> None:
        """Refuse a key that was not taken and may change what is computed, if experts are there also one of these."""
        for key, value in self._values.items():
            if key in self._taken:
                continue
            if key in neutral:
                if not any(_is_like(value, each) for each in neutral[key]):
                    raise self.refuse(key, "and no class of transformers is known to compute that")
            elif key not in without_effect and (experts or not key.startswith(_EXPERTS)):
                raise self.refuse(key, "a key that ckpt-prune does not know: it may change what is computed")


def _is_like(value: Any, expected: Any) -> bool:
    if isinstance(value, list) or isinstance(expected, list) or isinstance(value, bool) != isinstance(expected, bool):
        return bool(value == expected)
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-5)
