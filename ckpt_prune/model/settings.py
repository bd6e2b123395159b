"""Settings of a config that no description needs to account for, and those that one does not know."""

from collections.abc import Set
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

HARMLESS = frozenset(
    {
        # Tokens, and tables that are looked up.
        *("vocab_size", "type_vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
        *("image_size", "patch_size", "num_channels"),
        # Training: a model that runs drops nothing.
        *("attention_dropout", "attn_pdrop", "classifier_dropout", "dropout", "embd_pdrop", "emb_pdrop"),
        *("embedding_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"),
        *("drop_path_rate", "resid_pdrop", "residual_dropout", "initializer_range", "init_std", "pretraining_tp"),
        # Computed by stock blocks, which calibration runs, between the modules of the spaces.
        *("activation", "activation_function", "hidden_act", "hidden_activation", "attn_logit_softcapping"),
        *("rope_parameters", "layer_types", "max_window_layers", "query_pre_attn_scalar", "rotary_dim"),
        *("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps"),
        # Length of texts, and the cache of generation.
        *("max_position_embeddings", "max_seq_len", "n_positions", "original_max_position_embeddings", "use_cache"),
        # Behind the blocks.
        *("final_logit_softcapping", "logit_scale", "logits_scaling", "pooler_act", "pooler_output_size"),
    }
)
"""Config keys that no description needs to name: they change none of its facts, in any family."""


def unknown_settings(named: Set[str], config: Any) -> dict[str, Any]:
    """Return keys of a config's class that neither a description nor `HARMLESS` names → the class's own values.

    Other keys are not read by stock classes and change nothing.
    """
    from transformers import PreTrainedConfig

    config_class = type(config)
    if not is_dataclass(config_class):
        return {}
    known_keys = HARMLESS | named | {field.name for field in fields(PreTrainedConfig)}
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(config_class)
        if field.name not in known_keys
    }
