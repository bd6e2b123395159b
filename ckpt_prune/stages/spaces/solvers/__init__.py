"""Solving single sites: which units of one space of one block stay, and what makes up for the dropped ones.

One class for what a space ends in; everything else goes through `solver_of`.
"""

import torch

from ckpt_prune.job.recipe import Recipe
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import Ends, SpaceName
from ckpt_prune.stages.spaces.solvers.base import Solver
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver
from ckpt_prune.stages.spaces.solvers.experts import ExpertSolver
from ckpt_prune.stages.spaces.solvers.logits import LogitSolver
from ckpt_prune.stages.spaces.solvers.rotary import RotarySolver
from ckpt_prune.stages.spaces.solvers.values import ValueSolver

SOLVERS: dict[Ends, type[Solver]] = {
    "columns": ColumnSolver,
    "logits": LogitSolver,
    "rotary": RotarySolver,
    "experts": ExpertSolver,
    "values": ValueSolver,
}
"""What solves the sites of a space, by what it ends in."""


def solver_of(
    model: Model, recipe: Recipe, space: SpaceName, device: torch.device, *, diagnostics: bool = False
) -> Solver:
    """What solves the sites of one space.

    Args:
        model: the dense model.
        recipe: scores and compensation.
        space: which of its spaces.
        device: where the closed forms are solved, in float64.
        diagnostics: also compute CORP's errors, spectra and held-out errors.
    """
    return SOLVERS[model.family.spaces[space].ends](model, recipe, space, device, diagnostics)
