"""Decisions for every site before the first block: how many units stay and, if known, which units and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm

import torch
from torch import Tensor

from ckpt_prune.job.plan import Plan, SitePlan
from ckpt_prune.model.containers.choosing import ANY, PADDED, REMOTE
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Counting, Site, SpaceName
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.scoring.selection import units_kept


@dataclass(frozen=True)
class SiteDecision:
    """The decisions for one site.

    Attributes:
        keep: how many units stay; for q and k, in every head.
        kept: which units, if a plan or a ranking over blocks has chosen them; else scores choose.
        scores: of the units, if they are known.
        plan: the site in a plan, whose compensation is applied again.
        score: which score ranks its units, if that is chosen site by site; else the recipe's.
    """

    keep: int
    kept: Tensor | None = None
    scores: Tensor | None = None
    plan: SitePlan | None = None
    score: str | None = None


@dataclass(frozen=True)
class Losses:
    """Predicted losses of two ways to spread one size over the sites, by the same curves.

    Attributes:
        chosen: the sum over sites, at the widths that are decided.
        per_block: the same if every block may have widths of its own.
    """

    chosen: float
    per_block: float


@dataclass(frozen=True)
class Decisions:
    """The decisions for all sites of a model, made before the first block.

    Attributes:
        recipe: scores, counts and compensation.
        sites: a site that is absent keeps what the recipe's ratio says.
        losses: predicted, if blocks share widths that were found by the least error; else None.
    """

    recipe: Recipe
    sites: Mapping[Site, SiteDecision] = field(default_factory=dict)
    losses: Losses | None = None

    def of(self, model: Model, site: Site) -> SiteDecision:
        if site in self.sites:
            return self.sites[site]
        if site.block not in self.recipe.blocks(model.blocks):
            return SiteDecision(model.units(site.space, site.block))
        return SiteDecision(keep_count(model, self.recipe, site))

    def widths(self, model: Model) -> list[dict[SpaceName, int]]:
        """Return units kept per block and space, of the spaces that the block has."""
        return [
            {
                space: self.of(model, Site(block, space)).keep
                for space in self.recipe.spaces
                if space in model.spaces(block)
            }
            for block in range(model.blocks)
        ]


def keep_count(model: Model, recipe: Recipe, site: Site) -> int:
    """Return how many units of a site stay, by the recipe's numbers or its ratio; for q and k, in every head."""
    space = site.space
    keep = recipe.spaces[space].keep
    if keep is not None:
        return keep[site.block]
    rounding, multiple = rounding_of(model, recipe, space), multiple_of(model, recipe, space)
    return units_kept(model.units(space, site.block), recipe.ratio_of(space), rounding, multiple)


def multiple_of(model: Model, recipe: Recipe, space: SpaceName) -> int:
    """Return what the number of kept units is a multiple of: the recipe's value, else the model's.

    The router's groups of experts, and steps of stock widths that are not filled up, leave no choice: there it is a
    multiple of both.
    """
    chosen, needed = recipe.spaces[space].multiple_of, model.multiple(space)
    if model.family.spaces[space].kind == "experts":
        return lcm(chosen, needed)
    step = stock_step(model, recipe, space)
    return lcm(chosen, step) if chosen > 1 or step > 1 else needed


def stock_step(model: Model, recipe: Recipe, space: SpaceName) -> int:
    """Return what kept units are a multiple of for a stock class; 1 if zeros or code of its own make up for others."""
    own_code = recipe.container in (ANY, REMOTE) or recipe.widths == "per_layer"
    has_own = own_code and not recipe.shares_stock and model.checkpoint.within is None
    return 1 if recipe.container == PADDED or has_own else model.stock_step(space)


def rounding_of(model: Model, recipe: Recipe, space: SpaceName) -> Counting:
    """Return how units x ratio becomes units dropped: the recipe's value, else the family's.

    Steps of stock widths are a good part of all units: the nearest is taken, unless the recipe rounds up by its own.
    """
    if recipe.spaces[space].multiple_of == 1 and stock_step(model, recipe, space) > 1:
        return "steps"
    return recipe.spaces[space].rounding or model.family.spaces[space].rounding


def kept_units(model: Model, recipe: Recipe, kept: Mapping[Site, Tensor]) -> Decisions:
    sites = {site: SiteDecision(len(units) // model.copies(site.space), units) for site, units in kept.items()}
    return Decisions(recipe, sites)


def decide_by_plan(model: Model, plan: Plan) -> Decisions:
    sites: dict[Site, SiteDecision] = {}
    for site in plan.sites:
        scores = torch.tensor(site.scores, dtype=torch.float64)
        keep = len(site.kept) // model.copies(site.site.space)
        sites[site.site] = SiteDecision(keep, torch.tensor(site.kept), scores, site, site.score)
    return Decisions(plan.recipe.at(model.family), sites)
