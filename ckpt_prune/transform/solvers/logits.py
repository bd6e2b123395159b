"""Sites that end in the attention logits: dimensions inside heads that q and k share."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.calibration.fisher import Fisher
from ckpt_prune.calibration.kinds import SpaceMoments
from ckpt_prune.calibration.logits import LogitMoments
from ckpt_prune.calibration.moments import total
from ckpt_prune.compensation import logit
from ckpt_prune.compensation.mixing import absorb_mixing
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import SitePlan
from ckpt_prune.planning.records import HeadErrors
from ckpt_prune.planning.selection import in_heads, select_in_heads
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES
from ckpt_prune.transform.decisions import Decision
from ckpt_prune.transform.solvers.base import NO_FOLDS, SolvedSite, Solver

_TRIAL_STRENGTH = 0.001


class LogitSolver(Solver):
    """Solves sites whose units are dimensions of queries and keys, as many in every head."""

    collects = "logits"

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        """Samples whose Grams span the unknowns of a head."""
        return -(-(kept**2) // min(tokens, kept) ** 2), f"{kept} x {kept} unknowns of a head"

    @classmethod
    def trial(cls, *, biased: bool) -> dict[str, Any]:
        """CORP's energy and compensation."""
        return {"score": "logit-energy", "compensation": {"method": "logit", "lambda": _TRIAL_STRENGTH}}

    def scores(
        self, block: int, tensors: Mapping[str, Tensor], folds: SpaceMoments, score: str | None = None
    ) -> Tensor:
        """Scores of the dimensions of every head, (heads, dimensions) float64."""
        query, key = (tensors[self.model.tensor(block, module)].to(self.device) for module in self.description.readers)
        known = tuple(each.to(self.device) for each in _logits(folds))
        heads = query.shape[0] // self.model.units(self.space)
        return LOGIT_SCORES[score or self.own.score].function(query, key, total(known) if known else None, heads)

    def errors(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        scores: Tensor,
        fisher: Fisher | None = None,
    ) -> Tensor:
        """The squared errors of the logits that dropped dimensions carry, as if nothing made up for them."""
        energies = total(tuple(each.to(self.device) for each in _logits(folds))).logit_energy().double()
        order = scores.to(energies.device).argsort(dim=-1, stable=True)
        lost = energies.gather(-1, order).cumsum(-1)  # (heads, dimensions)
        lost = torch.cat([lost.new_zeros(len(lost), 1), lost], 1)
        if fisher is None:
            return lost.sum(0).cpu()
        return (fisher.mean.to(lost.device) @ lost).cpu() / 2

    def divergence(
        self,
        block: int,
        tensors: Mapping[str, Tensor],
        folds: SpaceMoments,
        solved: SolvedSite,
        fisher: Fisher,
    ) -> float | None:
        """Known where every head's error is: a plan has them with diagnostics alone, and this none but of no loss."""
        return 0.0 if solved[1] is None else None

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """As many dimensions of highest score in every head."""
        return select_in_heads(scores, keep)

    def solve(
        self, block: int, tensors: Mapping[str, Tensor], moments: SpaceMoments | None, decision: Decision
    ) -> SolvedSite:
        """Select dimensions of every head and solve what makes up for the others in q and k.

        See compensation/README.md, section 7.
        """
        modules = self.description.readers
        names = [self.model.tensor(block, module) for module in modules]
        biases = [self.model.tensor(block, module, "bias") for module in modules]
        query, key = (tensors[name].to(self.device) for name in names)
        head_dim = self.model.units(self.space)
        heads = query.shape[0] // head_dim
        folds = tuple(each.to(self.device) for each in _logits(moments))
        whole = total(folds) if folds else None
        scores = decision.scores
        if scores is None:
            scores = LOGIT_SCORES[self.own.score].function(query, key, whole, heads)
        kept = self.select(scores, decision.keep) if decision.kept is None else decision.kept
        plan = self._plan(block, None, kept, scores.flatten())
        if kept.numel() == scores.numel():
            return plan, None
        dimensions = in_heads(kept, heads, head_dim).to(self.device)
        plan.method = self.own.compensation.method
        M = torch.zeros(heads, *[dimensions.shape[1]] * 2, dtype=torch.float64, device=self.device)
        if whole is not None:
            M = self._solve_logits(plan, dimensions, folds, whole, decision.plan, M)
        values = [tensors[name].to(self.device) if name in tensors else None for name in biases]
        if plan.method == "none":
            rows = kept.to(self.device)
            new = [query[rows].double(), key[rows].double(), *(v if v is None else v[rows].double() for v in values)]
        else:
            new = list(absorb_mixing(query, key, values[0], values[1], dimensions, M))
        found = zip([*names, *biases], new, strict=True)
        return plan, {name: tensor.cpu() for name, tensor in found if tensor is not None}

    def _solve_logits(
        self,
        plan: SitePlan,
        dimensions: Tensor,
        folds: Sequence[LogitMoments],
        whole: LogitMoments,
        settled: SitePlan | None,
        M: Tensor,
    ) -> Tensor:
        """Solve, and enter errors and diagnostics into the plan."""
        own = self.own.compensation
        system = logit.logit_system(whole, dimensions)
        energy = float(system.energy.sum())
        held_out = None
        if own.method != "none":
            plan.strength = None if settled is None else settled.strength
            if plan.strength is None and own.lambda_by == "folds":
                if len(folds) < 2:
                    raise UserError(NO_FOLDS)
                assert own.lambda_grid is not None
                choice = logit.choose_strength(folds, dimensions, own.lambda_grid, own.lambda_units)
                plan.strength, held_out = choice.value, choice.errors[choice.value]
            elif plan.strength is None:
                plan.strength = own.strength
            solution = logit.solve_logit(system, logit.absolute_strength(plan.strength, own.lambda_units, system))
            M, plan.residual = solution.M, float(solution.residual.max())
        after = logit.logit_error(system, M)
        if energy > 0:
            plan.error_uncompensated = float(system.dropped_energy.sum()) / energy
            plan.error_compensated = float(after.sum()) / energy
        if self.diagnostics and energy > 0:
            found = logit.diagnose_logit(system)
            plan.j0 = float(found.uncompensated.sum()) / whole.samples
            plan.floor = float(found.floor.sum()) / whole.samples
            plan.rho2 = 1 - plan.floor / plan.j0 if plan.j0 > 0 else 1.0
            plan.heads = [
                HeadErrors(
                    head=head,
                    error_uncompensated=float(found.uncompensated[head] / system.energy[head]),
                    error_compensated=float(after[head] / system.energy[head]),
                    floor=float(found.floor[head] / system.energy[head]),
                    rho2=float(found.rho2[head]),
                )
                for head in range(whole.heads)
                if system.energy[head] > 0
            ]
            if len(folds) > 1 and plan.strength is None:
                plan.error_held_out = plan.error_uncompensated
            elif len(folds) > 1 and plan.strength is not None:
                if held_out is None:
                    held_out = logit.held_out_error(folds, dimensions, plan.strength, own.lambda_units)
                plan.error_held_out = held_out
        return M


def _logits(folds: SpaceMoments | None) -> tuple[LogitMoments, ...]:
    return tuple(each for each in folds or () if isinstance(each, LogitMoments))
