"""Effects: how far pruning each site alone takes the model's own output."""

from collections.abc import Collection
from functools import partial

import torch

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import Statistics
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.transform.measured_effects import measure_effects
from ckpt_prune.transform.predicted_effects import predict_effects

SHALLOW = 12
"""Blocks up to which effects are measured, which takes L²/2 runs of blocks for a point where predicting takes L.

Predictions are of second order. They come near where a model is redundant, as deep ones are, and fall short of what
tiny ones lose (calibration/README.md, section 5).
"""


def effects_of(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    *,
    spaces: Collection[SpaceName],
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = in_memory,
    journal: Journal | None = None,
) -> dict[str, list[tuple[int, float]]]:
    """Effects of every site: measured in models of up to `SHALLOW` blocks, predicted in deeper ones.

    Args:
        model: the dense model.
        statistics: of it.
        samples: some of them are run.
        spaces: whose sites.
        device: where blocks run.
        compute_dtype: in which they run.
        allocate: makes the tensors that hold hidden states.
        journal: of the run, where measuring a block's sites is entered.

    Returns:
        As `measure_effects` and `predict_effects`.

    Raises:
        UserError: statistics lack moments, or the output is not finite.
    """
    how = predict_effects if model.blocks > SHALLOW else partial(measure_effects, journal=journal)
    return how(model, statistics, samples, spaces=spaces, device=device, compute_dtype=compute_dtype, allocate=allocate)
