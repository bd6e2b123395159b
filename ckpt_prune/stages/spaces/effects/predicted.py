"""Spaces pruned as wholes: as many units of every block at once."""

from collections.abc import Mapping

import torch

from ckpt_prune.common.progress import track
from ckpt_prune.job.space_kinds import CANDIDATES, kind_of
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.streams.hidden_stream import open_stream
from ckpt_prune.measure.streams.readout import measure_divergences
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.spaces.effects.refits import Refits
from ckpt_prune.stages.spaces.effects.site_variants import check_finite, dropped_counts, without_units

SPACE_POINTS = (0.25, 0.5)
"""Shares of units that are dropped from every block at once: more would leave nothing to be told from anything."""
MANY = 32
"""Units from which on the scores of a space are tried as wholes: of a few heads they hardly differ."""
ALIKE = 1.05
"""Divergences of a few samples that are no more than this apart tell nothing."""

Predicted = dict[str, dict[str, list[tuple[int, float]]]]
"""Site by `Model.site_name` → score → (units dropped, divergence), ascending."""


def measure_spaces(
    refits: Refits,
    samples: Samples,
    predicted: Predicted,
    *,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
) -> tuple[dict[SpaceName, list[tuple[int, float]]], dict[SpaceName, str]]:
    """Drop as many units of a space from every block at once, and see how far that takes the model's own output.

    Predictions are of one site at a time and of second order. What they leave out, errors of blocks that add up or
    cancel and what is not quadratic, differs from space to space: this is what scales them. Units go by the score that
    is predicted to be best at each site, what stays is refitted as where effects are predicted. In spaces of many units
    each single score is tried at the first point, too.

    Time: one run of every block for each space and point, one for each single score, and one for the dense model.
    Memory: the hidden states of the samples as often. Several processes share out the variants, each on all samples.

    Args:
        refits: of the dense model's sites.
        samples: of the last fold.
        predicted: of every site.
        compute_dtype: in which they run.
        allocate: makes the tensors that hold hidden states.

    Returns:
        Space → (units dropped of every block, the mean over samples of `Readout.divergence`), ascending; and for spaces
        where a single score is to be preferred to the best of each site (`_robust`), that score.

    Raises:
        UserError: the output is not finite.
    """
    model = refits.model
    variants = [
        (space, count, single)
        for space in refits.spaces
        for index, count in enumerate(dropped_counts(model.units(space), SPACE_POINTS))
        for single in (None, *(_singles(space, model.units(space)) if index == 0 else ()))
    ]
    group = process_group()
    own_variants = variants[group.rank :: group.size]
    stream = open_stream(model, samples, device=refits.device, compute_dtype=compute_dtype, allocate=allocate)
    shape, dtype = tuple(stream.states.shape), stream.states.dtype
    states = [allocate(shape, dtype).copy_(stream.states) for _ in own_variants]
    for block in track(range(model.blocks), "effects of spaces", total=model.blocks):
        tensors = model.read_block(block)
        fitted = refits.of(block, tensors)
        for (space, count, single), own in zip(own_variants, states, strict=True):
            score = single or _best(predicted[model.site_name(block, space)], count)
            stream.pass_through(stream.factory.build_block(block, fitted.pruned(space, score, count)), block, own, own)
        stream.advance(block, tensors)
    readout = stream.readout()
    found: dict[SpaceName, dict[int, float]] = {}
    singles: dict[SpaceName, dict[str, float]] = {}
    values = group.interleave(measure_divergences(readout, stream.states, samples, [(readout, own) for own in states]))
    for (space, count, single), value in zip(variants, values, strict=True):
        check_finite(value, without_units(count, f"the {space} of every block"), compute_dtype)
        if single is None:
            found.setdefault(space, {})[count] = value
        else:
            singles.setdefault(space, {})[single] = value
    chosen: dict[SpaceName, str] = {}
    for space, by_score in singles.items():
        first, mixed = next(iter(found[space].items()))
        best = _robust(by_score, mixed)
        if best is not None:
            found[space][first], chosen[space] = by_score[best], best
    return {space: list(own.items()) for space, own in found.items()}, chosen


def _singles(space: SpaceName, units: int) -> tuple[str, ...]:
    """Scores that are tried as wholes, where there is a choice."""
    scores = kind_of(space).candidates
    return scores if units >= MANY and len(scores) > 1 else ()


def _robust(by_score: Mapping[str, float], mixed: float) -> str | None:
    """The score to rank a whole space by, or None for the best of each site.

    Other text is further off than a fold of the same one. So of what does about as well as the best, that is taken
    which learns least of the calibration text: norms of single inputs before a choice among scores at every site, and
    that before correlations of all inputs (Breiman et al. 1984 take the simplest of trees alike).

    Args:
        by_score: what each score does at all sites.
        mixed: what the best score of each site does.
    """
    limit = ALIKE * min(mixed, *by_score.values())
    simple = {score: value for score, value in by_score.items() if score != CANDIDATES[0] and value <= limit}
    if simple:
        return min(simple, key=lambda score: simple[score])
    return None if mixed <= limit else CANDIDATES[0]


def _best(by_score: Mapping[str, list[tuple[int, float]]], count: int) -> str:
    """The score that is predicted to do least at a number of units dropped."""
    return min(by_score, key=lambda score: dict(by_score[score])[count])
