"""Whether new tensors fit their dtype."""

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.job.step import Tensors


def check_overflow(before: Tensors, after: Tensors) -> None:
    """Refuse a block whose new tensors do not fit their dtype."""
    for name, tensor in after.items():
        if tensor is not before.get(name) and not all_finite(tensor):
            raise UserError(f"{name}: the new tensor does not fit its dtype {tensor.dtype}: use a gentler recipe")
