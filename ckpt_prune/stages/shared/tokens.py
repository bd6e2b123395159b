"""How many tokens a job is calibrated on."""

from itertools import chain

from ckpt_prune.common.errors import UserError
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.model.model import Model

INPUTS = "the inputs of every block's layers"
"""The words for what most stages measure."""


def calibration_tokens(prepared: Prepared) -> int:
    if prepared.statistics is not None and prepared.statistics.index.tokens:
        return prepared.statistics.index.tokens
    return 0 if prepared.live is None else len(prepared.live.samples) * prepared.live.samples.tokens


def sample_tokens(prepared: Prepared) -> int:
    """Return how many tokens one of its samples has."""
    if prepared.statistics is not None:
        return prepared.statistics.index.window
    return 0 if prepared.live is None else prepared.live.samples.tokens


def check_linears(model: Model, work: str) -> None:
    """Refuse a model without a space in its blocks, whose linear modules `work` would have to name."""
    if not any(map(model.weights, range(model.blocks))):
        raise UserError(
            f"no linear module in the blocks of {model.family.model_type} can be {work}: "
            f"{', '.join(model.family.spaces)} alone can be pruned, as recipe ridge does"
        )


def widest_linear(prepared: Prepared) -> int:
    """Return the most inputs of a linear module in the blocks."""
    model = prepared.model
    weights = chain.from_iterable(map(model.weights, range(model.blocks)))
    return max(model.checkpoint.tensors[name].shape[1] for name in weights)
