"""Two models of one shape run side by side, block by block; neither is ever loaded as a whole."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.similarity import Similarity, StateSimilarity
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.readout import measure_divergences
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory


@dataclass(frozen=True)
class BlockComparison:
    """How alike the hidden states are that leave a block."""

    block: int
    states: Similarity

    def data(self) -> dict[str, Any]:
        return {"block": self.block, **asdict(self.states)}


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

    Both have as many blocks and hidden dimensions, in the same basis. Every block of both is run once. Memory: two
    blocks, the hidden states of both, and in the end everything outside the blocks of both with the outputs of
    `readout.READOUT_TOKENS` tokens.
    """
    theirs, ours = (each.stream(samples, compute_dtype, allocate=allocate) for each in (reference, model))
    comparisons: list[BlockComparison] = []
    for block in track(range(model.model.blocks), "comparing", total=model.model.blocks):
        for stream, source in ((theirs, reference), (ours, model)):
            stream.advance(block, source.block(block))
        sums = StateSimilarity()
        for _, rows in ours.batches:
            sums.add(*(each.states[rows].to(ours.factory.device) for each in (ours, theirs)))
        comparisons.append(BlockComparison(block, sums.figures()))
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
