"""Whole models on several devices: accelerate puts their parts on GPUs, in memory, and leaves the rest on disk."""

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.scratch import scratch_folder
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.extras import install
from ckpt_prune.options.machine import SpreadOptions
from ckpt_prune.recipe.sizes import parse_size

Device = int | str
"""A GPU's number, "cpu" or "disk", as accelerate calls them."""
_current: ContextVar["DeviceMap | None"] = ContextVar("device map", default=None)


@dataclass(frozen=True)
class DeviceMap:
    """Bytes that devices may take of a model; those without a limit take as much as is free."""

    limits: Mapping[Device, int]

    def room(self) -> dict[Device, int]:
        """Return the bytes of every device that may be used. Raises UserError if a limit names no device."""
        from accelerate.utils import get_max_memory

        free: dict[Device, int] = get_max_memory()
        unknown = [device for device in self.limits if device not in free]
        if unknown:
            raise UserError(f"--max-memory {unknown[0]}: this machine has {', '.join(map(str, free))}")
        return {device: self.limits.get(device, size) for device, size in free.items()}

    def load(self, loader: Any, source: Path | None, **options: Any) -> tuple[Any, Any]:
        """Return what `loader.from_pretrained` returns, the model's parts on devices that have room."""
        # accelerate says that parts are left on disk, which is what was asked for.
        logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_folder())
            try:
                model, info = loader.from_pretrained(
                    source, device_map="auto", max_memory=self.room(), offload_folder=str(folder), **options
                )
            except ValueError as error:
                if "whole model to the disk" in str(error):  # accelerate before 1.15
                    raise no_room(source) from error
                raise
            if model.device.type == "meta":
                raise no_room(source)
            # What had to be converted lies there; the rest is read from the checkpoint itself.
            weakref.finalize(model, stack.pop_all().close)
        return model, info


def no_room(source: Path | None) -> UserError:
    """Make the error of a model whose embeddings fit on no device."""
    return UserError(
        f"--device-map auto: no device has room for the embeddings of {source}, where its input goes: give more with "
        "--max-memory"
    )


def read_device_map(options: SpreadOptions) -> DeviceMap | None:
    """Return the device map that options ask for; None for one device."""
    if options.device_map is None:
        if options.max_memory:
            raise UserError("--max-memory goes with --device-map auto")
        return None
    if find_spec("accelerate") is None:
        raise UserError(f"--device-map needs accelerate: {install('devices')}")
    limits: dict[Device, int] = {}
    for limit in options.max_memory:
        name, _, size = limit.partition("=")
        try:
            value = parse_size("bytes", size).value
        except ValueError:
            value = None
        if value is None or not (name == "cpu" or name.isdigit()):
            raise UserError(f"--max-memory {limit}: expected cpu=SIZE or the number of a GPU, 0=SIZE, such as cpu=24GB")
        limits[int(name) if name.isdigit() else name] = value
    return DeviceMap(limits)


@contextmanager
def spread(options: SpreadOptions | None) -> Iterator[DeviceMap | None]:
    """Put whole models that are loaded inside this context on the devices that options name."""
    token = _current.set(None if options is None else read_device_map(options))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def current_device_map() -> DeviceMap | None:
    """Return where models are loaded in this context; None for one device."""
    return _current.get()
