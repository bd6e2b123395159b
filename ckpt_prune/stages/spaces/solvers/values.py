"""Sites of values: directions inside KV heads, which go in a basis that is found for them."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.values import ValueBasis, by_direction, by_head, principal_values
from ckpt_prune.job.decisions import SiteDecision
from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.family import KINDS
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.scoring.unit_scores import centre_gram
from ckpt_prune.stages.spaces.solvers.base import SolvedSite
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver


class _TurnedSite(NamedTuple):
    """A site in the basis of its directions, in which it is a site of columns: the consumer and its inputs turned."""

    basis: ValueBasis
    tensors: Tensors
    folds: tuple[Moments, ...]


class ValueSolver(ColumnSolver):
    """Solves sites whose units are directions of values: turns them, and drops the last ones of every KV head.

    Its methods do what those of `ColumnSolver` do, in the basis of the directions.
    """

    has_spectrum = False

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        return super().trial(biased=biased) | {"score": "principal"}

    def scores(
        self, block: int, tensors: Tensors, folds: SpaceMoments, score: str | None = None, count: int | None = None
    ) -> Tensor:
        """Return each direction's share of the output's energy, a token; of every KV head in its order."""
        moments = self._moments(folds)
        return self._basis(block, tensors, moments).strengths.flatten() / sum_folds(moments).count

    def drop_order(self, block: int, tensors: Tensors, moments: Moments, scores: Tensor) -> DropOrder:
        site = self._turn(block, tensors, (moments,))
        order = super().drop_order(block, site.tensors, site.folds[0], scores)
        return replace(order, basis=site.basis.basis(moments.width))

    def solve(self, block: int, tensors: Tensors, folds: SpaceMoments | None, decision: SiteDecision) -> SolvedSite:
        """Turn values and consumer, and solve what stays (compensation/README.md, section 10)."""
        moments = self._moments(folds)
        heads, keep = self.model.copies(self.space), decision.keep
        first = self.description.first(keep, self.model.dimension)
        if keep == self.model.units(self.space, block) and not moments:  # what stays whole may not have been measured
            scores = torch.zeros(first.numel()) if decision.scores is None else decision.scores
            return self._plan(block, self._consumer(block), first, scores), None
        site = self._turn(block, tensors, moments)
        scores = site.basis.strengths.flatten() / sum_folds(moments).count
        plan, new = super().solve(block, site.tensors, site.folds, replace(decision, kept=first, scores=scores))
        if new is None:
            return plan, None
        output = self._consumer(block)
        new[output] = by_head(new[output], heads, keep)
        for module in self.description.readers:
            for name in (self.model.tensor(block, module, kind) for kind in KINDS):
                if name in tensors:
                    new[name] = site.basis.narrow_values(tensors[name].to(self.device), keep).cpu()
        return plan, new

    def divergence(self, tensors: Tensors, folds: SpaceMoments, solved: SolvedSite, fisher: Fisher) -> float | None:
        if solved[1] is None:
            return 0.0
        site = self._turn(solved[0].block, tensors, select_input_moments(folds))
        return super().divergence(site.tensors, site.folds, self._in_basis(solved), fisher)

    def _in_basis(self, solved: SolvedSite) -> SolvedSite:
        plan, new = solved
        assert new is not None
        heads, output = self.model.copies(self.space), self._consumer(plan.block)
        keep = new[output].shape[1] // heads // self.model.unit_columns(self.space)
        kept = self.description.first(keep, self.model.dimension).tolist()
        return plan.model_copy(update={"kept": kept}), {**new, output: by_direction(new[output], heads, keep)}

    def columns_of(self, units: Tensor) -> Tensor:
        """Return the columns of directions, which are neighbours once they are turned."""
        width = self.model.unit_columns(self.space)
        return (units[:, None] * width + torch.arange(width)).flatten()

    def _turn(self, block: int, tensors: Tensors, folds: tuple[Moments, ...]) -> _TurnedSite:
        basis, name = self._basis(block, tensors, folds), self._consumer(block)
        turned = {**tensors, name: basis.turn_columns(tensors[name].to(basis.values.device))}
        return _TurnedSite(basis, turned, tuple(each.change_basis(basis.inputs) for each in folds))

    @phase("ranking")
    def _basis(self, block: int, tensors: Tensors, folds: tuple[Moments, ...]) -> ValueBasis:
        """Return the basis by the Gram of all folds, centred if the consumer may get a bias."""
        moments = sum_folds(folds)
        if moments.gram is None:
            raise UserError("score principal needs Grams: calibrate with --collect moments,gram")
        gram = centre_gram(moments.gram, moments) if self.is_centred(block, tensors) else moments.gram
        weight = tensors[self._consumer(block)].to(gram.device)
        return principal_values(weight, gram, self.model.copies(self.space), self.model.units(self.space, block))
