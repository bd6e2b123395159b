"""Sites of values: directions inside KV heads, which go in a basis that is found for them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.phases import phase
from ckpt_prune.compensation.values import ValueBasis, by_direction, by_head, principal_values
from ckpt_prune.job.decisions import Decision
from ckpt_prune.job.plan import SitePlan
from ckpt_prune.job.records import SiteShift
from ckpt_prune.measure.moments.inputs import Moments, sum_folds
from ckpt_prune.measure.moments.kinds import SpaceMoments, select_input_moments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.model.family import KINDS
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.scoring.unit_scores import centre_gram
from ckpt_prune.stages.spaces.solvers.base import SolvedSite
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver


@dataclass(frozen=True)
class _Turned:
    """A site in the basis of its directions, in which it is a site like any other.

    Attributes:
        turn: the basis.
        tensors: those of the block, the consumer's weight turned.
        folds: moments of its input, turned.
    """

    turn: ValueBasis
    tensors: Mapping[str, Tensor]
    folds: tuple[Moments, ...]


class ValueSolver(ColumnSolver):
    """Solves sites whose units are directions of values: turns them, and drops the last ones of every KV head."""

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """As of columns, by what directions carry."""
        return super().trial(biased=biased) | {"score": "principal"}

    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """What directions carry of the output's energy, a token; of every KV head in its order."""
        found = tuple(each.to(self.device) for each in select_input_moments(folds))
        return self._turn(block, tensors, found).strengths.flatten() / sum_folds(found).count

    def drop_order(self, block: int, tensors: Mapping[str, Tensor], moments: Moments, scores: Tensor) -> DropOrder:
        """As of columns, in the basis of the directions."""
        at = self._turned(block, tensors, (moments,))
        found = super().drop_order(block, at.tensors, at.folds[0], scores)
        return replace(found, basis=at.turn.basis(moments.width))

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Turn values and consumer, and solve what stays (compensation/README.md, section 10)."""
        folds = tuple(each.to(self.device) for each in select_input_moments(moments))
        heads, keep = self.model.copies(self.space), decision.keep
        first = self.description.first(keep, self.model.dimension)
        if keep == self.model.units(self.space) and not folds:  # what stays whole may not have been measured
            scores = torch.zeros(first.numel()) if decision.scores is None else decision.scores
            return self._plan(block, self.model.tensor(block, self.description.consumer), first, scores), None
        at = self._turned(block, tensors, folds)
        scores = at.turn.strengths.flatten() / sum_folds(folds).count
        plan, new = super().solve(block, at.tensors, at.folds, replace(decision, kept=first, scores=scores))
        if new is None:
            return plan, None
        output = self.model.tensor(block, self.description.consumer)
        new[output] = by_head(new[output], heads, keep)
        for module in self.description.readers:
            for name in (self.model.tensor(block, module, kind) for kind in KINDS):
                if name in tensors:
                    new[name] = at.turn.narrow_values(tensors[name].to(self.device), keep).cpu()
        return plan, new

    def divergence(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        solved: SolvedSite,
        fisher: Fisher,
    ) -> float | None:
        """As of columns, in the basis of the directions."""
        if solved[1] is None:
            return 0.0
        at = self._turned(block, tensors, select_input_moments(folds))
        return super().divergence(block, at.tensors, at.folds, self._in_basis(block, solved), fisher)

    def shifted(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        others: SpaceMoments,
        solved: SolvedSite,
    ) -> SiteShift | None:
        """As of columns, in the basis of the directions, which is that of the samples it was solved from."""
        at = self._turned(block, tensors, select_input_moments(folds))
        test = tuple(each.change_basis(at.turn.inputs) for each in select_input_moments(others))
        return super().shifted(block, at.tensors, at.folds, test, self._in_basis(block, solved))

    def _in_basis(self, block: int, solved: SolvedSite) -> SolvedSite:
        """A solved site with its columns by direction."""
        plan, new = solved
        assert new is not None
        heads, output = self.model.copies(self.space), self.model.tensor(block, self.description.consumer)
        keep = new[output].shape[1] // heads // self.model.unit_columns(self.space)
        kept = self.description.first(keep, self.model.dimension).tolist()
        return plan.model_copy(update={"kept": kept}), {**new, output: by_direction(new[output], heads, keep)}

    def columns_of(self, units: Tensor) -> Tensor:
        """The columns of a direction stand beside each other once they are turned."""
        each = self.model.unit_columns(self.space)
        return (units[:, None] * each + torch.arange(each)).flatten()

    def _turned(self, block: int, tensors: Mapping[str, Tensor], folds: tuple[Moments, ...]) -> _Turned:
        turn, name = self._turn(block, tensors, folds), self.model.tensor(block, self.description.consumer)
        turned = {**tensors, name: turn.turn_columns(tensors[name].to(turn.values.device))}
        return _Turned(turn, turned, tuple(each.change_basis(turn.inputs) for each in folds))

    @phase("ranking")
    def _turn(self, block: int, tensors: Mapping[str, Tensor], folds: tuple[Moments, ...]) -> ValueBasis:
        """The basis, by the Gram of all folds; where the consumer may get a bias, that makes up for every mean."""
        whole = sum_folds(folds)
        if whole.gram is None:
            raise UserError("score principal needs Grams: calibrate with --collect moments,gram")
        gram = centre_gram(whole.gram, whole) if self.centred(block, tensors) else whole.gram
        weight = tensors[self.model.tensor(block, self.description.consumer)].to(gram.device)
        return principal_values(weight, gram, self.model.copies(self.space), self.model.units(self.space))

    @staticmethod
    def _describe(plan: SitePlan, weight: Tensor, moments: Moments, kept: Tensor) -> None:
        """CORP's errors alone: how many inputs are active is not told of directions."""
        ColumnSolver.enter_errors(plan, weight, moments, kept)
