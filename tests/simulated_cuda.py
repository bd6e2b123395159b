"""A pretended CUDA device: tensors in main memory that say they are on `cuda:0`, and refuse what CUDA refuses.

The arithmetic is the CPU's, so what comes out is equal to the last bit. What would stop on a GPU stops here: an operand
or an index left on the other device, a generator of the other device, NumPy looking into a tensor of the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ckpt_prune.parallel.devices import multiplies_bfloat16

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
MOVING = {"to", "cpu", "cuda"}
MIXING = MOVING | {"copy_", "set_", "__set__", "backward", "_has_compatible_shallow_copy_type"}
"""What takes tensors of both devices."""
INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}
"""What takes indices of main memory into a tensor of the device."""
LOOKING_IN = {"numpy", "__array__", "data_ptr", "__dlpack__"}
WITHOUT_NUMBERS = {"matmul", "__matmul__", "mm", "bmm", "addmm", "linear", "cat", "stack", "index_select", "gather"}
"""Where a lone number of main memory is not taken next to tensors of the device."""


class Pretended(Tensor):
    """A tensor that says it is on the device."""


class Pretending(TorchFunctionMode):
    """While it is on, `cuda` is a device."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property, which has the name
            name = func.__self__.__name__
            if name in ("device", "is_cuda", "is_cpu") and _there(args[0]):
                return {"device": CUDA, "is_cuda": True, "is_cpu": False}[name]
        if name == "_parse_to":  # of `Module.to`: it reads arguments and moves nothing
            return func(*args, **kwargs)
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in LOOKING_IN and any(map(_there, tensors)):
            raise TypeError(f"{name}: a tensor of cuda:0 cannot be looked into from main memory")
        _check(name, args, tensors)
        goes = _goes(name, args, kwargs, tensors)
        if goes and kwargs.get("generator") is not None:
            raise RuntimeError(f"{name}: expected a generator of cuda:0, but found one of cpu")
        args, kwargs = _map((args, kwargs), _in_truth)
        if name == "cuda":
            func, args, kwargs = Tensor.clone, args[:1], {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if name in MOVING and isinstance(result, Tensor) and goes != _there(tensors[0]):
                # The other device has memory of its own.
                result = result.clone() if result.data_ptr() == tensors[0].data_ptr() else result
        originals = {id(tensor) for tensor in tensors}
        with torch._C.DisableTorchFunction():
            return _map(result, lambda leaf: leaf if id(leaf) in originals else _dress(leaf, goes))


def _there(tensor: Tensor) -> bool:
    return isinstance(tensor, Pretended)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of tuples, lists and mappings; torch's own walk takes several times as long as its use here."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        changed = [_map(item, change) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)


def _in_truth(value: Any) -> Any:
    """The CPU for the pretended device."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


def _dress(value: Any, goes: bool) -> Any:
    if not isinstance(value, Tensor) or value.is_meta or goes == _there(value):
        return value
    return value.as_subclass(Pretended if goes else Tensor)


def _goes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> bool:
    if name in ("cpu", "cuda"):
        return name == "cuda"
    device = kwargs.get("device")
    if name == "to" and device is None:
        device = next((argument for argument in args[1:] if isinstance(argument, torch.device | str)), None)
        others = [argument for argument in args[1:] if isinstance(argument, Tensor)]
        device = CUDA if others and _there(others[0]) else CPU if others else device
    if device is not None:
        return torch.device(device).type == "cuda"
    return _there(tensors[0]) if name in MIXING and tensors else any(map(_there, tensors))


def _check(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Refuse tensors of both devices where CUDA does."""
    if name in MIXING or len(tensors) < 2:
        return
    if name in INDEXING:
        strange = not _there(args[0]) and any(isinstance(leaf, Pretended) for leaf in _leaves(args[1]))
    else:
        with torch._C.DisableTorchFunction():
            solid = {_there(tensor) for tensor in tensors if tensor.dim() or name in WITHOUT_NUMBERS}
        # A number of main memory goes with a tensor of the device, and not the other way round.
        strange = len(solid) > 1 or (solid == {False} and any(map(_there, tensors)))
    if strange:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found cpu and cuda:0")


@contextmanager
def pretended_cuda() -> Iterator[torch.device]:
    """Within it, `cuda` works as far as tensors go."""
    future = torch.__future__
    before = future.get_overwrite_module_params_on_conversion()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: multiplies_bfloat16(CPU))
        patch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 1)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CUDA build asks the driver
        # `Module.to` makes parameters of the type that they become.
        future.set_overwrite_module_params_on_conversion(True)
        try:
            with Pretending():
                yield CUDA
        finally:
            future.set_overwrite_module_params_on_conversion(before)
