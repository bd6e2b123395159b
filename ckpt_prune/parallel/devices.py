"""Where the work is done."""

import torch

from ckpt_prune.common.errors import UserError
from ckpt_prune.parallel.group import process_group


def resolve_device(text: str) -> torch.device:
    """The device a `--device` names; auto takes a GPU where there is one. Processes on one machine take one each.

    Raises:
        UserError: not a device, or CUDA that is not there.
    """
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


def resolve_compute_dtype(named: str, device: torch.device, stored: torch.dtype = torch.float32) -> torch.dtype:
    """The type that a `--compute-dtype` names; auto takes bfloat16 for a model stored in it, where that is faster.

    Perplexities then agree within what other samples change.

    Args:
        named: auto, or a floating type.
        device: where the model runs.
        stored: type of its weights; without one auto is float32.
    """
    if named != "auto":
        dtype: torch.dtype = getattr(torch, named)
        return dtype
    return torch.bfloat16 if stored == torch.bfloat16 and multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bfloat16: others emulate them, slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Versions of torch before this function cannot tell.
    has: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16"))
