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
from ckpt_prune.job.sizes import parse_size
from ckpt_prune.options import SpreadOptions

Device = int | str
"""A GPU's number, "cpu" or "disk", as accelerate calls them."""
_spread: ContextVar["DeviceMap | None"] = ContextVar("spread", default=None)


@dataclass(frozen=True)
class DeviceMap:
    """Where accelerate may put the parts of a model.

    Attributes:
        limits: device → bytes that it may take; of devices that are not named as much as is free.
    """

    limits: Mapping[Device, int]

    @classmethod
    def of(cls, options: SpreadOptions) -> "DeviceMap | None":
        """What options ask for; None for one device.

        Raises:
            UserError: a limit without a map, one that is none, or accelerate is not installed.
        """
        if options.device_map is None:
            if options.max_memory:
                raise UserError("--max-memory goes with --device-map auto")
            return None
        if find_spec("accelerate") is None:
            raise UserError("--device-map needs accelerate: pip install 'ckpt-prune[devices]'")
        return cls(dict(_limit(each) for each in options.max_memory))

    def room(self) -> dict[Device, int]:
        """Bytes of every device that may be used."""
        from accelerate.utils import get_max_memory

        free: dict[Device, int] = get_max_memory()
        unknown = [each for each in self.limits if each not in free]
        if unknown:
            raise UserError(f"--max-memory {unknown[0]}: this machine has {', '.join(map(str, free))}")
        return {device: self.limits.get(device, size) for device, size in free.items()}

    def loaded(self, loader: Any, source: Path | None, **options: Any) -> tuple[Any, Any]:
        """What `loader.from_pretrained` returns, its parts where they have room."""
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_folder())
            with _quiet_accelerate():
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
    """What is said where a model's input has no device to go to."""
    return UserError(
        f"--device-map auto: no device has room for the embeddings of {source}, where its input goes: give more with "
        "--max-memory"
    )


@contextmanager
def _quiet_accelerate() -> Iterator[None]:
    """Hold back that parts are left on disk, which is what was asked for."""
    logger = logging.getLogger("accelerate.big_modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _limit(text: str) -> tuple[Device, int]:
    name, _, size = text.partition("=")
    try:
        value = parse_size("bytes", size).value
    except ValueError:
        value = None
    if value is None or not (name == "cpu" or name.isdigit()):
        raise UserError(f"--max-memory {text}: expected cpu=SIZE or the number of a GPU, 0=SIZE, such as cpu=24GiB")
    return int(name) if name.isdigit() else name, value


@contextmanager
def spread(options: SpreadOptions | None) -> Iterator["DeviceMap | None"]:
    """Let whole models that are loaded inside be put where there is room.

    Raises:
        UserError: as of `DeviceMap.of`.
    """
    token = _spread.set(None if options is None else DeviceMap.of(options))
    try:
        yield _spread.get()
    finally:
        _spread.reset(token)


def device_map() -> DeviceMap | None:
    """What models are loaded by here; None for one device."""
    return _spread.get()
