"""The work of the stage `rotation`: importance rotations, learned before the mask (DenoiseRotator)."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import Step
from ckpt_prune.model.containers.checking import check_stock
from ckpt_prune.model.model import Model
from ckpt_prune.stages.rotation.keys import Rotation
from ckpt_prune.stages.rotation.run import (
    check_rotation,
    learn_rotations,
    note_learned,
    report_rotation,
    rotate_unlearned,
    turn_step,
)
from ckpt_prune.stages.shared.measure_dense import measure_dense


class RotationStage(Stage[Rotation]):
    """Learns importance rotations. They leave the model's function as it is.

        version: 1
        name: rotated
        rotation: {kind: shared, steps: 100}
        mask: {method: wanda, pattern: "2:4"}

    In order: `check` refuses families whose stream cannot be turned. `preview` turns nothing, but lays the output out
    so. `run` measures. `before_blocks` learns the rotations, `step` turns each block before the mask, `after_blocks`
    notes what was learned. `report` has the fall of entropy.
    """

    of = Rotation

    def check_source(self, model: Model) -> None:
        check_stock(model, "rotations are absorbed by blocks of the stock shape; masks without them go into it")

    def check(self, prepared: Prepared) -> None:
        check_rotation(self.keys, prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        return rotate_unlearned(self.keys, prepared)

    def plan_lines(self, prepared: Prepared) -> list[str]:
        importance = self.keys.importance_for(prepared.recipe)
        return [f"to be rotated first, {self.keys.kind}: {self.keys.steps} steps of {importance} importance"]

    def run(self, prepared: Prepared, run: Run) -> Prepared:
        return self.preview(measure_dense(prepared, run))

    def before_blocks(self, prepared: Prepared, run: Run) -> Prepared:
        return learn_rotations(self.keys, prepared, run)

    def step(self, prepared: Prepared, run: Run) -> Step | None:
        return turn_step(prepared)

    def after_blocks(self, prepared: Prepared, run: Run) -> None:
        note_learned(prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return report_rotation(self.keys, prepared, run)
