"""What is settled of every site before the first block: how many units stay, and where it is known, which and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import lcm

import torch
from torch import Tensor

from ckpt_prune.job.plan import Plan, SitePlan
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.selection import units_kept
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Rounding, Site, SpaceName


@dataclass(frozen=True)
class Decision:
    """What is settled of one site.

    Attributes:
        keep: how many units stay; of q and k, in every head.
        kept: which ones, where a plan or a ranking over blocks has settled them; else they are selected by score.
        scores: of the units, where they are known.
        plan: what a plan says of the site: its compensation is that one's.
        score: which one its units are ranked by, where that is chosen site by site; else the recipe says.
    """

    keep: int
    kept: Tensor | None = None
    scores: Tensor | None = None
    plan: SitePlan | None = None
    score: str | None = None


@dataclass(frozen=True)
class Losses:
    """What two ways to share out one size over the sites are predicted to lose, by the same curves.

    Attributes:
        chosen: the sum over sites of the widths that are decided.
        per_block: the same where every block may have widths of its own.
    """

    chosen: float
    per_block: float


@dataclass(frozen=True)
class Decisions:
    """What is settled of a model.

    Attributes:
        recipe: scores, counts and compensation.
        sites: what is settled of each; a site that is left out keeps what the recipe's ratio says.
        losses: predicted, where blocks share widths that were found by the least error; else None.
    """

    recipe: Recipe
    sites: Mapping[Site, Decision] = field(default_factory=dict)
    losses: Losses | None = None

    def of(self, model: Model, site: Site) -> Decision:
        """What is settled of one site."""
        known = self.sites.get(site)
        if known is not None:
            return known
        if site.block not in self.recipe.blocks(model.blocks):
            return Decision(model.units(site.space))
        return Decision(keep_count(model, self.recipe, site.space))

    def widths(self, model: Model) -> list[dict[SpaceName, int]]:
        """Units kept per block and space."""
        return [
            {
                space: self.of(model, Site(block, space)).keep
                for space in self.recipe.spaces
                if block in model.spaced_blocks
            }
            for block in range(model.blocks)
        ]

    def with_recipe(self, recipe: Recipe) -> "Decisions":
        """These decisions under another recipe that keeps the same units."""
        return replace(self, recipe=recipe)


def keep_count(model: Model, recipe: Recipe, space: SpaceName) -> int:
    """Units of a space that stay under the recipe's ratio in a block that is pruned; of q and k, in every head.

    Raises:
        UserError: none would.
    """
    rounding, multiple = rounding_of(model, recipe, space), multiple_of(model, recipe, space)
    return units_kept(model.units(space), recipe.ratio_of(space), rounding, multiple)


def multiple_of(model: Model, recipe: Recipe, space: SpaceName) -> int:
    """What the number of kept units is a multiple of: as the recipe says, else as the model runs.

    Groups of experts are no matter of choice: there it is a multiple of both.
    """
    own, needed = recipe.spaces[space].multiple_of, model.multiple(space)
    if model.family.spaces[space].ends == "experts":
        return lcm(own, needed)
    return own if own > 1 else needed


def rounding_of(model: Model, recipe: Recipe, space: SpaceName) -> Rounding:
    """How units x ratio becomes units dropped: as the recipe says, else as the family does."""
    return recipe.spaces[space].rounding or model.family.spaces[space].rounding


def kept_units(model: Model, recipe: Recipe, kept: Mapping[Site, Tensor]) -> Decisions:
    """Decisions from the units that stay."""
    sites = {site: Decision(len(units) // model.copies(site.space), units) for site, units in kept.items()}
    return Decisions(recipe, sites)


def planned(model: Model, plan: Plan) -> Decisions:
    """What a plan has settled."""
    sites: dict[Site, Decision] = {}
    for site in plan.sites:
        scores = torch.tensor(site.scores, dtype=torch.float64)
        keep = len(site.kept) // model.copies(site.site.space)
        sites[site.site] = Decision(keep, torch.tensor(site.kept), scores, site, site.score)
    return Decisions(plan.recipe.at(model.family), sites)
