"""The engine: one block in, its pruned and compensated tensors out. It neither reads nor writes files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.architectures.family import Family, SpaceName
from ckpt_prune.calibration.moments import Moments, total
from ckpt_prune.compensation.diagnostics import diagnose
from ckpt_prune.compensation.fit import Fit, Fold, error, from_moments
from ckpt_prune.compensation.methods import METHODS, absolute_lambda
from ckpt_prune.compensation.strength import choose_lambda
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import SitePlan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.selection import Site, select, unit_scores, units_kept
from ckpt_prune.scoring.scores import SCORES
from ckpt_prune.transform.sources import MomentSource


@dataclass(frozen=True)
class Decisions:
    """What is settled before a block is reached.

    Attributes:
        recipe: scores, counts and compensation.
        kept: site → units that stay, where a plan or a ranking over blocks has settled them; else they are selected
            by score when the block is reached.
        strengths: site → λ, where a plan has settled it.
    """

    recipe: Recipe
    kept: Mapping[Site, Tensor] = field(default_factory=dict)
    strengths: Mapping[Site, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Pruner:
    """Prunes sites and blocks of one model.

    Args:
        family: the model's description.
        config: the dense model's config.
        decisions: what is settled.
        biases: linear modules of a block that have a bias in the output container.
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's j0, floor and rho2 per site (one more factorisation each).
    """

    family: Family
    config: PreTrainedConfig
    decisions: Decisions
    biases: frozenset[str]
    device: torch.device
    diagnostics: bool = False

    def keep_count(self, space: SpaceName) -> int:
        """Units of a space that stay under the recipe's ratio."""
        recipe, description = self.decisions.recipe, self.family.spaces[space]
        own = recipe.spaces[space]
        units = self.family.units(self.config, space)
        return units_kept(units, recipe.ratio_of(space), own.rounding or description.rounding, own.multiple_of)

    def column_scores(self, space: SpaceName, weight: Tensor, moments: Moments | None) -> Tensor:
        """Score of every consumer column, (d_in,) float64."""
        score = SCORES[self.decisions.recipe.spaces[space].score]
        if score.needs_moments and moments is None:
            raise ValueError(f"score {self.decisions.recipe.spaces[space].score} needs moments")
        return score.function(weight, moments)  # type: ignore[arg-type]

    def site(
        self, block: int, space: SpaceName, weight: Tensor, folds: tuple[Moments, ...] | None
    ) -> tuple[SitePlan, Fold | None]:
        """Select the units of one site and solve its compensation.

        Args:
            block: index of the block.
            space: which of its spaces.
            weight: the consumer's, (d_out, d_in).
            folds: moments of its input, or None where the recipe needs none.

        Returns:
            The site's plan, and the consumer's new weight and bias; None where nothing is dropped.

        Raises:
            UserError: λ is to be chosen on folds and there is one only.
        """
        recipe = self.decisions.recipe.spaces[space]
        per_unit = self.family.unit_columns(self.config, space)
        weight = weight.to(self.device)
        folds = tuple(f.to(self.device) for f in folds) if folds else None
        whole = total(folds) if folds else None
        scores = unit_scores(self.column_scores(space, weight, whole), per_unit)
        kept = self.decisions.kept.get((block, space))
        if kept is None:
            kept = select(scores, self.keep_count(space))
        plan = SitePlan(
            block=block,
            space=space,
            consumer=self.family.tensor(block, self.family.spaces[space].consumer),
            units=scores.numel(),
            kept=kept.tolist(),
            scores=[float(f"{s:.6g}") for s in scores.tolist()],
            method="none",
        )
        if kept.numel() == scores.numel():
            return plan, None
        columns = unit_columns(kept, per_unit).to(self.device)
        weight_kept = weight[:, columns].double()
        method = METHODS[recipe.compensation.method]
        plan.method = method.name
        if whole is None or folds is None:
            return plan, Fold(weight_kept)
        if method.needs_gram and whole.gram is None:
            raise UserError(
                f"compensation {method.name} needs Grams, and these statistics have none: "
                "calibrate with --collect moments,gram"
            )
        by_folds = recipe.compensation.lambda_by == "folds" and len(folds) > 1
        fits = [from_moments(weight, f, columns) for f in folds] if by_folds else []
        fit = reduce(add, fits) if fits else from_moments(weight, whole, columns)
        strength = 0.0
        if method.uses_lambda:
            plan.strength = self._strength((block, space), weight_kept, fits)
            strength = absolute_lambda(plan.strength, recipe.compensation.lambda_units, fit)
        fold = method.fit(weight_kept, fit, strength)
        if fit.target_energy:
            plan.error_uncompensated = error(Fold(weight_kept), fit) / fit.target_energy
            plan.error_compensated = error(fold, fit) / fit.target_energy
        if self.diagnostics and whole.gram is not None:
            found = diagnose(weight, whole, columns)
            plan.j0, plan.floor, plan.rho2 = found.uncompensated, found.floor, found.rho2
        return plan, fold

    def _strength(self, site: Site, weight_kept: Tensor, fits: list[Fit]) -> float:
        settled = self.decisions.strengths.get(site)
        if settled is not None:
            return settled
        compensation = self.decisions.recipe.spaces[site[1]].compensation
        if compensation.lambda_by != "folds":
            return compensation.strength
        if not fits:
            raise UserError("lambda_by: folds needs statistics with at least two folds: calibrate with --folds 4")
        assert compensation.lambda_grid is not None
        method = METHODS[compensation.method]
        return choose_lambda(method, weight_kept, fits, compensation.lambda_grid, compensation.lambda_units).value

    def block(
        self, block: int, tensors: Mapping[str, Tensor], source: MomentSource
    ) -> tuple[dict[str, Tensor], list[SitePlan]]:
        """Prune one block.

        Args:
            block: its index.
            tensors: its on-disk tensors.
            source: of moments; it is told the result.

        Returns:
            The block's new tensors, names and dtypes as before with biases added, and the plan of each site.

        Raises:
            UserError: a folded tensor overflows the checkpoint's dtype.
        """
        current = dict(tensors)
        plans: list[SitePlan] = []
        # The order of the description: heads feed the mlp of the same block.
        spaces = [space for space in self.family.spaces if space in self.decisions.recipe.spaces]
        for stage in source.stages(spaces):
            moments = source.moments(block, current, stage)
            for space in stage:
                consumer = self.family.tensor(block, self.family.spaces[space].consumer)
                plan, fold = self.site(block, space, current[consumer], moments.get(space))
                plans.append(plan)
                if fold is not None:
                    self._apply(block, space, current, torch.tensor(plan.kept), fold)
        self._fill_biases(block, current)
        for name, tensor in current.items():
            if tensor is not tensors.get(name) and not torch.isfinite(tensor).all():
                raise UserError(
                    f"{name}: the folded tensor does not fit its dtype {tensor.dtype}: use a gentler recipe"
                )
        source.advance(block, current)
        return current, plans

    def _apply(self, block: int, space: SpaceName, tensors: dict[str, Tensor], kept: Tensor, fold: Fold) -> None:
        description = self.family.spaces[space]
        for module, factors in description.producers.items():
            rows = unit_columns(kept, self.family.per_unit(self.config, factors))
            for name in (self.family.tensor(block, module), self.family.tensor(block, module, "bias")):
                if name in tensors:
                    tensors[name] = tensors[name][rows]
        weight_name = self.family.tensor(block, description.consumer)
        dtype = tensors[weight_name].dtype
        tensors[weight_name] = fold.weight.to("cpu", dtype)
        if fold.bias is not None:
            bias_name = self.family.tensor(block, description.consumer, "bias")
            existing = tensors.get(bias_name)
            bias = fold.bias.cpu() if existing is None else fold.bias.cpu() + existing.double()
            tensors[bias_name] = bias.to(dtype)

    def _fill_biases(self, block: int, tensors: dict[str, Tensor]) -> None:
        """Zeros in the slots that the container opens and nothing fills."""
        for module in sorted(self.biases):
            name = self.family.tensor(block, module, "bias")
            if name not in tensors:
                weight = tensors[self.family.tensor(block, module)]
                tensors[name] = torch.zeros(weight.shape[0], dtype=weight.dtype)


def unit_columns(kept: Tensor, per_unit: int) -> Tensor:
    """Columns (or rows) of the kept units: unit u covers u * per_unit ... (u + 1) * per_unit - 1."""
    return (kept[:, None] * per_unit + torch.arange(per_unit, device=kept.device)).flatten()
