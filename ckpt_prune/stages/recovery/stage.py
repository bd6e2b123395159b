"""The work of the stage `recovery`: train what stays, in a recipe or as the command `recover` does it."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.job.form import Form
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.run import Run
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.step import Step
from ckpt_prune.model.family import DATA_OPTIONS
from ckpt_prune.model.model import Model
from ckpt_prune.stages.recovery.keys import Afterwards, Recovery
from ckpt_prune.stages.recovery.reports import RECOVERED
from ckpt_prune.stages.recovery.run import check_trainable, finish_recovery, recover_step
from ckpt_prune.stages.recovery.run_afterwards import (
    afterwards_step,
    check_afterwards,
    lay_out,
    train_before_blocks,
    write_adapter,
)
from ckpt_prune.stages.recovery.scale_blocks import SCALES


class RecoveryStage(Stage[Recovery]):
    """Trains each block right after it is pruned (LaCo), or scales of all at the end.

        version: 1
        name: trained
        ratio: 0.2
        spaces: {mlp: {score: rcpu, compensation: {method: ridge}}}
        recovery: {method: scales}

    In order: `check` and `check_training` refuse too few samples. `step` trains a block (LaCo). `after_blocks` trains
    scales of all blocks and multiplies them in; `rewrites_blocks` says if a killed run had begun that. `report` has the
    losses.
    """

    of = Recovery

    def check_source(self, model: Model) -> None:
        """Refuse nothing: every stored form can be trained."""

    def check(self, prepared: Prepared) -> None:
        self.keys.blocks(prepared.model.blocks)
        if self.keys.method == "snows" and prepared.model.family.experts is not None:
            raise UserError("snows is not for experts, which read what their router sends them: recover by laco")
        if prepared.job.training is not None:
            check_trainable(len(prepared.job.training.samples))

    def check_training(self, prepared: Prepared) -> None:
        if prepared.job.training is None:
            data = DATA_OPTIONS[prepared.model.family.modality]
            raise UserError(f"recipe {prepared.recipe.name} recovers on samples, beside any statistics: give {data}")

    def plan_lines(self, prepared: Prepared) -> list[str]:
        training = prepared.job.training
        assert training is not None
        blocks, how = (
            self.keys.blocks(prepared.model.blocks),
            "" if self.keys.method == "laco" else f" by {self.keys.method}",
        )
        return [
            f"to be recovered{how}: {len(blocks)} of {prepared.model.blocks} blocks, "
            f"{plural(self.keys.epochs, 'epoch')} on {len(training.samples)} samples"
        ]

    def step(self, prepared: Prepared, run: Run) -> Step | None:
        return recover_step(self.keys, prepared)

    def rewrites_blocks(self, run: Run) -> bool:
        return run.writer is not None and SCALES in run.writer.notes

    def after_blocks(self, prepared: Prepared, run: Run) -> None:
        finish_recovery(self.keys, prepared, run)

    def report(self, prepared: Prepared, records: Sequence[Any], run: Run) -> dict[str, Any]:
        return {
            "recovery": run.done.get("recovery"),
            "adapters": run.done.get("adapters"),
            "layers": list(records),
        }


class AfterwardsStage(RecoveryStage):
    """Recovers a model that was pruned before, also by LoRA. Shapes, dtypes, names and zeros stay."""

    of = Afterwards
    keys: Afterwards

    def check(self, prepared: Prepared) -> None:
        super().check(prepared)
        check_afterwards(self.keys, prepared)

    def preview(self, prepared: Prepared) -> Prepared:
        return lay_out(self.keys, prepared)

    def before_blocks(self, prepared: Prepared, run: Run) -> Prepared:
        train_before_blocks(self.keys, prepared, run)
        return prepared

    def step(self, prepared: Prepared, run: Run) -> Step | None:
        return afterwards_step(self.keys, prepared, run)

    def after_blocks(self, prepared: Prepared, run: Run) -> None:
        super().after_blocks(prepared, run)
        write_adapter(self.keys, prepared, run)

    def form(self) -> Form:
        return RECOVERED
