"""Share the zeros of a mask out over blocks, on the dense model, before the first block is masked."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import TypeVar

import torch
from torch import Tensor

from ckpt_prune.budget.curves import Curve, least_error
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moment_sources import CachedMoments, KnownMoments, MomentSource, NoMoments, SequentialMoments
from ckpt_prune.measure.moments.inputs import sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.samples.samples import SampleRange
from ckpt_prune.measure.statistics.fisher import LIMITS
from ckpt_prune.measure.streams.backward import draw_end_gradients, pass_back, states_at_ends
from ckpt_prune.measure.streams.hidden_stream import HiddenStream
from ckpt_prune.measure.streams.readout import DrawnGradients
from ckpt_prune.model.model import Model
from ckpt_prune.sparsity.allocation import (
    check_ratios,
    hill_exponent,
    outlier_ratio,
    ratios_by_exponents,
    ratios_by_outliers,
    whole_groups,
)
from ckpt_prune.sparsity.masks import wanda
from ckpt_prune.stages.mask.keys import Mask
from ckpt_prune.stages.mask.masker import Masker, masked_blocks, masked_inputs, masked_weights
from ckpt_prune.stages.mask.records import MaskShares

STEPS = 200
"""Parts of a block's weights that a ratio counts in."""

Points = Sequence[tuple[float, float]]
"""Measured (ratio, divergence) of one block, ascending from the least ratio above 0."""


def divergence_at(points: Points, ratio: float) -> float:
    """The divergence between measured ones: its root is taken as linear between them, and as 0 where nothing goes.

    Beyond the last point the last slope goes on.
    """
    curve = [(0.0, 0.0), *((at, sqrt(max(value, 0.0))) for at, value in points)]
    right = min(max(bisect_right([at for at, _ in curve], ratio), 1), len(curve) - 1)
    (a, low), (b, high) = curve[right - 1], curve[right]
    return float((low + (high - low) * (ratio - a) / (b - a)) ** 2)


def least_divergence(curves: Sequence[Points], sizes: Sequence[int], ratio: float, spread: float) -> list[float]:
    """Ratios of blocks whose predicted divergences have the least sum (`budget.curves.least_error`).

    Args:
        ratio: of all weights together, which the result meets exactly.
        spread: no block's ratio is further from that.

    Returns:
        Ratio of every block.
    """
    least, most = (round(STEPS * each) for each in (max(0.0, ratio - spread), min(1.0, ratio + spread)))
    most = min(most, STEPS - 1)
    # Kept parts count from the fewest that are allowed; one more stands for these.
    rising: Mapping[int, Curve] = {
        block: Curve(_rising([divergence_at(points, step / STEPS) for step in range(least, most + 2)]), float(size))
        for block, (points, size) in enumerate(zip(curves, sizes, strict=True))
    }
    fewest = STEPS - most - 1
    budget = STEPS * (1 - ratio) * sum(sizes) - fewest * sum(sizes)
    kept = least_error(rising, budget + 1e-6 * sum(sizes))
    shares = [1 - (fewest + kept[block]) / STEPS for block in rising]
    # Less than one part of a block is left over: all blocks share it.
    over = sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes) - ratio
    return [min(max(share - over, 0.0), 1 - 1 / STEPS) for share in shares]


def least_divergence_in_groups(curves: Sequence[Sequence[float]], sizes: Sequence[int], kept: int) -> list[int]:
    """N of every block's N:M of the least predicted divergence, whose mean over weights is no more than a pattern's.

    Args:
        curves: of every block, the divergence with 0, 1, … M − 1 of M weights zero.
        kept: N of the pattern of the whole.
    """
    # With all weights zero: no block may have that, and least_error keeps one unit at the least.
    block_curves = {
        block: Curve(_rising([*values, values[-1]]), float(size))
        for block, (values, size) in enumerate(zip(curves, sizes, strict=True))
    }
    kept_counts = least_error(block_curves, float(kept * sum(sizes)))
    return [kept_counts[block] for block in block_curves]


