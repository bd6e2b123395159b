"""How far blocks move the residual stream: what a run of them is worth to it, and to the model's own output.

See calibration/README.md, section 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.architectures.model import Model
from ckpt_prune.calibration.backward import pass_back, states_at_ends
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.fisher import gradients_at_the_end
from ckpt_prune.calibration.moments import ROWS
from ckpt_prune.calibration.readout import Drawn, Readout
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.errors import UserError
from ckpt_prune.progress import track

SAMPLES = 16
"""Samples that are enough to compare runs of blocks by cosines: all are compared on the same ones. Gradients take time:
they are of `fisher.LIMITS`."""

Matrix = list[list[float]]
"""(L + 1, L + 1): at [a][b], of blocks a to b − 1 together; 0 where b is not above a."""


@dataclass(frozen=True)
class Distances:
    """What every run of consecutive blocks does.

    Attributes:
        cosine: mean over tokens of 1 − cos(h_a, h_b), with h_a the states that enter block a.
        divergence: ½ E[Σ_t (g_t·(h_a − h_b)_t)²], with g the gradients at h_b of labels drawn from the model's own
            predictions: to second order what the model's output moves by when the run is left out. None where it was
            not asked for.
    """

    cosine: Matrix
    divergence: Matrix | None = None


def measure_distances(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    gradients: bool,
    allocate: Allocate = in_memory,
) -> Distances:
    """Run the dense model over samples, and back where gradients are asked for.

    Time: a run of every block, and about three more with gradients; L²/2 products of two vectors a token. Memory: a
    block, and hidden states at the ends of all blocks.

    Args:
        model: the dense model.
        samples: all are run; `SAMPLES` are enough.
        device: where blocks run.
        compute_dtype: in which they run.
        gradients: whether to predict divergences.
        allocate: makes the tensors that hold hidden states.

    Raises:
        UserError: hidden states or gradients are not finite.
    """
    checkpoint = model.checkpoint
    factory = BlockFactory(model, device=device, dtype=compute_dtype)
    stream = HiddenStream(factory, checkpoint.tensors, checkpoint.read, samples, allocate=allocate)
    states = states_at_ends(model, stream, allocate)
    cosine = _cosines(stream, states)
    if not all(value == value for row in cosine for value in row):
        raise UserError(f"hidden states are not finite: the model overflows in {compute_dtype}")
    return Distances(cosine, _divergences(model, stream, states, samples, allocate) if gradients else None)


def _cosines(stream: HiddenStream, states: Sequence[Tensor]) -> Matrix:
    ends, tokens = len(states), 0
    sums = torch.zeros(ends, ends, dtype=torch.float64)
    for _, rows in stream.batches:
        own = [each[rows].flatten(0, -2) for each in states]
        # A few tokens at all ends at a time: a processor's cache holds them.
        for start in range(0, len(own[0]), ROWS):
            part = torch.stack([each[start : start + ROWS] for each in own]).to(stream.factory.device)
            unit = functional.normalize(part.float(), dim=-1)
            sums += torch.einsum("atd,btd->ab", unit, unit).double().cpu()
            tokens += unit.shape[1]
    return (1 - sums / tokens).clamp_min(0).where(sums == sums, torch.nan).triu(1).tolist()


def _divergences(
    model: Model, stream: HiddenStream, states: list[Tensor], samples: Samples, allocate: Allocate
) -> Matrix:
    factory, ends = stream.factory, len(states)
    drawn = gradients_at_the_end(
        Readout(factory, model.checkpoint.tensors, model.checkpoint.read), samples, states[-1], allocate
    )
    found = torch.zeros(ends, ends, dtype=torch.float64)
    _add_divergences(found, stream, states, drawn)
    for block in track(range(model.blocks - 1, 0, -1), "gradients", total=model.blocks - 1):
        states.pop()
        module = factory.block(block, model.read_block(block)).requires_grad_(False)
        for _ in pass_back(stream, module, block, states[-1], [each.values for each in drawn], ()):
            pass
        _add_divergences(found, stream, states, drawn)
    if not bool(torch.isfinite(found).all()):
        raise UserError(f"gradients are not finite: the model overflows in {factory.dtype}")
    return (found / 2 / len(samples)).tolist()


def _add_divergences(found: Tensor, stream: HiddenStream, states: Sequence[Tensor], drawn: Sequence[Drawn]) -> None:
    """Σ (g·(h_a − h_b))² of all a for the b that the last of the states is."""
    last = len(states) - 1
    for _, rows in stream.batches:
        end = states[last][rows].to(stream.factory.device).float()
        for own in drawn:
            gradient = own.values[rows].to(end)
            for first in range(last):
                moved = (gradient * (states[first][rows].to(end) - end)).sum(-1).double()
                # Over all tokens of a sample where it has one prediction, else token by token.
                moved = moved.sum(-1) if own.whole else moved
                found[first, last] += own.weight * float(moved.square().sum())
