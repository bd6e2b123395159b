"""Random inputs for classes that read images: whole images, or patches and their places."""

from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

_GRID, _PLACES, _SHAPES, _SIZES = "grid_thw", "pixel_position_ids", "spatial_shapes", "target_sizes"
"""Arguments with the places of patches that an image processor has cut out: for Qwen-VL, Gemma 4, SigLIP 2, MiniCPM."""


def image_inputs(
    forward: Callable[..., Any], config: Any, images: int, size: tuple[int, int]
) -> Iterator[dict[str, Tensor]]:
    """Yield random images in the forms in which a model may take them, alone or with their places; nothing if in none.

    Signatures do not tell whether numbers of a patch stand in one axis or in three: callers take what the model runs.

    Args:
        forward: of the model.
        config: of the model.
        images: how many.
        size: height and width, multiples of twice a patch's.
    """
    taken = signature(forward).parameters
    channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
    given = {name for name in (_GRID, _PLACES, _SHAPES, _SIZES) if name in taken}
    if not given:
        yield from [{"pixel_values": _draw(images, channels, *size)}] if "pixel_values" in taken else []
        return
    patch = _first(config.patch_size)
    rows, columns = (length // patch for length in size)
    numbers = channels * patch**2 * _first(getattr(config, "temporal_patch_size", 1))
    count = images * rows * columns
    if _GRID in given:
        merged = {"merge_sizes": torch.full((images,), 2)} if "merge_sizes" in taken else {}
        name = "hidden_states" if "hidden_states" in taken else "pixel_values"
        grid = torch.tensor([[1, rows, columns]]).repeat(images, 1)
        square = (channels, patch, patch)
        for shape in ((count, numbers), (count, *square), (1, count, *square)):
            yield {name: _draw(*shape), _GRID: grid} | merged
        return
    if _SIZES in given:
        sizes = torch.tensor([[rows, columns]], dtype=torch.int32).repeat(images, 1)
        yield {"pixel_values": _draw(1, channels, patch, count * patch), _SIZES: sizes}
        return
    patches = {"pixel_values": _draw(images, rows * columns, numbers)}
    if _PLACES in given:
        down, right = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        yield patches | {_PLACES: torch.stack([right.flatten(), down.flatten()], -1)[None].repeat(images, 1, 1)}
        return
    mask = torch.ones(images, rows * columns, dtype=torch.long)
    masks = {"pixel_attention_mask": mask} if "pixel_attention_mask" in taken else {}
    yield patches | masks | {_SHAPES: torch.tensor([[rows, columns]]).repeat(images, 1)}


def are_images(batch: Mapping[str, Tensor]) -> bool:
    """Return whether a model of images is called with this."""
    return "pixel_values" in batch or _GRID in batch


def _first(size: Any) -> int:
    """Return the height of what is stated as one number or as two."""
    return int(size if isinstance(size, int) else size[0])


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
