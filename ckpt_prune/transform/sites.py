"""One site: select the units of one space of one block, and solve what makes up for the dropped ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import overload

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.architectures.family import KINDS, ColumnSpace, Family, LogitSpace, SpaceName
from ckpt_prune.calibration import logits as logit_moments
from ckpt_prune.calibration.kinds import SpaceMoments
from ckpt_prune.calibration.logits import LogitMoments
from ckpt_prune.calibration.moments import Moments, total
from ckpt_prune.compensation import logit
from ckpt_prune.compensation.choice import choose
from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import Blend, Fit, Fold, blend_from_moments, error
from ckpt_prune.compensation.methods import METHODS, absolute_lambda
from ckpt_prune.compensation.spectrum import spectrum
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import HeadErrors, SitePlan
from ckpt_prune.planning.recipe import Compensation, Recipe
from ckpt_prune.planning.selection import in_heads, select, select_in_heads, unit_scores
from ckpt_prune.scoring.logit_scores import LOGIT_SCORES
from ckpt_prune.scoring.scores import SCORES
from ckpt_prune.scoring.unit_scores import UNIT_SCORES

SPECTRUM_WIDTH = 4096
"""Eigenvalues of wider Grams take minutes of a CPU for every site: they are left out."""
NO_FOLDS = "a choice on held-out folds needs statistics with at least two: calibrate with --folds 4"


@dataclass(frozen=True)
class Settled:
    """What is settled of a site before it is reached.

    Attributes:
        keep: how many units stay; of q and k, in every head.
        kept: which ones, where a plan or a ranking over blocks has settled them.
        scores: of the units, where they are known.
        plan: what a plan says of the site: its compensation is that one's.
    """

    keep: int
    kept: Tensor | None = None
    scores: Tensor | None = None
    plan: SitePlan | None = None


@dataclass(frozen=True)
class Sites:
    """Solves the sites of one model.

    Args:
        family: the model's description.
        config: the dense model's config.
        recipe: scores and compensation.
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's errors, spectra and held-out errors.
    """

    family: Family
    config: PreTrainedConfig
    recipe: Recipe
    device: torch.device
    diagnostics: bool = False

    def tensors(self, block: int, space: SpaceName) -> list[str]:
        """On-disk names of what a site is solved from; a bias may be absent."""
        description = self.family.spaces[space]
        if isinstance(description, ColumnSpace):
            return [self.family.tensor(block, description.consumer, kind) for kind in KINDS]
        modules = (description.query, description.key)
        return [self.family.tensor(block, m, kind) for m in modules for kind in KINDS]

    def solve(
        self,
        block: int,
        space: SpaceName,
        tensors: Mapping[str, Tensor],
        moments: SpaceMoments | None,
        settled: Settled,
    ) -> tuple[SitePlan, dict[str, Tensor] | None]:
        """Select and compensate.

        Args:
            block: index of the block.
            space: which of its spaces.
            tensors: at least those that `tensors` names and the block has.
            moments: one for each fold, or None where the recipe needs none.
            settled: what is settled already.

        Returns:
            The site's plan, and the new tensors of the modules that compensation rewrites: float64, a bias complete;
            None where nothing is dropped.

        Raises:
            UserError: λ is to be chosen on folds and there is one only, or statistics lack what the method needs.
        """
        description = self.family.spaces[space]
        if isinstance(description, LogitSpace):
            found = tuple(m for m in moments or () if isinstance(m, LogitMoments))
            return self._logits(block, description, tensors, found, settled)
        inputs = tuple(m for m in moments or () if isinstance(m, Moments))
        return self._columns(block, space, description, tensors, inputs, settled)

    # ---- columns ----------------------------------------------------------------------------------------------

    def column_scores(self, space: SpaceName, weight: Tensor, moments: Moments | None) -> Tensor:
        """Score of every consumer column, (d_in,) float64."""
        score = SCORES[self.recipe.spaces[space].score]
        if score.needs_moments and moments is None:
            raise ValueError(f"score {self.recipe.spaces[space].score} needs moments")
        return score.function(weight, moments)  # type: ignore[arg-type]

    def _columns(
        self,
        block: int,
        space: SpaceName,
        description: ColumnSpace,
        tensors: Mapping[str, Tensor],
        folds: tuple[Moments, ...],
        settled: Settled,
    ) -> tuple[SitePlan, dict[str, Tensor] | None]:
        own = self.recipe.spaces[space].compensation
        name = self.family.tensor(block, description.consumer)
        bias = tensors.get(self.family.tensor(block, description.consumer, "bias"))
        methods = own.methods(biased=bias is not None)
        per_unit = self.family.unit_columns(self.config, space)
        weight = tensors[name].to(self.device)
        folds = tuple(f.to(self.device) for f in folds)
        whole = total(folds) if folds else None
        scores = settled.scores
        if scores is None:
            scores = self._unit_scores(space, weight, whole, methods)
        kept = select(scores, settled.keep) if settled.kept is None else settled.kept
        plan = _plan(block, space, name, kept, scores)
        if kept.numel() == scores.numel():
            return plan, None
        columns = unit_columns(kept, per_unit).to(self.device)
        weight_kept = weight[:, columns].double()
        plan.method = methods[0]
        if whole is None:
            return plan, {name: weight_kept.cpu()}
        lacking = [m for m in methods if METHODS[m].needs_gram]
        if lacking and whole.gram is None:
            raise UserError(
                f"compensation {lacking[0]} needs Grams, and these statistics have none: "
                "calibrate with --collect moments,gram"
            )
        known = settled.plan
        by_folds = own.by_folds and known is None
        if by_folds and len(folds) < 2:
            raise UserError(NO_FOLDS)
        # The sum of folds only where something is chosen on them: diagnostics must not change a bit of the result.
        summed = own.by_folds and len(folds) > 1
        blends = _Blends(weight, folds, columns)
        blend = reduce(add, blends) if summed else blend_from_moments(weight, whole, columns)
        if by_folds:
            self._choose(plan, own, methods, weight_kept, blends, blend)
        elif known is not None:
            plan.method, plan.strength, plan.share = known.method, known.strength, known.share
            plan.error_held_out, plan.runner_up, plan.margin = known.error_held_out, known.runner_up, known.margin
        else:
            plan.strength = own.strength if METHODS[methods[0]].uses_lambda else None
            plan.share = own.drift_shares[0]
        if whole.drift is None:
            plan.share = None
        fit, target = blend.at(plan.share or 0.0), blend.at(1.0)
        fold = METHODS[plan.method].fit(weight_kept, fit, self._absolute(plan, own, fit))
        if target.target_energy:
            plan.error_uncompensated = error(Fold(weight_kept), target) / target.target_energy
            plan.error_compensated = error(fold, target) / target.target_energy
        if self.diagnostics and whole.gram is not None:
            self._describe(plan, weight, whole, columns)
            if len(folds) > 1 and plan.method == "none":
                plan.error_held_out = plan.error_uncompensated
            elif len(folds) > 1 and target.target_energy and plan.error_held_out is None:
                plan.error_held_out = self._held_out(plan, own, weight_kept, blends, blend) / target.target_energy
        new = {name: fold.weight.cpu()}
        if fold.bias is not None:
            bias_name = self.family.tensor(block, description.consumer, "bias")
            new[bias_name] = fold.bias.cpu() if bias is None else fold.bias.cpu() + bias.double()
        return plan, new

    def _choose(
        self,
        plan: SitePlan,
        own: Compensation,
        methods: list[str],
        weight_kept: Tensor,
        folds: Sequence[Blend],
        total: Blend,
    ) -> None:
        """Enter into the plan what is best on held-out folds."""
        shares = own.drift_shares
        chosen = choose(weight_kept, folds, methods, own.grid, shares, own.lambda_units, total=total)
        plan.method, plan.strength, plan.share = chosen.best.method, chosen.best.strength, chosen.best.share
        plan.error_held_out = chosen.best.error
        plan.runner_up, plan.margin = chosen.runner_up, chosen.margin if chosen.runner_up else None

    @staticmethod
    def _describe(plan: SitePlan, weight: Tensor, moments: Moments, kept: Tensor) -> None:
        """Enter CORP's errors and the spectrum of the inputs into the plan."""
        if moments.drift is None:  # the errors are of W x alone
            found = diagnose(weight, moments, kept)
            plan.j0, plan.floor, plan.rho2 = found.uncompensated, found.floor, found.rho2
        plan.width = moments.width
        if moments.width <= SPECTRUM_WIDTH:
            spread = spectrum(moments)
            plan.effective_rank, plan.k95, plan.active = spread.effective_rank, spread.k95, spread.active

    def _held_out(
        self, plan: SitePlan, own: Compensation, weight_kept: Tensor, folds: Sequence[Blend], total: Blend
    ) -> float:
        """Σ ‖y − ŷ‖² over every fold of what the plan's compensation gives when fitted to the others."""
        found = 0.0
        for each in folds:
            train = (total - each).at(plan.share or 0.0)
            trained = METHODS[plan.method].fit(weight_kept, train, self._absolute(plan, own, train))
            found += error(trained, each.at(1.0))
        return found

    @staticmethod
    def _absolute(plan: SitePlan, own: Compensation, fit: Fit) -> float:
        """The plan's λ on the scale of a fit's Gram; 0 where there is none."""
        return 0.0 if plan.strength is None else absolute_lambda(plan.strength, own.lambda_units, fit)

    def _unit_scores(self, space: SpaceName, weight: Tensor, moments: Moments | None, methods: list[str]) -> Tensor:
        """Score of every unit, (units,) float64, where one of `methods` makes up for what goes."""
        name, per_unit = self.recipe.spaces[space].score, self.family.unit_columns(self.config, space)
        if name not in UNIT_SCORES:
            return unit_scores(self.column_scores(space, weight, moments), per_unit)
        if moments is None:
            raise ValueError(f"score {name} needs moments")
        centred = any(METHODS[method].adds_bias for method in methods)
        return UNIT_SCORES[name].function(weight, moments, per_unit, centred=centred)

    def scores(self, block: int, space: SpaceName, tensors: Mapping[str, Tensor], folds: SpaceMoments) -> Tensor:
        """What `solve` ranks the units of a site by; of q and k, (heads, dimensions).

        Args:
            block: index of the block.
            space: which of its spaces.
            tensors: at least those that `tensors` names and the block has.
            folds: moments, one for each fold.
        """
        description = self.family.spaces[space]
        if isinstance(description, LogitSpace):
            known = tuple(m.to(self.device) for m in folds if isinstance(m, LogitMoments))
            whole = logit_moments.total(known) if known else None
            query, key = (tensors[self.family.tensor(block, m)] for m in (description.query, description.key))
            heads = query.shape[0] // self.family.dimension(self.config, "head_dim")
            score = LOGIT_SCORES[self.recipe.spaces[space].score]
            return score.function(query.to(self.device), key.to(self.device), whole, heads)
        weight = tensors[self.family.tensor(block, description.consumer)].to(self.device)
        biased = self.family.tensor(block, description.consumer, "bias") in tensors
        methods = self.recipe.spaces[space].compensation.methods(biased=biased)
        found = tuple(m.to(self.device) for m in folds if isinstance(m, Moments))
        moments = total(found) if found else None
        return self._unit_scores(space, weight, moments, methods)

    # ---- logits -----------------------------------------------------------------------------------------------

    def _logits(
        self,
        block: int,
        description: LogitSpace,
        tensors: Mapping[str, Tensor],
        folds: tuple[LogitMoments, ...],
        settled: Settled,
    ) -> tuple[SitePlan, dict[str, Tensor] | None]:
        own = self.recipe.spaces["qk"]
        modules = (description.query, description.key)
        names = [self.family.tensor(block, module) for module in modules]
        biases = [self.family.tensor(block, module, "bias") for module in modules]
        query, key = (tensors[name].to(self.device) for name in names)
        head_dim = self.family.dimension(self.config, "head_dim")
        heads = query.shape[0] // head_dim
        folds = tuple(f.to(self.device) for f in folds)
        whole = logit_moments.total(folds) if folds else None
        scores = settled.scores
        if scores is None:
            scores = LOGIT_SCORES[own.score].function(query, key, whole, heads)
        kept = select_in_heads(scores, settled.keep) if settled.kept is None else settled.kept
        plan = _plan(block, "qk", None, kept, scores.flatten())
        if kept.numel() == scores.numel():
            return plan, None
        dimensions = in_heads(kept, heads, head_dim).to(self.device)
        plan.method = own.compensation.method
        M = torch.zeros(heads, *[dimensions.shape[1]] * 2, dtype=torch.float64, device=self.device)
        if whole is not None:
            M = self._solve_logits(plan, dimensions, folds, whole, settled.plan, M)
        values = [tensors[name].to(self.device) if name in tensors else None for name in biases]
        if plan.method == "none":
            rows = kept.to(self.device)
            new = [query[rows].double(), key[rows].double(), *(v if v is None else v[rows].double() for v in values)]
        else:
            new = list(logit.fold_projections(query, key, values[0], values[1], dimensions, M))
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
        own = self.recipe.spaces["qk"].compensation
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