def _rising(values: Sequence[float]) -> list[float]:
    """More zeros never harm less: what says otherwise is chance."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] if found else value))
    return found


TRIED = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Ratios at which every block is tried out."""


def choose_shares(prepared: Prepared, mask: Mask) -> MaskShares:
    """Choose every block's share of zeros by the recipe's `mask.allocation`."""
    model = prepared.model
    if mask.allocation == "divergence":
        return _choose_by_divergence(prepared, mask)
    sizes = [_size(model, block, mask) for block in masked_blocks(model, mask.only)]
    ratio = prepared.recipe.ratio if mask.groups is None else mask.groups.ratio
    if mask.allocation == "owl":
        figures = _measure_outliers(prepared, mask)
        ratios = ratios_by_outliers(figures, sizes, ratio, mask.chosen_spread)
    else:
        figures = _measure_exponents(model, mask)
        ratios = ratios_by_exponents(figures, sizes, ratio, mask.chosen_spread)
    if not all(torch.isfinite(torch.tensor(figures))):
        raise UserError(f"mask.allocation {mask.allocation}: a block's weights or inputs give no finite figure")
    if mask.groups is not None:
        return _in_groups(model, mask, whole_groups(ratios, mask.groups), figures, mask.groups.of)
    check_ratios(ratios, mask.allocation, mask.chosen_spread)
    return _at_ratios(model, mask, [round(each, 6) for each in ratios], figures)


def _in_groups(model: Model, mask: Mask, kept: list[int], figures: list[float], of: int) -> MaskShares:
    of_each = _of_every_block(model, mask, kept, of)
    ratios = [1 - count / of for count in of_each]
    return MaskShares(ratios=ratios, kept=of_each, figures=_of_every_block(model, mask, figures, 0.0))


def _at_ratios(model: Model, mask: Mask, ratios: list[float], figures: list[float]) -> MaskShares:
    return MaskShares(
        ratios=_of_every_block(model, mask, ratios, 0.0), figures=_of_every_block(model, mask, figures, 0.0)
    )


Figure = TypeVar("Figure", int, float)


def _of_every_block(model: Model, mask: Mask, values: Sequence[Figure], without: Figure) -> list[Figure]:
    """Return values of the blocks that are masked, with another for those that get no zeros."""
    by_block = dict(zip(masked_blocks(model, mask.only), values, strict=True))
    return [by_block.get(block, without) for block in range(model.blocks)]


def _size(model: Model, block: int, mask: Mask) -> int:
    return sum(model.checkpoint.tensors[name].numel for name in masked_weights(model, block, mask.only))


# ---- by what blocks are -----------------------------------------------------------------------------------------


def _measure_outliers(prepared: Prepared, mask: Mask) -> list[float]:
    """Measure OWL's D of every block of the dense model."""
    model, family = prepared.model, prepared.model.family
    source: MomentSource
    if prepared.statistics is not None:
        source = CachedMoments(prepared.statistics, model)
    else:
        grams = dict.fromkeys(family.inputs, False)
        source = SequentialMoments(prepared.live_stream(prepared.plain_view), grams, true_sequential=False)
    ratios = []
    for block in track(range(model.blocks), "outliers", total=model.blocks):
        tensors = model.read_block(block)
        if inputs := masked_inputs(model, block, mask.only):
            moments = source.moments(block, tensors, list(inputs))
            scores = [
                wanda(tensors[family.tensor(block, module)], sum_folds(select_input_moments(moments[first])))
                for first, modules in inputs.items()
                for module in modules
            ]
            ratios.append(outlier_ratio(scores, mask.chosen_threshold))
        source.advance(block, tensors)
    return ratios


def _measure_exponents(model: Model, mask: Mask) -> list[float]:
    """Compute AlphaPruning's metric of every block: the mean over its linear modules."""
    means = []
    blocks = masked_blocks(model, mask.only)
    for block in track(blocks, "spectra", total=len(blocks)):
        exponents = [
            hill_exponent(weight) for weight in model.checkpoint.read(masked_weights(model, block, mask.only)).values()
        ]
        means.append(sum(exponents) / len(exponents))
    return means


# ---- by what masking them does ----------------------------------------------------------------------------------


