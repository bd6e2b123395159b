"""Device and number format that a command computes with."""

import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel.group import process_group


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

    It is faster for a model that is stored in bfloat16 (`stored`) on a device that multiplies it. Perplexities change
    less by it than by taking other samples.
    """
    if option != "auto":
        dtype: torch.dtype = getattr(torch, option)
        return dtype
    return torch.bfloat16 if stored == torch.bfloat16 and multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bfloat16; others emulate them, slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Versions of torch before this function cannot tell.
    has: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16"))
