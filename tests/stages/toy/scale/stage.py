"""The work of the stage `scale`."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.stages.scale.keys import Scale  # type: ignore[import-not-found]
from ckpt_prune.stages.scale.records import ScaledWeight  # type: ignore[import-not-found]
from pydantic import BaseModel

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import Step, Tensors
from ckpt_prune.model.model import Model


class ScaleStep(Step):
    """Multiplies one weight of a block."""

    record = ScaledWeight
    apart = True

    def __init__(self, model: Model, factor: float) -> None:
        self._model, self._factor = model, factor

    def act(self, block: int, tensors: Tensors) -> tuple[Tensors, list[BaseModel]]:
        name = self._model.tensor(block, "mlp.up_proj")
        return {**tensors, name: tensors[name] * self._factor}, [ScaledWeight(weight=name, factor=self._factor)]


class ScaleStage(Stage[Scale]):
    """Multiplies the up projection of every mlp."""

    of = Scale

    def plan_lines(self, prepared: Prepared) -> list[str]:
        return [f"to be scaled: {prepared.model.blocks} weights by {self.keys.factor:g}"]

    def messages(self, prepared: Prepared) -> list[str]:
        return ["a scaled mlp is a toy"]

    def step(self, prepared: Prepared, run: Run) -> Step:
        return ScaleStep(prepared.model, self.keys.factor)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {"scale": [record.model_dump() for record in records]}
