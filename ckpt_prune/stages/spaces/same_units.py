"""Spaces of which every block keeps the same units: one ranking over all blocks, made before the first is pruned."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ckpt_prune.common.progress import track
from ckpt_prune.job.decisions import SiteDecision
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.measure.moment_sources import CachedMoments, NoMoments
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.model.spaces import Site, SpaceName
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.spaces.records import SameUnits
from ckpt_prune.stages.spaces.solvers import solver_of


def choose_same_units(prepared: Prepared, run: Run | None = None) -> Prepared:
    """Return the state with the units chosen that stay in every block, where all are to keep the same ones.

    One table may have a part for each head of all blocks (T5's relative positions). Widths are known by now. With `run`
    the ranking is kept in its journal: a resumed run must choose alike.
    """
    spaces = [space for space in prepared.recipe.spaces if prepared.model.family.spaces[space].same_units]
    if not spaces or prepared.plan is not None:
        return prepared
    rank = partial(rank_same_units, prepared, spaces)
    ranked = rank() if run is None else run.remember("same units", SameUnits, rank)
    sites = dict(prepared.decisions.sites)
    for space in spaces:
        scores = torch.tensor(ranked.scores[space], dtype=torch.float64)
        for block in prepared.model.blocks_with(space):
            keep = prepared.decisions.of(prepared.model, Site(block, space)).keep
            kept = solver_of(prepared.model, prepared.recipe, space, prepared.device).select(scores, keep)
            sites[Site(block, space)] = SiteDecision(keep, kept, scores)
    return replace(prepared, decided=replace(prepared.decisions, sites=sites))


def rank_same_units(prepared: Prepared, spaces: list[SpaceName]) -> SameUnits:
    """Return the scores of units over all blocks of the unpruned model: the sum of each block's scores.

    A block's scores count as shares of their own sum, as errors of different sites do where nothing weighs them by
    their effect: outputs of later blocks are often larger, and would decide alone. Blocks are measured unpruned, also
    where others are measured behind pruned ones, since the choice is made before the first: in statistics, or else by
    one more pass over the samples.
    """
    model, recipe = prepared.model, prepared.recipe
    sums: dict[SpaceName, Tensor] = {}
    for block, tensors, moments in _measure(prepared, spaces):
        for space in (each for each in spaces if each in model.spaces(block)):
            solver = solver_of(model, recipe, space, prepared.device)
            rank = partial(solver.scores, block, tensors, moments.get(space, ()))
            scores = process_group().once(rank).cpu()
            total = float(scores.sum())
            sums[space] = sums.get(space, torch.zeros_like(scores)) + (scores / total if total > 0 else scores)
    return SameUnits(scores={space: scores.tolist() for space, scores in sums.items()})


def _measure(
    prepared: Prepared, spaces: list[SpaceName]
) -> Iterator[tuple[int, Mapping[str, Tensor], Mapping[str, SpaceMoments]]]:
    """Yield every block of the unpruned model with its tensors and the moments of these spaces."""
    prepared = replace(prepared, decided=None)  # no block has lost anything yet
    view = prepared.view
    read: Callable[[int, Mapping[str, Tensor], list[SpaceName]], Mapping[str, SpaceMoments]]
    if not prepared.recipe.needs_statistics:
        read = NoMoments().moments
    elif prepared.statistics is not None:
        read = CachedMoments(prepared.statistics, prepared.model).moments
    else:
        stream = prepared.live_stream(view)
        grams = {space: prepared.recipe.measures_more(space) for space in spaces}

        def read(block: int, tensors: Mapping[str, Tensor], names: list[SpaceName]) -> Mapping[str, SpaceMoments]:
            return stream.observe(block, tensors, {name: grams[name] for name in names}, advance=True)

    for block in track(range(prepared.model.blocks), "ranking", total=prepared.model.blocks):
        tensors = view.block(block)
        yield block, tensors, read(block, tensors, [name for name in spaces if name in prepared.model.spaces(block)])
