"""2:4 by torch's semi-structured kernels: whether a model can, and packing its weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.sparsity.zeros import count_zeros

PATTERN = "2:4"
CAPABILITY = (8, 0)
"""Of the oldest GPUs whose tensor cores know 2:4."""
MULTIPLE = 64
"""Rows and columns that the kernels take, in float16, are multiples of it at most."""


def why_not(checkpoint: Checkpoint, device: str, dtype: GraphType | None) -> str | None:
    """Why a checkpoint is not timed by these kernels; None where it is.

    Args:
        checkpoint: of which the linear weights are looked through, until one holds the pattern.
        device: of torch's.
        dtype: what is asked for.
    """
    kind = torch.device(device)
    if kind.type != "cuda":
        return f"torch's kernels for 2:4 run on NVIDIA GPUs alone, and this is {device}"
    if torch.cuda.get_device_capability(kind) < CAPABILITY:
        return f"{device} has no kernels for 2:4: its compute capability is below {'.'.join(map(str, CAPABILITY))}"
    if dtype != "fp16":
        return "torch's kernels for 2:4 compute in fp16: say --dtype fp16"
    matrices = (name for name, info in checkpoint.tensors.items() if len(info.shape) == 2 and _fits(info.shape))
    if not any(_holds(checkpoint.read([name])[name]) for name in matrices):
        return "none of its weights holds 2:4"
    return None


def pack(module: nn.Module, packed: Callable[[Tensor], Tensor] = torch.sparse.to_sparse_semi_structured) -> int:
    """Pack the weights of a model's linear modules that hold 2:4, in place.

    Args:
        module: in float16, on a GPU that can.
        packed: what packs a weight.

    Returns:
        How many there are.
    """
    count = 0
    for linear in module.modules():
        if isinstance(linear, nn.Linear) and _fits(tuple(linear.weight.shape)) and _holds(linear.weight.detach().cpu()):
            linear.weight = nn.Parameter(packed(linear.weight.detach().contiguous()), requires_grad=False)
            count += 1
    return count


def _fits(shape: tuple[int, ...]) -> bool:
    return all(size % MULTIPLE == 0 for size in shape)


def _holds(weight: Tensor) -> bool:
    return count_zeros("", weight).holds(PATTERN)
