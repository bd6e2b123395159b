"""States inside a whole model, seen by hooks: slow, every token kept, sums in float64."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]


@torch.no_grad()
def inputs_of(model: nn.Module, modules: Iterable[str], windows: Tensor) -> dict[str, Array]:
    """Input of each module as (windows * tokens, width), one window at a time, by module path."""
    seen: dict[str, list[Tensor]] = {name: [] for name in modules}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0][0]))
        for name in seen
    ]
    for window in windows:
        model(input_ids=window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows).double().numpy() for name, rows in seen.items()}
