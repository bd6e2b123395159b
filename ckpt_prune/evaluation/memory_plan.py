"""A plan of the devices that parts of whole models would go to, from their configs alone: no weights are needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.evaluation.device_map import Device, DeviceMap, no_room
from ckpt_prune.evaluation.results import PlainResult
from ckpt_prune.evaluation.whole_model import loading_class_of, read_config
from ckpt_prune.model.containers.remote import remote_class, remote_model_class, with_block_facts
from ckpt_prune.model.skeleton import on_meta_device, parse_config
from ckpt_prune.show.section import Table


def memory_plans(folders: Sequence[Path], places: DeviceMap, dtype: torch.dtype | str) -> PlainResult:
    """Plan where the parts of models go that are in memory together, in the order in which they are loaded.

    JSON has for each model its name and type, and its devices in the order in which they are filled. A device is cpu,
    disk or a GPU's number. It has the bytes and the names of its parts, and how many bytes it may take (`room`, null
    for a disk).
    """
    room, plans, parts = places.room(), [], list[Table | str]()
    for folder in folders:
        used, devices = _plan(folder, dict(room), dtype)
        rows = []
        for share in devices:
            name, free = share["device"], share["room"]
            device = int(name) if name.isdigit() else name
            if device in room:
                room[device] -= share["bytes"]
            shown = f"cuda:{name}" if name.isdigit() else name
            free = "-" if free is None else human_bytes(free)
            rows.append([shown, str(len(share["parts"])), human_bytes(share["bytes"]), free])
        plans.append({"model": str(folder), "dtype": used, "devices": devices})
        parts += [f"{folder}, {used}:", Table(["device", "parts", "bytes", "room"], rows)]
        if any(share["device"] == "disk" for share in devices):
            parts.append("what is left on disk is read again for every batch")
    return PlainResult({"memory": plans}, parts)


def _plan(folder: Path, room: dict[Device, int], asked: torch.dtype | str) -> tuple[str, list[dict[str, Any]]]:
    """Return the type of a model's weights, and what each device would hold."""
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
        parts = [part for part, place in device_of_part.items() if place == device]
        size = sum(sizes[part] for part in parts)
        shares.append({"device": str(device), "bytes": size, "room": room.get(device), "parts": parts})
    return str(dtype).removeprefix("torch."), shares


def _build_without_memory(folder: Path) -> Any:
    """Build a whole model on the meta device, of the class that it would be loaded as."""
    raw = read_config(folder)
    remote, config = remote_class(raw, folder), parse_config(raw)
    model: Any
    with on_meta_device():
        if remote is not None:
            model = remote_model_class(remote)(with_block_facts(config, remote))
        else:
            model = getattr(transformers, loading_class_of(folder, raw)).from_config(config)
    model.tie_weights()
    return model
