"""A plan of the devices that parts of whole models would go to, from their configs alone: no weights are needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ckpt_prune.evaluation.device_map import Device, DeviceMap, no_room
from ckpt_prune.evaluation.results import DeviceShare, MemoryPlan, MemoryPlans
from ckpt_prune.evaluation.whole_model import loading_class, read_config
from ckpt_prune.model.containers.remote import remote_class, remote_model_class, with_block_facts
from ckpt_prune.model.skeleton import on_meta_device, parse_config


def memory_plans(folders: Sequence[Path], places: DeviceMap, dtype: torch.dtype | str) -> MemoryPlans:
    """Plan where the parts of models go that are in memory together, in the order in which they are loaded."""
    room, plans = places.room(), []
    for folder in folders:
        plan = _plan(folder, dict(room), dtype)
        for share in plan.devices:
            device = int(share.device) if share.device.isdigit() else share.device
            if device in room:
                room[device] -= share.bytes
        plans.append(plan)
    return MemoryPlans(tuple(plans))


def _plan(folder: Path, room: dict[Device, int], asked: torch.dtype | str) -> MemoryPlan:
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, get_balanced_memory

    model = _build_without_memory(folder)
    dtype = model.dtype if isinstance(asked, str) else asked
    # accelerate takes a tensor for no larger than it is stored.
    model.to(dtype)
    options = {"dtype": dtype, "no_split_module_classes": sorted(model._no_split_modules or ())}
    balanced = get_balanced_memory(model, room, low_zero=False, **options)
    device_of_part = infer_auto_device_map(model, balanced, **options)
    if next(iter(device_of_part.values())) == "disk":
        raise no_room(folder)
    sizes = compute_module_sizes(model, dtype=dtype)
    shares = []
    for device in dict.fromkeys(device_of_part.values()):
        parts = tuple(part for part, place in device_of_part.items() if place == device)
        shares.append(DeviceShare(str(device), sum(sizes[part] for part in parts), room.get(device), parts))
    return MemoryPlan(folder, str(dtype).removeprefix("torch."), tuple(shares))


def _build_without_memory(folder: Path) -> Any:
    """Build a whole model on the meta device, of the class that it would be loaded as."""
    raw = read_config(folder)
    remote, config = remote_class(raw, folder), parse_config(raw)
    model: Any
    with on_meta_device():
        if remote is not None:
            model = remote_model_class(remote)(with_block_facts(config, remote))
        else:
            model = getattr(transformers, loading_class(folder, raw)).from_config(config)
    model.tie_weights()
    return model
