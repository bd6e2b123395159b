"""How many tokens a model reads at once."""

from typing import Any

from ckpt_prune.model.descriptions import known_families, load_family


def reserved_positions(config: Any) -> int:
    """Positions of a model's table that no token has: RoBERTa counts from behind the one of its padding token.

    Args:
        config: of transformers, of a text model.
    """
    model_type = getattr(config, "model_type", None)
    key = load_family(model_type).positions_behind if model_type in known_families() else None
    last = None if key is None else getattr(config, key, None)
    return 0 if last is None else int(last) + 1


def context_length(config: Any) -> int | None:
    """Tokens that a model reads at most, or None where its config does not say.

    Args:
        config: of transformers, of a text model.
    """
    positions = getattr(config, "max_position_embeddings", None)
    return None if positions is None else int(positions) - reserved_positions(config)
