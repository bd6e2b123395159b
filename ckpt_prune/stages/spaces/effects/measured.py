"""Measured effects: one site is pruned alone, and the blocks after it are run again."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.fisher import LABEL_DRAWS, LIMITS
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.hidden_stream import open_stream
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
    """Return how often labels are drawn: several times in shallow models, where that is cheap."""
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
    family = model.family
    counts = counts_of(model, statistics, spaces, points)
    variants = [(space, count) for space, own in counts.items() for count in own]
    if not variants:
        return {}
    few = SampleRange(samples, 0, min(len(samples), LIMITS[family.modality] if limit is None else limit))
    stream = open_stream(model, few, device=device, compute_dtype=compute_dtype, allocate=allocate)
    readout = stream.readout()
    sites = Variants(model, statistics, device, counts)
    shape, dtype = tuple(stream.states.shape), stream.states.dtype
    group = process_group()
    mine = range(group.rank, len(variants), group.size)
    pruned = [allocate(shape, dtype) for _ in mine]
    dense = allocate(shape, dtype)

    def run(block: int, tensors: Mapping[str, Tensor], moved: list[tuple[Tensor, Tensor]]) -> None:
        """Run a block from the first states of each pair into the second, which may be the same."""
        module = stream.factory.build_block(block, tensors)
        for given, out in moved:
            stream.pass_through(module, block, given, out)

    effects: dict[str, list[tuple[int, float]]] = {}
    blocks = model.blocks
    notes: dict[str, Any] = group.once(lambda: {} if journal is None else journal.notes)
    start = next((block for block in range(blocks) if _entry(block) not in notes), blocks)
    for block in range(start):
        effects |= {name: [(count, value) for count, value in own] for name, own in notes[_entry(block)].items()}
    for block in range(blocks) if 0 < start < blocks else ():
        # Bring the states before the first block that is still to be measured, and the last ones.
        tensors = model.read_block(block)
        states = stream.states if block < start else dense
        run(block, tensors, [(states, states)])
        if block == start - 1:
            dense.copy_(stream.states)
    passes = [(site, block) for site in range(start, blocks) for block in range(site, blocks)]
    for site, block in track(passes, "measuring effects", total=len(passes), unit="block run"):
        tensors = model.read_block(block)
        if block == site:
            for out, new in zip(pruned, sites.of(block, tensors, mine), strict=True):
                run(block, new, [(stream.states, out)])
            run(block, tensors, [(stream.states, stream.states)])
            if site == 0:
                dense.copy_(stream.states)
        else:
            # The first time, the dense model's own states go all the way: the others are compared with them.
            run(block, tensors, [(states, states) for states in ([dense] if site == 0 else []) + pruned])
        if block == blocks - 1:
            values = group.interleave(
                measure_divergences(readout, dense, few, [(readout, states) for states in pruned])
            )
            for (space, count), value in zip(variants, values, strict=True):
                name = model.site_name(site, space)
                check_finite(value, without_units(count, name), compute_dtype)
                effects.setdefault(name, []).append((count, value))
            if journal is not None:
                names = {model.site_name(site, space) for space in counts}
                with disk_failures(journal.folder):
                    journal.record(_entry(site), note={name: effects[name] for name in effects if name in names})
    return effects


def _entry(block: int) -> str:
    return f"effects {block}"
