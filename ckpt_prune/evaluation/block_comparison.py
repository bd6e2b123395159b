"""Two models of one shape run side by side, block by block; neither is ever loaded as a whole."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.similarity import Similarity, StateSimilarity
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.readout import measure_divergences
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory


@dataclass(frozen=True)
class SharesOfError:
    """The error of a block's output that comes from its input, and the error of its own weights (LaCo eq. 4 to 7).

    With φ the block, θ its weights, h what enters it, and ' of the model that is compared; norms are over all tokens.

    Attributes:
        input_error: ‖φ(h; θ) − φ(h'; θ)‖ / ‖φ(h; θ)‖, carried on from the blocks before.
        local_error: ‖φ(h'; θ) − φ(h'; θ')‖ / ‖φ(h; θ)‖, of this block's own weights: ε_k on these samples.
        growth: ‖φ(h; θ) − φ(h'; θ)‖ / ‖h − h'‖, the least that K_k can be; None where h' = h.
    """

    input_error: float | None
    local_error: float | None
    growth: float | None

    @classmethod
    def of(cls, entering: float, carried: float, own: float, energy: float) -> "SharesOfError":
        """Return shares of sums of squares."""

        def root(part: float, whole: float) -> float | None:
            return (part / whole) ** 0.5 if whole > 0 else None

        return cls(root(carried, energy), root(own, energy), root(carried, entering))


@dataclass(frozen=True)
class BlockComparison:
    """How alike the hidden states are that leave a block, and where their difference comes from.

    Attributes:
        reference: the reference's blocks that it stands for, if these have other numbers: more than one where it lost
            blocks behind this one.
    """

    block: int
    states: Similarity
    errors: SharesOfError
    reference: Sequence[int] = ()

    @property
    def partners(self) -> list[int]:
        return [*self.reference] or [self.block]

    def data(self) -> dict[str, Any]:
        return {"block": self.block, "reference_blocks": self.partners, **asdict(self.states), **asdict(self.errors)}


@dataclass(frozen=True)
class Comparison:
    """Two models on the same samples.

    Attributes:
        divergence: of the outputs: KL(reference ‖ model) in nats, the mean over positions and samples; without a head
            ‖h′ − h‖² / ‖h‖² of the last hidden states.
        logits: whether there is a head.
        samples, tokens: how many windows or images, and tokens of each.
    """

    reference: Path
    model: Path
    blocks: Sequence[BlockComparison] = field(repr=False)
    divergence: float
    logits: bool
    samples: int
    tokens: int

    def data(self) -> dict[str, Any]:
        return {
            "reference": str(self.reference),
            "model": str(self.model),
            "samples": self.samples,
            "tokens_per_sample": self.tokens,
            "measure": "kl" if self.logits else "relative_error",
            "divergence": self.divergence,
            "blocks": [each.data() for each in self.blocks],
        }


def compare(
    reference: ModelView,
    model: ModelView,
    samples: Samples,
    *,
    compute_dtype: torch.dtype = torch.float32,
    allocate: Allocate = allocate_in_memory,
) -> Comparison:
    """Run two models side by side and compare what leaves every block, and the outputs.

    Both have as many hidden dimensions, in the same basis, and as many blocks, but for those that the reference's view
    skips. Every block of both is run once, and the reference's on the model's states, too. Memory: two blocks, the
    hidden states of both and of that run, and in the end everything outside the blocks of both with the outputs of
    `readout.READOUT_TOKENS` tokens.
    """
    theirs, ours = (each.stream(samples, compute_dtype, allocate=allocate) for each in (reference, model))
    comparisons: list[BlockComparison] = []
    between = allocate(tuple(ours.states.shape), ours.states.dtype)
    for block in track(range(model.model.blocks), "comparing", total=model.model.blocks):
        entering = sum(_distance(theirs.states[rows], ours.states[rows]) for _, rows in ours.batches)
        tensors, states, numbers = dict[str, Tensor](), ours.states, list[int]()
        for number, tensors in reference.stretch(block):
            theirs.pass_through(theirs.factory.build_block(number, tensors), number, states, between)
            states = between
            numbers.append(number)
        theirs.advance(block, tensors)
        ours.advance(block, model.block(block))
        sums = StateSimilarity()
        for _, rows in ours.batches:
            sums.add(*(each.states[rows].to(ours.factory.device) for each in (ours, theirs)))
        carried, own, energy = (
            sum(_distance(a[rows], b[rows]) if b is not None else _energy(a[rows]) for _, rows in ours.batches)
            for a, b in ((theirs.states, between), (between, ours.states), (theirs.states, None))
        )
        errors = SharesOfError.of(entering, carried, own, energy)
        comparisons.append(BlockComparison(block, sums.figures(), errors, () if numbers == [block] else numbers))
    readout = theirs.readout()
    (divergence,) = measure_divergences(readout, theirs.states, samples, [(ours.readout(), ours.states)])
    return Comparison(
        reference.model.checkpoint.path,
        model.model.checkpoint.path,
        comparisons,
        divergence,
        readout.logits,
        len(samples),
        samples.tokens,
    )


def _energy(states: Tensor) -> float:
    return float(states.float().square().sum(dtype=torch.float64))


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return _energy(ours.float() - theirs.float())
