"""Solvers of single sites: they choose the units of a space that stay in a block, and make up for those that go.

One class for each kind of space; other code goes through `solver_of`.
"""

import torch

from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import KindOfSpace, SpaceName
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.stages.spaces.solvers.base import Solver
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver
from ckpt_prune.stages.spaces.solvers.experts import ExpertSolver
from ckpt_prune.stages.spaces.solvers.logits import LogitSolver
from ckpt_prune.stages.spaces.solvers.pooling import PoolingSolver
from ckpt_prune.stages.spaces.solvers.rotary import RotarySolver
from ckpt_prune.stages.spaces.solvers.values import ValueSolver

SOLVERS: dict[KindOfSpace, type[Solver]] = {
    "columns": ColumnSolver,
    "logits": LogitSolver,
    "rotary": RotarySolver,
    "experts": ExpertSolver,
    "values": ValueSolver,
    "pooling": PoolingSolver,
}


def solver_of(
    model: Model, recipe: Recipe, space: SpaceName, device: torch.device, *, diagnostics: bool = False
) -> Solver:
    return SOLVERS[model.family.spaces[space].kind](model, recipe, space, device, diagnostics)
