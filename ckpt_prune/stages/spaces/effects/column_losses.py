"""Predict what a model loses if the MLP of a block keeps fewer columns: for budgets over columns and types."""

from dataclasses import dataclass

import torch

from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import begin
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.model import Model
from ckpt_prune.recipe.space_kinds import CANDIDATES, CHOSEN
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.spaces.widths import check_effects, dense_ranking

SPACE = "mlp"


@dataclass(frozen=True)
class PredictedColumns:
    """How far a model's output is predicted to move if blocks keep fewer columns.

    Attributes:
        score: by which columns go.
        losses: block → columns that stay → nats a token, the full number among them.
    """

    score: str
    losses: dict[int, dict[int, float]]


def predict_columns(model: Model, statistics: Statistics, multiple: int, device: torch.device) -> PredictedColumns:
    """Predict what each multiple of columns adds in every block (`widths.dense_ranking`: as recipe `best` does).

    Args:
        statistics: of the model, with Grams and gradients of its MLPs (`effects.gradients.add_gradients`).
        multiple: columns that stay are multiples of it.
    """
    recipe = FullRecipe.model_validate(
        {
            "version": 1,
            "name": "columns",
            "allocation": "least-error",
            "widths": "per_layer",
            "container": "any",
            "spaces": {SPACE: {"score": CHOSEN, "compensation": {"method": "ridge"}}},
        }
    )
    prepared = begin(Job(model, recipe, statistics, device=device))
    check_effects(prepared, statistics)
    losses: dict[int, dict[int, float]] = {}
    scores = set()
    for site, by_score in dense_ranking(prepared).items():
        curves = [units.errors for units in by_score if units.errors is not None]
        least = torch.stack(curves).amin(0)
        units = len(least) - 1
        kept = [*range(multiple, units, multiple), units]
        losses[site.block] = {width: float(least[units - width]) for width in kept}
        scores |= {units_of.score for units_of in by_score}
    return PredictedColumns(scores.pop() if len(scores) == 1 else CANDIDATES[0], losses)
