"""How many tokens a model reads at once: by its context length, or by the size of its images."""

from math import ceil
from typing import Any

from ckpt_prune.model.descriptions import known_families, load_family
from ckpt_prune.model.family import Family

_USUAL = 224
"""Height and width of images where a config states none: what most published models of images were trained on."""


def reserved_positions(config: Any) -> int:
    """Return how many positions of a text model's table no token has.

    RoBERTa counts tokens from behind the position of its padding token.
    """
    model_type = getattr(config, "model_type", None)
    key = load_family(model_type).positions_behind if model_type in known_families() else None
    last = None if key is None else getattr(config, key, None)
    return 0 if last is None else int(last) + 1


def context_length(config: Any) -> int | None:
    """Return how many tokens a text model reads at most, or None if its config does not say."""
    nested = getattr(config, "decoder", None)  # of an encoder-decoder whose stacks have configs of their own
    config = nested if hasattr(nested, "max_position_embeddings") else config
    positions = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    return None if positions is None or positions < 0 else int(positions) - reserved_positions(config)


def height_and_width(value: Any) -> tuple[int, int]:
    """Return what a config states as one number or as two."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def image_size(family: Family, config: Any) -> tuple[int, int]:
    """Return height and width of the images that costs are stated for."""
    return family.cost_image_size or height_and_width(getattr(config, "image_size", _USUAL))


def patches(config: Any, size: tuple[int, ...] | None = None) -> int:
    """Return the patches of an image of `size` (height, width); by default of the config's own size."""
    height, width = size or height_and_width(config.image_size)
    rows, columns = height_and_width(config.patch_size)
    return (height // rows) * (width // columns)


def positions(size: tuple[int, ...], stride: float) -> int:
    """Return how many squares of `stride` pixels an image of `size` (height, width) has, cut ones counted."""
    return ceil(size[0] / stride) * ceil(size[1] / stride)


def image_tokens(family: Family, config: Any, size: tuple[int, ...]) -> int:
    """Return the tokens of an image of `size` (height, width): patches, special tokens and registers."""
    if family.stride is not None:
        return positions(size, family.stride) + family.special_tokens
    registers = 0 if family.registers is None else int(getattr(config, family.registers))
    return patches(config, size) + family.special_tokens + registers
