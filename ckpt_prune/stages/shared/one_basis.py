"""Whether the residual stream of a model has one basis in all blocks."""

from ckpt_prune.model.containers.checking import check_stock
from ckpt_prune.model.model import Model
from ckpt_prune.stages.hidden.sliced_checkpoint import SLICING_KEY
from ckpt_prune.stages.rotation.rotated_checkpoint import CONFIG_KEY


def check_one_basis(model: Model) -> None:
    """Refuse an output whose residual stream changes its basis from block to block."""
    if any(getattr(model.config, key, None) is not None for key in (CONFIG_KEY, SLICING_KEY)):
        check_stock(model, "its residual stream turns between blocks, which only the run that made it knew")
