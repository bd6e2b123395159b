"""How far runs of blocks move the residual stream, and the model's own output (measure/README.md, section 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.backward import draw_end_gradients, pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import ROWS, HiddenStream, open_stream
from ckpt_prune.measure.streams.readout import DrawnGradients
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model

SAMPLES = 16
"""Samples that are enough to compare runs of blocks by cosines: all are compared on the same ones. Gradients take time:
they are of `fisher.LIMITS`."""

Matrix = list[list[float]]
"""(L + 1, L + 1): at [a][b], of blocks a to b − 1 together; 0 if b is not above a."""


@dataclass(frozen=True)
class Distances:
    """How far every run of consecutive blocks moves stream and output.

    Attributes:
        cosine: mean over tokens of 1 − cos(h_a, h_b), with h_a the states that enter block a.
        divergence: ½ E[Σ_t (g_t·(h_a − h_b)_t)²], with g the gradients at h_b of labels drawn from the model's own
            predictions: to second order what the model's output moves by when the run is left out. None if it was not
            asked for.
    """

    cosine: Matrix
    divergence: Matrix | None = None


@dataclass
class EndDistances:
    """Adds up distances between the ends of blocks while gradients pass them.

    Attributes:
        samples: how many there are.
        cosine: as of `Distances`, once the ends are known.
    """

    samples: int
    cosine: Matrix = field(default_factory=list)
    _sums: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))

    def begin(self, stream: HiddenStream, states: Sequence[Tensor]) -> None:
        """Measure the cosines between all ends."""
        ends, tokens = len(states), 0
        sums = torch.zeros(ends, ends, dtype=torch.float64)
        for _, rows in stream.batches:
            counted = stream.counted(rows)
            batch = [stream.cut(rows, end[rows]).flatten(0, -2) for end in states]
            batch = batch if counted is None else [end[counted.flatten().cpu()] for end in batch]
            # A few tokens at all ends at a time: a processor's cache holds them.
            for start in range(0, len(batch[0]), ROWS):
                part = torch.stack([end[start : start + ROWS] for end in batch]).to(stream.factory.device)
                unit = functional.normalize(part.float(), dim=-1)
                sums += torch.einsum("atd,btd->ab", unit, unit).double().cpu()
                tokens += unit.shape[1]
        if not all_finite(sums):
            raise UserError(f"hidden states are not finite: the model overflows in {stream.factory.dtype}")
        self.cosine = (1 - sums / tokens).clamp_min(0).triu(1).tolist()
        self._sums = torch.zeros(ends, ends, dtype=torch.float64)

    def see(self, stream: HiddenStream, before: Sequence[Tensor], end: Tensor, drawn: Sequence[DrawnGradients]) -> None:
        """Add up (g·(h_a − h_b))² of all ends a before an end b; ends are seen from the last to the first.

        `before` holds the states at the ends a, `end` those at b, and `drawn` the gradients of every draw at b.
        """
        for _, rows in stream.batches:
            here = end[rows].to(stream.factory.device).float()
            for draw in drawn:
                gradient = draw.values[rows].to(here)
                for first, states in enumerate(before):
                    self._sums[first, len(before)] += draw.measure_shift(gradient, states[rows].to(here) - here)

    @property
    def distances(self) -> Distances:
        """The distances, once all ends are passed."""
        if not all_finite(self._sums):
            raise UserError("gradients at the ends of blocks are not finite: the model overflows")
        return Distances(self.cosine, (self._sums / 2 / self.samples).tolist())


def measure_distances(
    model: Model,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    gradients: bool,
    draws: int = 1,
    allocate: Allocate = allocate_in_memory,
) -> Distances:
    """Run the dense model over samples, and back if gradients are asked for, which predict divergences.

    Labels are drawn `draws` times, as for `measure_fisher`.

    Time: a run of every block, and about three more with gradients; L²/2 products of two vectors a token. Memory: a
    block, and hidden states at the ends of all blocks. All samples are run; `SAMPLES` are enough.
    """
    stream = open_stream(model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate)
    states, ends = states_at_ends(model, stream, allocate), EndDistances(len(samples))
    ends.begin(stream, states)
    if not gradients:
        return Distances(ends.cosine)
    end = states.pop()
    drawn = draw_end_gradients(stream.readout(), samples, end, allocate, draws)
    ends.see(stream, states, end, drawn)
    for block in track(range(model.blocks - 1, 0, -1), "gradients", total=model.blocks - 1):
        module, end = stream.factory.build_block(block, model.read_block(block)).requires_grad_(False), states.pop()
        for _ in pass_back(stream, module, block, end, [draw.values for draw in drawn]):
            pass
        ends.see(stream, states, end, drawn)
    return ends.distances
