"""The engine: one block in, its pruned and compensated tensors out. It neither reads nor writes files."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.architectures.family import ColumnSpace, Family, SpaceName
from ckpt_prune.calibration.kinds import SpaceMoments
from ckpt_prune.calibration.sources import MomentSource
from ckpt_prune.errors import UserError
from ckpt_prune.planning.plan import SitePlan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.selection import Site, units_kept
from ckpt_prune.transform.sites import Settled, Sites, rows_of_heads_left, unit_columns, unit_rows


@dataclass(frozen=True)
class Decisions:
    """What is settled before a block is reached.

    Attributes:
        recipe: scores, counts and compensation.
        kept: site → units that stay, where a plan or a ranking over blocks has settled them; else they are selected
            by score when the block is reached.
        plans: site → its plan, where one has settled its compensation.
        counts: site → how many units stay (of q and k, in every head), where a budget has settled it; else the
            recipe's ratio does.
        scores: site → scores of its units, where they are known.
    """

    recipe: Recipe
    kept: Mapping[Site, Tensor] = field(default_factory=dict)
    plans: Mapping[Site, SitePlan] = field(default_factory=dict)
    counts: Mapping[Site, int] = field(default_factory=dict)
    scores: Mapping[Site, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Pruner:
    """Prunes sites and blocks of one model.

    Args:
        family: the model's description.
        config: the dense model's config.
        decisions: what is settled.
        biases: linear modules of a block that have a bias in the output container.
        padded: spaces that the output container holds at their dense width, with zeros.
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's errors, spectra and held-out errors per site.
    """

    family: Family
    config: PreTrainedConfig
    decisions: Decisions
    biases: frozenset[str]
    device: torch.device
    diagnostics: bool = False
    padded: frozenset[SpaceName] = frozenset()

    record = SitePlan

    @property
    def sites(self) -> Sites:
        """What solves single sites."""
        return Sites(self.family, self.config, self.decisions.recipe, self.device, self.diagnostics)

    def keep_count(self, space: SpaceName) -> int:
        """Units of a space that stay under the recipe's ratio; of q and k, in every head."""
        recipe, description = self.decisions.recipe, self.family.spaces[space]
        own = recipe.spaces[space]
        units = self.family.units(self.config, space)
        return units_kept(units, recipe.ratio_of(space), own.rounding or description.rounding, own.multiple_of)

    def count(self, block: int, space: SpaceName) -> int:
        """Units of a site that stay; of q and k, in every head."""
        settled = self.decisions.counts.get((block, space))
        return self.keep_count(space) if settled is None else settled

    def site(
        self, block: int, space: SpaceName, tensors: Mapping[str, Tensor], moments: SpaceMoments | None
    ) -> tuple[SitePlan, dict[str, Tensor] | None]:
        """Select the units of one site and solve its compensation (`Sites.solve`)."""
        site, known = (block, space), self.decisions
        settled = Settled(
            self.count(block, space),
            known.kept.get(site),
            known.scores.get(site),
            known.plans.get(site),
        )
        return self.sites.solve(block, space, tensors, moments, settled)

    def block(
        self, block: int, tensors: Mapping[str, Tensor], source: MomentSource
    ) -> tuple[dict[str, Tensor], list[SitePlan]]:
        """Prune one block.

        Args:
            block: its index.
            tensors: its on-disk tensors.
            source: of moments; telling it the result is up to the caller.

        Returns:
            The block's new tensors, names and dtypes as before with biases added, and the plan of each site.

        Raises:
            UserError: a folded tensor overflows the checkpoint's dtype.
        """
        current = dict(tensors)
        plans: list[SitePlan] = []
        # The order of the description is the order of computation: q and k, then what they weigh, then the mlp.
        spaces = [space for space in self.family.spaces if space in self.decisions.recipe.spaces]
        for stage in source.stages(spaces):
            moments = source.moments(block, current, stage)
            for space in stage:
                plan, new = self.site(block, space, current, moments.get(space))
                plans.append(plan)
                if new is not None:
                    self._apply(block, space, current, torch.tensor(plan.kept), plan.units, new)
        fill_biases(self.family, block, self.biases, current)
        check_overflow(tensors, current)
        self._pad(block, plans, current)
        return current, plans

    def _apply(
        self,
        block: int,
        space: SpaceName,
        tensors: dict[str, Tensor],
        kept: Tensor,
        units: int,
        new: Mapping[str, Tensor],
    ) -> None:
        description = self.family.spaces[space]
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        if isinstance(description, ColumnSpace):
            weight_name = self.family.tensor(block, description.consumer)
            dtypes[self.family.tensor(block, description.consumer, "bias")] = tensors[weight_name].dtype
            for module, stacked in description.producers.items():
                for name in (self.family.tensor(block, module), self.family.tensor(block, module, "bias")):
                    if name in tensors:
                        tensors[name] = tensors[name][unit_rows(kept, units, tensors[name].shape[0], stacked)]
        for name, tensor in new.items():
            tensors[name] = tensor.to(dtypes[name])

    def _pad(self, block: int, plans: list[SitePlan], tensors: dict[str, Tensor]) -> None:
        """Put what stayed back in its dense place, with zeros where the dropped units were: nothing they held acts."""
        kept = {plan.space: torch.tensor(plan.kept) for plan in plans}
        units = {plan.space: plan.units for plan in plans}
        if {"qk", "heads"} <= kept.keys() and "heads" not in self.padded:
            # Rows of q and k of the heads that are left, counted anew.
            width = self.family.dimension(self.config, "head_dim")
            kept["qk"] = rows_of_heads_left(kept["qk"], kept["heads"], width)
            units["qk"] = len(kept["heads"]) * width
        # From the last to the first: heads were dropped from rows that q and k had lost some of already.
        for space in reversed(list(kept)):
            if space in self.padded and len(kept[space]) < units[space]:
                self._pad_space(block, space, kept[space], units[space], tensors)

    def _pad_space(self, block: int, space: SpaceName, kept: Tensor, units: int, tensors: dict[str, Tensor]) -> None:
        description = self.family.spaces[space]
        for module, stacked in self.family.producers(space).items():
            for name in (self.family.tensor(block, module), self.family.tensor(block, module, "bias")):
                if name in tensors:
                    rows = tensors[name].shape[0] // len(kept) * units
                    full = tensors[name].new_zeros(rows, *tensors[name].shape[1:])
                    full[unit_rows(kept, units, rows, stacked)] = tensors[name]
                    tensors[name] = full
        if isinstance(description, ColumnSpace):
            name = self.family.tensor(block, description.consumer)
            per_unit = tensors[name].shape[1] // len(kept)
            full = tensors[name].new_zeros(tensors[name].shape[0], units * per_unit)
            full[:, unit_columns(kept, per_unit)] = tensors[name]
            tensors[name] = full


def fill_biases(family: Family, block: int, biases: Set[str], tensors: dict[str, Tensor]) -> None:
    """Zeros in the slots that the container opens and nothing fills."""
    for module in sorted(biases):
        name = family.tensor(block, module, "bias")
        if name not in tensors:
            weight = tensors[family.tensor(block, module)]
            tensors[name] = torch.zeros(weight.shape[0], dtype=weight.dtype)


def check_overflow(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse a block whose new tensors do not fit their dtype.

    Raises:
        UserError: naming the first that does not.
    """
    for name, tensor in after.items():
        if tensor is not before.get(name) and not torch.isfinite(tensor).all():
            raise UserError(f"{name}: the folded tensor does not fit its dtype {tensor.dtype}: use a gentler recipe")