def _choose_by_divergence(prepared: Prepared, mask: Mask) -> MaskShares:
    """Choose the shares of the least sum of predicted divergences (this project).

    A few samples go through the dense model, and their gradients back, as for the Fisher metric (measure/README.md,
    section 5). At every block its mask is made at several shares, on its dense inputs, and the masked block is run. Let
    δ be what then lacks at its end. To second order, ½ E[Σ_t (g_t·δ_t)²] is what that share does to the model's output.
    Time: for every block and share one mask and one run. Memory: a block twice, and the hidden states of these samples
    at the ends of all blocks.
    """
    model, live = prepared.model, prepared.live_samples
    some = SampleRange(live.samples, 0, min(len(live.samples), LIMITS[model.family.modality]))
    stream = prepared.plain_view.stream(some, live.compute_dtype, allocate=live.allocate)
    factory, states = stream.factory, states_at_ends(model, stream, live.allocate)
    end = states.pop()
    drawn = draw_end_gradients(stream.readout(), some, end, live.allocate)
    groups = mask.groups
    tried = TRIED if groups is None else tuple(gone / groups.of for gone in range(1, groups.of))
    masker = Masker(model, mask, 0.0, groups, frozenset(), prepared.device)
    curves: list[list[float]] = []
    for block in track(range(model.blocks - 1, -1, -1), "trying masks", total=model.blocks):
        tensors, before = model.read_block(block), states.pop()
        source = (
            NoMoments() if mask.method == "magnitude" else KnownMoments(_observe(stream, block, tensors, before, mask))
        )
        sums = []
        for ratio in tried if masked_inputs(model, block, mask.only) else ():
            masked, _ = replace(masker, shares=[ratio] * model.blocks).block(block, tensors, source)
            sums.append(_divergence(stream, block, masked, before, end, drawn))
        if sums:
            curves.insert(0, sums)
        if block:
            module = factory.build_block(block, tensors).requires_grad_(False)
            for _ in pass_back(stream, module, block, before, [each.values for each in drawn], ()):
                pass
        end = before
    sizes = [_size(model, block, mask) for block in masked_blocks(model, mask.only)]
    if not all(bool(torch.isfinite(torch.tensor(curve)).all()) for curve in curves):
        raise UserError("mask.allocation divergence: a gradient or a masked block's output is not finite")
    if groups is not None:
        kept = least_divergence_in_groups([[0.0, *curve] for curve in curves], sizes, groups.kept)
        figures = [[0.0, *curve][groups.of - n] for curve, n in zip(curves, kept, strict=True)]
        return _in_groups(model, mask, kept, figures, groups.of)
    points = [list(zip(tried, curve, strict=True)) for curve in curves]
    ratios = [round(r, 6) for r in least_divergence(points, sizes, prepared.recipe.ratio, mask.chosen_spread)]
    return _at_ratios(model, mask, ratios, [divergence_at(curve, r) for curve, r in zip(points, ratios, strict=True)])


def _observe(
    stream: HiddenStream, block: int, tensors: Mapping[str, Tensor], states: Tensor, mask: Mask
) -> dict[str, SpaceMoments]:
    """Measure moments of the dense block's inputs."""
    stream.states = states
    inputs = masked_inputs(stream.factory.model, block, mask.only)
    return dict(stream.observe(block, tensors, dict.fromkeys(inputs, mask.method == "sparsegpt")))


@torch.no_grad()
def _divergence(
    stream: HiddenStream,
    block: int,
    masked: Mapping[str, Tensor],
    before: Tensor,
    end: Tensor,
    drawn: Sequence[DrawnGradients],
) -> float:
    """Return ½ E[Σ_t (g_t·δ_t)²] of a masked block."""
    module, shift = stream.factory.build_block(block, masked), 0.0
    for _, rows in stream.batches:
        lacks = (stream.run(module, block, before[rows], rows) - end[rows].to(stream.factory.device)).float()
        shift += sum(draw.measure_shift(draw.values[rows].to(lacks), lacks) for draw in drawn)
    return shift / 2 / len(end)
