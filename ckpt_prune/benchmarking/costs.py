"""What a model costs on paper: parameters, bytes on disk, and FLOPs of a workload."""

import copy
from dataclasses import dataclass
from typing import Any

from ckpt_prune.benchmarking.messages import Phase
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.cost import cost_of
from ckpt_prune.model.context import reserved_positions
from ckpt_prune.model.model import Model


@dataclass(frozen=True)
class Costs:
    """Parameters of a model, and its FLOPs as a polynomial of the number of tokens.

    `job.cost.cost_of` is one: every linear is applied to every token, pooled ones once, and scores and
    their product with the values are over pairs of tokens. So the coefficients also say what one more token costs.
    """

    parameters: int
    once: int
    per_token: int
    per_pair: int

    def flops(self, workload: Workload, phase: Phase) -> int:
        """The cost of one timing of a phase: of the whole batch, or in decode of one step, the mean over all steps.

        Step i after T tokens: one query over T + i keys, i from 1.
        """
        if workload.modality == "image":
            return workload.batch * self.once
        tokens, steps = workload.tokens, workload.steps
        if phase == "decode":
            keys = steps * tokens + steps * (steps + 1) // 2
            return workload.batch * (self.once + self.per_token + self.per_pair * keys // steps)
        return workload.batch * (self.once + self.per_token * tokens + self.per_pair * tokens**2)


def costs_of(checkpoint: Checkpoint) -> Costs | None:
    """The costs of a checkpoint; None where its family has no description."""
    try:
        model = Model.of(checkpoint)
    except UserError:
        return None
    cost = cost_of(model)
    parameters = cost.parameters
    if model.family.modality == "image":
        return Costs(parameters, once=cost.flops, per_token=0, per_pair=0)
    # Through three points goes one parabola; its coefficients are whole numbers.
    one, two, three = (cost_of(model.with_config(_reading(model.config, tokens))).flops for tokens in (1, 2, 3))
    per_pair = (three - 2 * two + one) // 2
    per_token = two - one - 3 * per_pair
    return Costs(parameters, once=one - per_token - per_pair, per_token=per_token, per_pair=per_pair)


def _reading(config: Any, tokens: int) -> Any:
    """The config with a context of so many tokens, which is what FLOPs are counted of."""
    own = copy.copy(config)
    own.max_position_embeddings = tokens + reserved_positions(config)
    return own


def weights_bytes(checkpoint: Checkpoint) -> int:
    """The size of the files that hold the tensors."""
    return sum((checkpoint.path / name).stat().st_size for name in checkpoint.files)
