"""How many tokens a job is calibrated on."""

from itertools import chain

from ckpt_prune.job.prepared import Prepared

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


def widest_linear(prepared: Prepared) -> int:
    """Return the most inputs of a linear module in the blocks."""
    model = prepared.model
    weights = chain.from_iterable(map(model.weights, range(model.blocks)))
    return max(model.checkpoint.tensors[name].shape[1] for name in weights)
