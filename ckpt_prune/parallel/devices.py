"""Device and number format that a command computes with."""

import hashlib
import json
import time
from contextlib import suppress
from functools import cache

import torch

from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.machine import processor_name
from ckpt_prune.common.user_cache import user_cache
from ckpt_prune.parallel.group import process_group

_GAIN = 1.25
"""By how much bfloat16 must be faster."""


def resolve_device(text: str) -> torch.device:
    """Return the device of `--device`. "auto" takes a GPU if there is one; processes on one machine take one each."""
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    if text == "cuda" and process_group().size > 1:
        text = f"cuda:{process_group().local}"
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UserError(f"--device {text}: expected auto, cpu, cuda or cuda:0, cuda:1, ...")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UserError(f"--device {text}: this machine has {count} usable CUDA devices: say --device cpu")
    return torch.device(text)


def resolve_compute_dtype(option: str, device: torch.device, stored: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype of `--compute-dtype`: of that name, or for "auto" bfloat16 where it is faster, else float32.

    It is taken for a model that is stored in bfloat16 (`stored`). Perplexities change less by it than by taking other
    samples. All processes take what the first one finds.
    """
    if option != "auto":
        dtype: torch.dtype = getattr(torch, option)
        return dtype
    if stored != torch.bfloat16 or not process_group().once(lambda: multiplies_bfloat16(device)):
        return torch.float32
    return torch.bfloat16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return True if products of bfloat16 are faster than those of float32 on a device.

    A GPU says whether it has the instructions. A processor is timed: having them, it can still be slower.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    single, brain = time_products()
    return _GAIN * brain < single


@cache
def time_products() -> tuple[float, float]:
    """Return the seconds of one product on this processor in float32 and in bfloat16.

    They are measured once, and kept in the user's cache: on a busy machine another measurement may come out otherwise,
    and the same command must compute the same, above all where it resumes a run.
    """
    facts = json.dumps([torch.__version__, processor_name(), torch.get_num_threads()])
    place = user_cache("products") / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError):
        single, brain = map(float, json.loads(place.read_bytes()))
        return single, brain
    seconds = _time_products()
    with suppress(OSError, UserError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps(seconds) + "\n")
    return seconds


def _time_products() -> tuple[float, float]:
    seconds = [float("inf"), float("inf")]
    factors = [torch.ones(256, 1024, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for turn in range(4):
        for index, factor in enumerate(factors):
            start = time.perf_counter()
            factor @ factor.T
            if turn > 0:  # the first one makes the kernel
                seconds[index] = min(seconds[index], time.perf_counter() - start)
    return seconds[0], seconds[1]
