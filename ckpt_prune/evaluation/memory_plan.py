"""What memory a whole model would take, and where: told from its config, before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ckpt_prune.architectures.skeleton import parse_config, shapes_alone
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.containers.remote import remote_class, remote_model_class, with_block_facts
from ckpt_prune.evaluation.device_map import Device, DeviceMap, no_room
from ckpt_prune.evaluation.whole_model import loading_class, read_config


@dataclass(frozen=True)
class Placed:
    """What one device would hold.

    Attributes:
        device: cpu, disk, or a GPU's number.
        parts: modules, named as accelerate's map names them.
        bytes: of their tensors.
        room: bytes that the device may take; None of a disk.
    """

    device: str
    parts: tuple[str, ...]
    bytes: int
    room: int | None


@dataclass(frozen=True)
class MemoryPlan:
    """Where the parts of a model would go.

    Attributes:
        folder: of the model, or of its config alone.
        dtype: of the tensors.
        devices: those that would hold something, in the order in which accelerate fills them.
    """

    folder: Path
    dtype: str
    devices: tuple[Placed, ...]

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        devices = [
            {"device": each.device, "bytes": each.bytes, "room": each.room, "parts": list(each.parts)}
            for each in self.devices
        ]
        return {"model": str(self.folder), "dtype": self.dtype, "devices": devices}

    def rows(self) -> list[list[str]]:
        """For a table: device, parts, bytes, room."""
        return [
            [name_of(each.device), str(len(each.parts)), human_bytes(each.bytes), _room(each.room)]
            for each in self.devices
        ]


@dataclass(frozen=True)
class MemoryPlans:
    """Where the parts of all models would go that are in memory together.

    Attributes:
        plans: one for each, in the order in which they are loaded.
    """

    plans: tuple[MemoryPlan, ...]

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"memory": [each.data() for each in self.plans]}


def memory_plans(folders: Sequence[Path], places: DeviceMap, dtype: torch.dtype | str) -> MemoryPlans:
    """Where the parts of models would go, from their configs alone: no weights are read, and there need be none.

    Args:
        folders: with their configs.
        places: where they may go.
        dtype: of their tensors; "auto" is that of each config.

    Raises:
        UserError: transformers refuses a config, or no device has room for a model's input.
    """
    room, plans = places.room(), []
    for folder in folders:
        plans.append(_planned(folder, dict(room), dtype))
        for placed in plans[-1].devices:
            device = int(placed.device) if placed.device.isdigit() else placed.device
            if device in room:
                room[device] -= placed.bytes
    return MemoryPlans(tuple(plans))


def _planned(folder: Path, room: dict[Device, int], asked: torch.dtype | str) -> MemoryPlan:
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, get_balanced_memory

    raw = read_config(folder)
    model: Any = _shapes(folder, raw, loading_class(folder, raw))
    dtype = model.dtype if isinstance(asked, str) else asked
    # accelerate takes a tensor for no larger than it is stored.
    model.to(dtype)
    whole = {"dtype": dtype, "no_split_module_classes": sorted(model._no_split_modules or ())}
    balanced = get_balanced_memory(model, room, low_zero=False, **whole)
    found = infer_auto_device_map(model, balanced, **whole)
    if next(iter(found.values())) == "disk":
        raise no_room(folder)
    sizes = compute_module_sizes(model, dtype=dtype)
    devices = []
    for device in dict.fromkeys(found.values()):
        parts = tuple(name for name, own in found.items() if own == device)
        devices.append(Placed(str(device), parts, sum(sizes[name] for name in parts), room.get(device)))
    return MemoryPlan(folder, str(dtype).removeprefix("torch."), tuple(devices))


def _shapes(folder: Path, raw: dict[str, Any], auto: str) -> nn.Module:
    """A whole model without memory, of the class that it would be loaded as."""
    ours, config = remote_class(raw, folder), parse_config(raw)
    with shapes_alone():
        if ours is not None:
            made: Any = remote_model_class(ours)(with_block_facts(config, ours))
        else:
            made = getattr(transformers, auto).from_config(config)
    made.tie_weights()
    model: nn.Module = made
    return model


def name_of(device: str) -> str:
    """What a device is called: GPUs have numbers in accelerate's maps."""
    return f"cuda:{device}" if device.isdigit() else device


def _room(room: int | None) -> str:
    return "-" if room is None else human_bytes(room)
