"""Random inputs for classes that read images: whole images, or patches and their places."""

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_prune.model.context import height_and_width

_READ = ("pixel_values", "flattened_patches", "hidden_states")
"""Arguments with numbers of images, or of their patches."""
_PLACES, _SHAPES, _SIZES, _TILES = "pixel_position_ids", "spatial_shapes", "target_sizes", "aspect_ratio_mask"
"""Arguments with the places of patches that an image processor has cut out (Gemma 4, SigLIP 2, MiniCPM), or of tiles
(Llama 3.2). Those of Qwen-VL and others end in `grid_thw`."""

_PATCH = 16
"""Side of patches where no config key states it."""


def image_inputs(model: Any, images: int, size: tuple[int, int]) -> Iterator[dict[str, Tensor]]:
    """Yield random images in the forms in which a model may take them, alone or with their places; nothing if in none.

    Signatures do not tell whether numbers of a patch stand in one axis or in three: callers take what the model runs.

    Args:
        model: of transformers, also without weights.
        images: how many.
        size: height and width, multiples of twice a patch's.
    """
    taken, config = signature(model.forward).parameters, model.config
    name = next((each for each in _READ if each in taken), None)
    if name is None:
        return
    channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
    patch, _ = height_and_width(getattr(config, "patch_size", _PATCH))
    rows, columns = (length // patch for length in size)
    count, modules = images * rows * columns, list(model.modules())
    cutting = [each for each in modules if isinstance(each, nn.Conv2d | nn.Conv3d) and each.in_channels == channels]
    reading = [*cutting, *(each for each in modules if isinstance(each, nn.Linear))]
    of_patch = reading[0].weight[0].numel() if reading else 0
    patches = {name: _draw(images, rows * columns, of_patch)}
    down, right = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    grid = next((each for each in taken if each.endswith("grid_thw")), None)
    if grid is not None:
        merged = {"merge_sizes": torch.full((images,), 2)} if "merge_sizes" in taken else {}
        places, square = torch.tensor([[1, rows, columns]]).repeat(images, 1), (channels, patch, patch)
        for shape in ((count, of_patch), (count, *square), (1, count, *square)):
            yield {name: _draw(*shape), grid: places} | merged
        side = getattr(config, "spatial_merge_size", 1)  # what becomes one token is handed over as one
        token = (patch * side, patch * side, channels)
        yield {name: _draw(count // side**2, *token), grid: places // torch.tensor([1, side, side])}
    elif _SIZES in taken:
        sizes = torch.tensor([[rows, columns]], dtype=torch.int32).repeat(images, 1)
        yield {name: _draw(1, channels, patch, count * patch), _SIZES: sizes}
    elif _PLACES in taken:
        yield patches | {_PLACES: torch.stack([right.flatten(), down.flatten()], -1)[None].repeat(images, 1, 1)}
    elif _SHAPES in taken:
        mask = torch.ones(images, rows * columns, dtype=torch.long)
        masks = {"pixel_attention_mask": mask} if "pixel_attention_mask" in taken else {}
        yield patches | masks | {_SHAPES: torch.tensor([[rows, columns]]).repeat(images, 1)}
    elif _TILES in taken:
        tiles = {_TILES: torch.ones(images, 1, config.max_num_tiles, dtype=torch.long)}
        first = {"aspect_ratio_ids": torch.ones(images, 1, dtype=torch.long)}
        yield {name: _draw(images, 1, config.max_num_tiles, channels, *size)} | first | tiles
    elif name == "flattened_patches":  # its row and column stand before the numbers of each
        numbered = torch.stack([down.flatten(), right.flatten()], -1)[None].repeat(images, 1, 1) + 1.0
        yield {name: torch.cat([numbered, patches[name]], -1)}
    else:
        yield from ({name: _draw(images, channels, *size)}, patches)


def are_images(batch: Mapping[str, Tensor]) -> bool:
    """Return whether a model of images is called with this."""
    return not {"input_ids", "input_features"} & batch.keys()


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
