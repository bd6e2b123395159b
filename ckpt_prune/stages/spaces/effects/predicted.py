"""Effects of whole spaces: as many units of every block are dropped at once."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.samples import Samples, ShortWindows, reads_whole
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.measure.streams.readout import measure_divergences
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.space_kinds import CANDIDATES, kind_of
from ckpt_prune.stages.spaces.effects.refits import Refits
from ckpt_prune.stages.spaces.effects.site_variants import check_finite, dropped_counts, without_units

SPACE_POINTS = (0.25, 0.5)
"""Shares of units that are dropped from every block at once: with more, all outputs would be equally bad."""
MANY = 32
"""Single scores are tried for spaces of at least so many units: for a few heads they hardly differ."""
POSITIONS = 512
"""About so many positions of all texts are compared: the vocabulary is what makes each of them dear."""
SPACING = 2
"""One of so many positions of a text is compared. What a causal model reads after the last of them is left out."""
ALIKE = 1.05
"""Divergences of a few samples within this factor count as equal."""

Predicted = dict[str, dict[str, list[tuple[int, float]]]]
"""Site by `Model.site_name` → score → (units dropped, divergence), ascending."""


Variant = tuple[SpaceName, int, str | None]
"""Space, units dropped of every block, and the single score that ranks them; None: the best one of each site."""


def measure_spaces(
    refits: Refits,
    samples: Samples,
    predicted: Predicted,
    *,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    end: Tensor | None = None,
) -> tuple[dict[SpaceName, list[tuple[int, float]]], dict[SpaceName, str]]:
    """Drop as many units of a space from every block at once, and measure the divergence of the model's own output.

    Predictions are for one site at a time and of second order. They leave out errors of blocks that add up or cancel,
    and what is not quadratic, which differ from space to space: these measurements scale them. Units go by the score
    that is predicted to be best at each site; what stays is refitted as for predictions. In spaces of many units,
    each single score is tried at the first point, too.

    Time: one run of every block for each space and point, one for each single score, and one for the dense model unless
    `end` is given, on texts of at most `SPACING` tokens for each position that is compared.
    Memory: the hidden states of the samples as often. Several processes share the variants, each on all samples.

    Args:
        samples: of the last fold.
        predicted: of every site, by gradients.
        end: the states of the samples that leave the last block, if they are known.

    Returns:
        Space → (units dropped of every block, the mean over samples of `Readout.divergence`), ascending; and for spaces
        for which a single score is preferred to the best of each site (`_robust`), that score.
    """
    model = refits.model
    longest = max(1, SPACING * POSITIONS // len(samples))
    if model.family.causal and samples.tokens > longest and not reads_whole(samples):
        samples = ShortWindows(samples, longest)
        end = None if end is None else end[:, :longest]
    variants = [variant for space in refits.spaces for variant in _list_variants(model, space)]
    group = process_group()
    own_variants = variants[group.rank :: group.size]
    stream = open_stream(model, samples, device=refits.device, compute_dtype=compute_dtype, allocate=allocate)
    shape, dtype = tuple(stream.states.shape), stream.states.dtype
    states = [allocate(shape, dtype).copy_(stream.states) for _ in own_variants]
    for block in track(range(model.blocks), "effects of spaces", total=model.blocks):
        tensors = model.read_block(block)
        fitted = refits.of(block, tensors)
        for (space, count, single), changed in zip(own_variants, states, strict=True):
            site = tensors
            if space in model.spaces(block):
                site = fitted.prune_site(space, single or _best(predicted[model.site_name(block, space)], count), count)
            pruned = stream.factory.build_block(block, site)
            stream.pass_through(pruned, block, changed, changed)
        if end is None:
            stream.advance(block, tensors)
    readout = stream.readout()
    others = [(readout, variant) for variant in states]
    dense = stream.states if end is None else end
    values = group.interleave(measure_divergences(readout, dense, samples, others, positions=POSITIONS))
    for (space, count, _), value in zip(variants, values, strict=True):
        check_finite(value, without_units(count, f"the {space} of every block"), compute_dtype)
    return _choose_scores(dict(zip(variants, values, strict=True)))


def _choose_scores(
    divergences: Mapping[Variant, float],
) -> tuple[dict[SpaceName, list[tuple[int, float]]], dict[SpaceName, str]]:
    """Return what `measure_spaces` does, from the divergence of every variant."""
    curves: dict[SpaceName, dict[int, float]] = {}
    singles: dict[SpaceName, dict[str, float]] = {}
    for (space, count, single), value in divergences.items():
        if single is None:
            curves.setdefault(space, {})[count] = value
        else:
            singles.setdefault(space, {})[single] = value
    chosen: dict[SpaceName, str] = {}
    for space, by_score in singles.items():
        first, best_of_each = next(iter(curves[space].items()))
        best = _robust(by_score, best_of_each)
        if best is not None:
            curves[space][first], chosen[space] = by_score[best], best
    return {space: list(by_count.items()) for space, by_count in curves.items()}, chosen


def _list_variants(model: Model, space: SpaceName) -> Iterator[Variant]:
    """Yield what is tried of a space."""
    units = min(model.unit_counts(space))
    for index, count in enumerate(dropped_counts(units, SPACE_POINTS)):
        for single in (None, *(_singles(space, units) if index == 0 else ())):
            yield space, count, single


def list_refits(model: Model, block: int, space: SpaceName, predicted: Predicted) -> list[tuple[str, int]]:
    """List what `measure_spaces` asks for of a site, each once: the score, and the units dropped."""
    by_score = predicted[model.site_name(block, space)]
    variants = _list_variants(model, space)
    return list(dict.fromkeys((single or _best(by_score, count), count) for _, count, single in variants))


def _singles(space: SpaceName, units: int) -> tuple[str, ...]:
    scores = kind_of(space).candidates
    return scores if units >= MANY and len(scores) > 1 else ()


def _robust(by_score: Mapping[str, float], mixed: float) -> str | None:
    """Return the score to rank a whole space by, or None for the best of each site.

    Other text is further off than a fold of the same one. So among choices that do about as well as the best, the one
    wins that learns least of the calibration text (Breiman et al. 1984 take the simplest of trees alike). Norms of
    single inputs come before a choice among scores at every site, and that before correlations of all inputs.

    Args:
        by_score: divergence with each score at all sites.
        mixed: divergence with the best score of each site.
    """
    limit = ALIKE * min(mixed, *by_score.values())
    simple = {score: value for score, value in by_score.items() if score != CANDIDATES[0] and value <= limit}
    if simple:
        return min(simple, key=lambda score: simple[score])
    return None if mixed <= limit else CANDIDATES[0]


def _best(by_score: Mapping[str, list[tuple[int, float]]], count: int) -> str:
    return min(by_score, key=lambda score: dict(by_score[score])[count])
