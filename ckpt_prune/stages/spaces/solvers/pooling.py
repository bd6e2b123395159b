"""Sites of what pools or merges the tokens of a sample behind the last block."""

import torch
from torch import Tensor

from ckpt_prune.job.step import Tensors
from ckpt_prune.measure.moments.kinds import SpaceMoments
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.stages.spaces.solvers.columns import ColumnSolver


class PoolingSolver(ColumnSolver):
    """Solves sites whose consumer sees one or few tokens of a sample, and adds nothing to the residual stream."""

    def samples_needed(self, kept: int, tokens: int) -> tuple[int, str]:
        return super().samples_needed(kept, self.model.family.rows_of(self.description.consumer, tokens))

    @property
    def has_effects(self) -> bool:
        """False: effects are of what blocks add to the stream."""
        return False

    def errors(
        self, block: int, tensors: Tensors, folds: SpaceMoments, scores: Tensor, fisher: Fisher | None = None
    ) -> Tensor:
        """Return the errors of all widths, or zeros beside effects where the width is that of the blocks' MLPs."""
        if self.recipe.weighed_by_effect and self.description.units in self.model.family.together:
            return torch.zeros(scores.numel() + 1, dtype=torch.float64)
        return super().errors(block, tensors, folds, scores, fisher)
