"""How large the values become that a graph in float16 holds: beyond 65,504 there is only infinity.

onnxruntime's CPU provider computes such a graph in float32 between casts, so that what it returns says nothing of a GPU
or a browser, which hold every value in float16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST = torch.finfo(torch.float16).max
"""65,504."""
_ATEN = torch.ops.aten
_PRODUCTS = {
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default),
    *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.convolution.default, _ATEN.conv2d.default),
}
"""Operations that are slow in float16 on a CPU. They are summed in float32 here, as on a GPU."""
_ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class HalfRange:
    """The largest value in float16 that a model computes.

    Attributes:
        largest: its absolute value; infinite if a product or sum was beyond the range.
        place: the module that computes it, or the name of a weight.
    """

    largest: float
    place: str

    @property
    def fits(self) -> bool:
        return self.largest <= LARGEST

    def describe(self) -> str:
        if self.fits:
            return f"values in float16 reach {self.largest:,.0f} of {LARGEST:,.0f}, in {self.place}"
        size = f"{self.largest:,.0f}" if math.isfinite(self.largest) else f"more than {LARGEST:,.0f}"
        return (
            f"{self.place} has values of {size}, and float16 ends at {LARGEST:,.0f}: a GPU or a browser gets NaN. Take "
            "fp32, int8 or int4, which compute in float32"
        )


def measure_half_range(model: nn.Module, run: Callable[[], Any]) -> HalfRange:
    """Run a model in float16, and find the largest of the values that it holds in float16.

    Values that the model itself computes in float32 do not count. The first one that is out of range is named.

    Args:
        model: with parameters in float16, on the CPU.
        run: runs it.
    """
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return HalfRange(math.inf, name)
    watch = _Watch()
    handles = []
    for name, module in model.named_modules():
        place = name or type(module).__name__
        handles.append(module.register_forward_pre_hook(partial(watch.enter, place)))
        handles.append(module.register_forward_hook(watch.leave))
    try:
        with torch.no_grad(), watch:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return HalfRange(watch.largest, watch.place)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every tensor in float16 that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest, self.place = 0.0, ""
        self._modules: list[str] = []

    def enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self._modules.append(name)

    def leave(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and all(leaf.dtype == torch.float16 for leaf in _tensors(args)):
            wide = func(*(arg.float() if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
            self._note(wide, args)
            return wide.half()
        if _ATTENTION in func.__name__ and args[0].dtype == torch.float16:
            self._note(_scores(args[0], args[1], kwargs.get("scale")), args)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.dtype == torch.float16:
                self._note(tensor, (args, kwargs))
        return result

    def _note(self, result: Tensor, given: Any) -> None:
        """Note a result. Where a mask's fill, the least number or infinity, is given, the result may be beyond it."""
        size = result.abs().amax().item() if result.numel() else 0.0
        if not size < LARGEST:
            inside = result[result.abs() < LARGEST]
            if _has_fill(given) or len(inside) + int((result == -LARGEST).sum()) == result.numel():
                size = inside.abs().amax().item() if len(inside) else 0.0
            elif math.isnan(size):
                size = math.inf
        if self.largest < size and self.largest <= LARGEST:  # what follows is computed from infinity
            self.largest, self.place = size, self._modules[-1] if self._modules else "the model"


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _has_fill(values: Any) -> bool:
    """Return True if numbers or tensors hold what masks are filled with."""
    numbers = [leaf for leaf in tree_leaves(values) if isinstance(leaf, float)]
    tensors = [leaf for leaf in _tensors(values) if leaf.is_floating_point()]
    return any(not -LARGEST < number < math.inf for number in numbers) or any(
        not bool((leaf > -LARGEST).all() and leaf.isfinite().all()) for leaf in tensors
    )


def _scores(queries: Tensor, keys: Tensor, scale: float | None) -> Tensor:
    """Return the products of queries and keys, which graphs hold: (B, heads, T, head_dim) each."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1).float()
    return queries.float() @ keys.mT * (queries.shape[-1] ** -0.5 if scale is None else scale)
