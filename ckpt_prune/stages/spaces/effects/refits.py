"""Refits of sites after units went by some score, to predict the effect of that."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ckpt_prune.measure.moment_sources import CachedMoments
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import select_input_moments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.streams.state_memory import Allocate
from ckpt_prune.model.family import KINDS
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Site, SpaceName
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.stages.spaces.effects.site_variants import POINTS, dropped_counts, trial_recipe
from ckpt_prune.stages.spaces.solvers import solver_of
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver


def refitted_spaces(model: Model, spaces: Collection[SpaceName] | None = None) -> list[SpaceName]:
    """Return spaces with a consumer of which something can go: of those named, or of those that stand in no other."""
    named = model.family.consumers if spaces is None else spaces
    return [space for space in model.family.columns if space in named and max(model.unit_counts(space), default=1) > 1]


@dataclass
class Refits:
    """Refits of sites with a consumer, to all folds but the last, or to the only one.

    Scores of a site are kept, so that it is not ranked again.

    Attributes:
        spaces: whose sites, in the family's order (`refitted_spaces`).
    """

    model: Model
    statistics: Statistics
    device: torch.device
    spaces: Collection[SpaceName]
    _scores: dict[tuple[Site, str], Tensor] = field(default_factory=dict)
    _lost: dict[tuple[Site, str, int], Tensor] = field(default_factory=dict)

    def of(self, block: int, tensors: Mapping[str, Tensor]) -> "BlockRefits":
        """Return the refits of a block with these tensors."""
        return BlockRefits(self, block, tensors)

    def of_block(self, block: int) -> list[SpaceName]:
        """Return those of the spaces that a block has."""
        return [space for space in self.spaces if space in self.model.spaces(block)]

    def read(self, block: int) -> dict[SpaceName, Moments]:
        """Return the moments of a block's sites that refits are made to."""
        read = CachedMoments(self.statistics, self.model).moments(block, {}, self.of_block(block))
        folds = {space: select_input_moments(sums) for space, sums in read.items()}
        return {space: sum_folds(inputs[:-1] or inputs).to(self.device) for space, inputs in folds.items()}

    def known(self, block: int) -> dict[tuple[Site, str], Tensor]:
        """Return the scores of the sites of a block that were computed so far."""
        return {key: scores for key, scores in self._scores.items() if key[0].block == block}

    def learn(self, scores: Mapping[tuple[Site, str], Tensor]) -> None:
        self._scores.update(scores)

    def scores(self, solver: ColumnSolver, refits: "BlockRefits", score: str) -> Tensor:
        key = Site(refits.block, solver.space), score
        if key not in self._scores:
            moments = refits.moments[solver.space]
            most = dropped_counts(self.model.units(solver.space, refits.block), POINTS)[-1]
            self._scores[key] = solver.scores(refits.block, refits.tensors, (moments,), count=most).cpu()
        return self._scores[key]


@dataclass
class BlockRefits:
    """Refits of the sites of one block, with its tensors by on-disk name."""

    shared: Refits
    block: int
    tensors: Mapping[str, Tensor]
    _orders: dict[tuple[SpaceName, str], DropOrder] = field(default_factory=dict)

    @cached_property
    def moments(self) -> Mapping[SpaceName, Moments]:
        """The moments of its sites, read when they are asked for."""
        return self.shared.read(self.block)

    def mean(self, space: SpaceName, score: str) -> Tensor | None:
        """Return the mean of a consumer's inputs, (d_in,) float64, if a bias makes up for it."""
        return self.moments[space].mean if self._solver(space, score).is_centred(self.block, self.tensors) else None

    def order(self, space: SpaceName, score: str) -> DropOrder:
        """Return the order in which units of a site go by a score."""
        key = space, score
        if key not in self._orders:
            solver = self._solver(space, score)
            scores = self.shared.scores(solver, self, score).to(self.shared.device)
            self._orders[key] = solver.drop_order(self.block, self.tensors, self.moments[space], scores)
        return self._orders[key]

    def lost(self, space: SpaceName, score: str, count: int) -> Tensor:
        """Return W − Ŵ with `count` units of a site gone, in each copy as many, (d_out, d_in), as it was computed."""
        kept = self.shared._lost.get((Site(self.block, space), score, count))
        return self.order(space, score).lost(count * self.shared.model.copies(space)) if kept is None else kept

    def keep(self, space: SpaceName, score: str, count: int, allocate: Allocate) -> None:
        """Compute what `lost` returns for good; of a wide site in the type of the weight, to save memory."""
        order, lost = self.order(space, score), self.lost(space, score, count)
        weight = self.tensors[self.shared.model.tensor(self.block, self.shared.model.family.columns[space].consumer)]
        kept = allocate(tuple(lost.shape), weight.dtype if order.is_wide else _wider(weight))
        self.shared._lost[Site(self.block, space), score, count] = kept.copy_(lost)

    def curve(self, space: SpaceName, score: str, metric: Fisher) -> tuple[Tensor, Tensor]:
        """Return the scores of a site's units, and the divergences of all widths as the solver's `errors` does."""
        scores = self.shared._scores[Site(self.block, space), score]
        costs = self.order(space, score).costs(metric.mean.to(self.shared.device))
        return scores, (costs[:: self.shared.model.copies(space)] / self.moments[space].count / 2).cpu()

    def prune_site(self, space: SpaceName, score: str, count: int) -> dict[str, Tensor]:
        """Return the block's tensors with `count` units of a site gone: as zeros, in the shapes they had."""
        lost, mean = self.lost(space, score, count).cpu(), self.mean(space, score)
        consumer = self.shared.model.family.columns[space].consumer
        name, bias = (self.shared.model.tensor(self.block, consumer, kind) for kind in KINDS)
        weight = self.tensors[name]
        wider = _wider(weight)
        new = {**self.tensors, name: (weight.to(wider) - lost.to(wider)).to(weight.dtype)}
        if mean is not None:
            new[bias] = (self.tensors[bias].double() + lost.double() @ mean.cpu()).to(self.tensors[bias].dtype)
        return new

    def _solver(self, space: SpaceName, score: str) -> ColumnSolver:
        recipe = trial_recipe(self.shared.model, self.block, space, self.tensors, score)
        solver = solver_of(self.shared.model, recipe, space, self.shared.device)
        assert isinstance(solver, ColumnSolver)
        return solver


def _wider(weight: Tensor) -> torch.dtype:
    # A difference in half precision loses nothing in float32.
    return torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else torch.float64