@dataclass(frozen=True)
class _Blends(Sequence[Blend]):
    """Blends of the folds of a site, made when asked for: of a width of 11008 each takes a gigabyte."""

    weight: Tensor
    folds: tuple[Moments, ...]
    kept: Tensor

    def __len__(self) -> int:
        return len(self.folds)

    @overload
    def __getitem__(self, index: int) -> Blend: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Blend]: ...
    def __getitem__(self, index: int | slice) -> Blend | Sequence[Blend]:
        if isinstance(index, slice):
            return _Blends(self.weight, self.folds[index], self.kept)
        return blend_from_moments(self.weight, self.folds[index], self.kept)


def _plan(block: int, space: SpaceName, consumer: str | None, kept: Tensor, scores: Tensor) -> SitePlan:
    return SitePlan(
        block=block,
        space=space,
        consumer=consumer,
        units=scores.numel(),
        kept=kept.tolist(),
        scores=[float(f"{s:.6g}") for s in scores.tolist()],
        method="none",
    )


def unit_columns(kept: Tensor, per_unit: int) -> Tensor:
    """Columns of the kept units: unit u covers u * per_unit ... (u + 1) * per_unit - 1."""
    return (kept[:, None] * per_unit + torch.arange(per_unit, device=kept.device)).flatten()


def rows_of_heads_left(rows: Tensor, heads: Tensor, width: int) -> Tensor:
    """Rows of q or k that belong to the kept heads, counted anew among these.

    Args:
        rows: of the dense model, ascending.
        heads: kept ones, ascending.
        width: rows of one head.
    """
    own = rows[torch.isin(rows // width, heads)]
    return torch.searchsorted(heads, own // width) * width + own % width


def unit_rows(kept: Tensor, units: int, rows: int, stacked: int) -> Tensor:
    """Rows of the kept units in a producer.

    Args:
        kept: units, ascending.
        units: in all.
        rows: of the producer.
        stacked: how many times the units stand in its rows, one after the other.
    """
    part = rows // stacked
    own = unit_columns(kept, part // units)
    return torch.cat([own + copy * part for copy in range(stacked)])
