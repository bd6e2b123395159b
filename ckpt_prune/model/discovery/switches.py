"""Finds config keys that stop a class from deriving the width of its MLPs."""

from typing import Any

import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.discovery.proofs import is_same
from ckpt_prune.model.discovery.twin import Twin, make_skeleton_config, run
from ckpt_prune.model.skeleton import build_skeleton, parse_config, stock_class


class WidthSwitchError(Exception):
    """A class states a width under other values of its config: it is to be looked at under them.

    Attributes:
        values: config keys and values.
    """

    def __init__(self, values: dict[str, bool]) -> None:
        super().__init__(str(values))
        self.values = values


def find_switch(twin: Twin, weight: str, axis: int) -> dict[str, bool]:
    """Return the key and value under which some key states a width, and the class computes the same; {} if none does.

    Args:
        weight: a parameter of the twin with an axis of this width.
    """
    shapes = {name: each.shape for name, each in twin.model.named_parameters()}
    for key, value in twin.config.items():
        if isinstance(value, bool):
            switched = twin.config | {key: not value}
            width = _shapes(switched, twin).get(weight, shapes[weight])[axis]
            sizes = [name for name, size in switched.items() if size == width != shapes[weight][axis]]
            for stated in (switched | {name: shapes[weight][axis]} for name in sizes):
                if _shapes(stated, twin) == shapes and _computes_the_same(stated, twin):
                    return {key: not value}
    return {}


def _shapes(config: dict[str, Any], twin: Twin) -> dict[str, torch.Size]:
    try:
        skeleton = build_skeleton(parse_config(config), twin.architecture)
    except UserError:
        return {}
    return {name: each.shape for name, each in skeleton.named_parameters()}


@torch.no_grad()
def _computes_the_same(config: dict[str, Any], twin: Twin) -> bool:
    parsed = make_skeleton_config(config)
    model = stock_class(twin.architecture, parsed)(parsed).float().eval()
    model.load_state_dict(twin.model.state_dict())
    return is_same(run(model, twin.batch), twin.outputs())
