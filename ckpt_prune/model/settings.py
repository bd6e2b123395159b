"""Settings of a config: those that a description accounts for, and a guard against those that it does not know."""

import json
from collections.abc import Set
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from ckpt_prune.common.errors import UserError

HARMLESS = frozenset(
    {
        # Tokens, and tables that are looked up.
        *("vocab_size", "type_vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
        *("image_size", "patch_size", "num_channels"),
        # Training: nothing is dropped where a model runs.
        *("attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "emb_pdrop"),
        *("embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"),
        *("drop_path_rate", "resid_pdrop", "residual_dropout", "initializer_range", "init_std", "pretraining_tp"),
        # What a stock block, which calibration runs, computes by itself between the modules of the spaces.
        *("activation", "activation_function", "hidden_act", "hidden_activation", "attn_logit_softcapping"),
        *("rope_parameters", "layer_types", "max_window_layers", "query_pre_attn_scalar", "rotary_dim"),
        *("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"),
        # How long a text may be, and what is kept while one is generated.
        *("max_position_embeddings", "max_seq_len", "n_positions", "original_max_position_embeddings", "use_cache"),
        # What comes after the blocks.
        *("final_logit_softcapping", "logit_scale", "logits_scaling", "pooler_act", "pooler_output_size"),
    }
)
"""Config keys that no description needs to name: what they change is none of its facts, in any family."""


def check_settings(model_type: str, named: Set[str], config: Any) -> None:
    """Refuse a config with a setting that its family's description does not know: it may change the function.

    Only keys of the family's own config class count: others, which stock classes do not read, change nothing.

    Args:
        model_type: of the family.
        named: config keys that the description names.
        config: parsed by transformers.

    Raises:
        UserError: a key that is not known has another value than the class gives it.
    """
    for key, value in unknown_settings(named, config).items():
        found = json.dumps(getattr(config, key), default=str)
        if getattr(config, key) != value:
            raise UserError(
                f"{model_type} with {key} {found} in config.json is not supported: the description of {model_type} "
                "does not say what that changes"
            )


def unknown_settings(named: Set[str], config: Any) -> dict[str, Any]:
    """Keys of a config's class that neither a description nor `HARMLESS` names → the values that the class gives."""
    from transformers import PreTrainedConfig

    own = type(config)
    if not is_dataclass(own):
        return {}
    known = HARMLESS | named | {field.name for field in fields(PreTrainedConfig)}
    found = {}
    for field in fields(own):
        if field.name not in known:
            made = field.default_factory() if field.default_factory is not MISSING else field.default
            found[field.name] = made
    return found
