"""Measured effects: one site is pruned alone, and the blocks after it are run again."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.fisher import LABEL_DRAWS, LIMITS
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream
from ckpt_prune.measure.streams.readout import measure_divergences
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.parallel.group import process_group
from ckpt_prune.scoring.costs import WIDE
from ckpt_prune.stages.spaces.effects.site_variants import (
    POINTS,
    Variants,
    check_finite,
    counts_of,
    without_units,
)

SHALLOW = 12
"""Effects are measured for models of up to so many blocks L: that takes L²/2 runs of blocks for a point of each space.

Each point takes a refit of a site, too, which grows with the cube of the width: models that are `WIDE` are left out.
Predictions of the Fisher metric are of second order. They come near if a model is redundant, as deep ones are, and fall
short of what tiny ones lose (measure/README.md, section 5).
"""


def is_shallow(model: Model) -> bool:
    """Return True if a model has so few blocks, and so few inputs of each site, that measuring all sites is cheap."""
    return model.blocks <= SHALLOW and model.widest_consumer <= WIDE


def label_draws(model: Model) -> int:
    """Return the number of draws of labels: several in shallow models, as they are cheap there."""
    return LABEL_DRAWS if is_shallow(model) else 1


def measured_singly(model: Model) -> bool:
    """Return True if effects of single sites are measured: for shallow models, whose blocks have a few sites each."""
    return is_shallow(model) and model.family.experts is None and not model.has_remote_code


def measure_effects(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    *,
    spaces: Collection[SpaceName],
    device: torch.device,
    compute_dtype: torch.dtype,
    points: tuple[float, ...] = POINTS,
    limit: int | None = None,
    allocate: Allocate = allocate_in_memory,
    journal: Journal | None = None,
) -> dict[str, list[tuple[int, float]]]:
    """Prune one site of the dense model at a time and measure the divergence of the model's own output (this project).

    Columns go in the order of `scoring.obs`, and what stays is refitted by ridge, or by affine if the consumer has a
    bias in the checkpoint. Dimensions of q and k go by logit energy, compensated by logit. λ is fixed.

    A model of L blocks has about L²/2 of them run for each point of each space, and as many read in all. For a block
    whose sites are pruned, every later block is read once, and all variants go through it. Memory: a block, its
    moments, everything outside the blocks, the hidden states of `limit` samples once for each space and point and twice
    for the dense model, and the logits of `READOUT_TOKENS` tokens (at least of one sample) twice. Several processes
    share out spaces and points, each on all of these samples.

    Args:
        statistics: of the same model, with Grams of consumers' inputs, and with logits if q and k are among the spaces.
        spaces: whose sites are pruned; those that the family has.
        points: shares of the units of a site to drop, nearest counts from 1 to all but one.
        limit: so many of the first samples are run; by default `LIMITS`.
        journal: of the run, to record the effects of each block's sites in; recorded effects are not measured again.

    Returns:
        Site by `Model.site_name` (on-disk weight of the consumer, or of the query) → units dropped, of q and k
        dimensions dropped in every head and of queries heads dropped in every KV group, ascending, and the mean over
        samples of `Readout.divergence` from the dense model. A site of one unit is left out.
    """
    counts = counts_of(model, statistics, spaces, points)
    variants = [(space, count) for space, fewer in counts.items() for count in fewer]
    if not variants:
        return {}
    few = SampleRange(samples, 0, min(len(samples), LIMITS[model.family.modality] if limit is None else limit))
    stream = open_stream(model, few, device=device, compute_dtype=compute_dtype, allocate=allocate)
    readout, sites, group = stream.readout(), Variants(model, statistics, device, counts), process_group()
    mine = range(group.rank, len(variants), group.size)
    states = _States.of(stream, len(mine), allocate)
    effects, start = _read_recorded(model.blocks, journal)
    states.go_to(start, model)
    passes = [(site, block) for site in range(start, model.blocks) for block in range(site, model.blocks)]
    for site, block in track(passes, "measuring effects", total=len(passes), unit="block run"):
        tensors = model.read_block(block)
        if block == site:
            states.prune(block, tensors, sites.of(block, tensors, mine))
        else:
            states.advance(block, tensors, dense=site == 0)
        if block < model.blocks - 1:
            continue
        pairs = [(readout, pruned) for pruned in states.pruned]
        of_site: dict[str, list[tuple[int, float]]] = {}
        values = group.interleave(measure_divergences(readout, states.dense, few, pairs))
        for (space, count), value in zip(variants, values, strict=True):
            name = model.site_name(site, space)
            check_finite(value, without_units(count, name), compute_dtype)
            if space in model.spaces(site):
                of_site.setdefault(name, []).append((count, value))
        effects |= of_site
        if journal is not None:
            with disk_failures(journal.folder):
                journal.record(_entry(site), note=of_site)
    return effects


@dataclass(frozen=True)
class _States:
    """Hidden states of a few samples in the dense model, and in it with one of its sites pruned.

    Attributes:
        stream: of the dense model, at the block whose sites are pruned.
        dense: what leaves the dense model's last block, once it has gone there.
        pruned: states of each variant.
    """

    stream: HiddenStream
    dense: Tensor
    pruned: list[Tensor]

    @classmethod
    def of(cls, stream: HiddenStream, variants: int, allocate: Allocate) -> "_States":
        shape, dtype = tuple(stream.states.shape), stream.states.dtype
        pruned = [allocate(shape, dtype) for _ in range(variants)]
        return cls(stream, allocate(shape, dtype), pruned)

    def go_to(self, start: int, model: Model) -> None:
        """Bring the stream before a block of a resumed run, and the dense model's own states behind the last."""
        for block in range(model.blocks) if 0 < start < model.blocks else ():
            tensors = model.read_block(block)
            self._run(block, tensors, [self.stream.states if block < start else self.dense])
            if block == start - 1:
                self.dense.copy_(self.stream.states)

    def prune(self, block: int, tensors: Mapping[str, Tensor], variants: Iterable[Mapping[str, Tensor]]) -> None:
        """Let a block's variants make the states of each, and move the stream behind the dense block."""
        for out, pruned in zip(self.pruned, variants, strict=True):
            self.stream.pass_through(self.stream.factory.build_block(block, pruned), block, self.stream.states, out)
        self._run(block, tensors, [self.stream.states])
        if block == 0:
            self.dense.copy_(self.stream.states)

    def advance(self, block: int, tensors: Mapping[str, Tensor], *, dense: bool) -> None:
        """Let the states of all variants go through a later block.

        The first time, the dense model's own states go all the way: the others are compared with them.
        """
        self._run(block, tensors, [self.dense, *self.pruned] if dense else self.pruned)

    def _run(self, block: int, tensors: Mapping[str, Tensor], moved: Sequence[Tensor]) -> None:
        module = self.stream.factory.build_block(block, tensors)
        for states in moved:
            self.stream.pass_through(module, block, states, states)


def _read_recorded(blocks: int, journal: Journal | None) -> tuple[dict[str, list[tuple[int, float]]], int]:
    """Return the effects that an earlier run has recorded, and the first block whose sites are still to be measured."""
    notes: dict[str, Any] = process_group().once(lambda: {} if journal is None else journal.notes)
    start = next((block for block in range(blocks) if _entry(block) not in notes), blocks)
    recorded = (notes[_entry(block)] for block in range(start))
    return {name: [(n, value) for n, value in curve] for note in recorded for name, curve in note.items()}, start


def _entry(block: int) -> str:
    return f"effects {block}"
