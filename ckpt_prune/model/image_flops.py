"""FLOPs of models of images in stages, whose modules see ever fewer places, and whose attention reads some of them.

A stock class of the dense sizes runs over an image without weights, once. Attention stays as it is, and matrix products
and convolutions take FLOPs in proportion to their parameters.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt_prune.model.skeleton import stock_names


class _Applied(NamedTuple):
    """The work of a class on one image.

    Attributes:
        places: on-disk name of a weight → how often it is multiplied by.
        others: FLOPs of products that no weight takes part in.
    """

    places: Mapping[str, int]
    others: int


def image_flops(
    config: dict[str, Any], architecture: str, size: tuple[int, int], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the FLOPs of a stock class over one image.

    Args:
        config: config.json of the dense model.
        size: height and width of the image.
        shapes: on-disk name of a weight → its shape, also of a model with fewer columns.
    """
    applied = _apply(json.dumps(config), architecture, size)
    return applied.others + sum(2 * prod(shapes[name]) * places for name, places in applied.places.items())


@lru_cache(maxsize=16)
def _apply(config: str, architecture: str, size: tuple[int, int]) -> _Applied:
    from torch.utils.flop_counter import FlopCounterMode

    names = stock_names(json.loads(config), architecture)
    places: dict[str, int] = {}
    weighed = 0

    def note(name: str, wide: int) -> Any:
        def see(module: Any, _arguments: Any, output: torch.Tensor) -> None:
            nonlocal weighed
            seen = output.numel() // output.shape[wide]
            places[name] = places.get(name, 0) + seen
            weighed += 2 * module.weight.numel() * seen

        return see

    modules = [each for each in names.model.named_modules() if isinstance(each[1], nn.Linear | nn.Conv2d)]
    hooks = [
        module.register_forward_hook(note(names.saved_as(f"{path}.weight"), 1 if isinstance(module, nn.Conv2d) else -1))
        for path, module in modules
    ]
    channels = int(getattr(names.model.config, "num_channels", 3))
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), torch.device("meta"), counter:
            names.model(pixel_values=torch.empty(1, channels, *size))
    finally:
        for hook in hooks:
            hook.remove()
    return _Applied(places, counter.get_total_flops() - weighed)
