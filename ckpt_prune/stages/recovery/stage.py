"""The stage `recovery`: train what stays, by LaCo block by block, or by scales at the end."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.stage import Stage
from ckpt_prune.job.training_settings import RecoverySettings

if TYPE_CHECKING:
    from ckpt_prune.job.prepared import Prepared
    from ckpt_prune.job.run import Run
    from ckpt_prune.job.step import Step


class Recovery(RecoverySettings, Stage):
    """Recovery in a recipe: by LaCo of each block right after it is pruned, by scales of all at the end."""

    key = "recovery"
    goal = "recovery"
    summary = "Train what stays: of each block right after it is pruned (LaCo), or scales of all at the end."
    prunes = False
    later: ClassVar[Mapping[str, Any]] = {"method": "laco"}

    samples: int | None = Field(
        None,
        ge=2,
        description="Windows, or images, to train on. Default: those of the calibration; of scales as many others.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of the order of samples.")

    @model_validator(mode="after")
    def _in_a_recipe(self) -> Self:
        if self.method == "lora":
            raise ValueError("lora holds the whole model: recover the output with `ckpt-prune recover --method lora`")
        own = [key for key, odd in (("norms", self.norms), ("teacher", self.teacher != "dense")) if odd]
        if self.method == "scales" and own:
            raise ValueError(f"{own[0]} is for method laco: scales are of linear modules, towards the dense model")
        return self

    def check_recipe(self, recipe: Recipe) -> None:
        """Refuse to recover blocks one by one where some of them are gone."""
        if recipe.has("depth") and not self.at_the_end:
            raise ValueError(
                "depth drops whole blocks: recover the others by scales (recovery.method), or afterwards, with "
                "`ckpt-prune recover`"
            )

    def needs_samples(self, recipe: Recipe) -> bool:
        """Return True: blocks are trained on samples."""
        return True

    @property
    def at_the_end(self) -> bool:
        """Whether all blocks are recovered at the end, rather than each right after it is pruned."""
        return self.method == "scales"

    # ---- work ------------------------------------------------------------------------------------------------

    def check(self, prepared: "Prepared") -> None:
        """Refuse blocks that the model does not have, and too few samples to train on."""
        from ckpt_prune.stages.recovery.run import check_recovery

        check_recovery(self, prepared)

    def check_training(self, prepared: "Prepared") -> None:
        """Refuse to run without samples to train on."""
        from ckpt_prune.stages.recovery.run import check_training

        check_training(prepared)

    def step(self, prepared: "Prepared", run: "Run") -> "Step | None":
        """Return what trains a block right after it is pruned (LaCo)."""
        from ckpt_prune.stages.recovery.run import recover_step

        return recover_step(self, prepared)

    def rewrites_blocks(self, run: "Run") -> bool:
        """Return True if an interrupted run has begun to scale the blocks."""
        from ckpt_prune.stages.recovery.rescaling import SCALES

        return run.writer is not None and SCALES in run.writer.notes

    def after_blocks(self, prepared: "Prepared", run: "Run") -> None:
        """Fit scales to the blocks that are written, and multiply them in; or note what LaCo has done."""
        from ckpt_prune.stages.recovery.run import finish_recovery

        finish_recovery(self, prepared, run)

    def report(self, prepared: "Prepared", records: Sequence[Any], run: "Run") -> dict[str, Any]:
        """Return how blocks were recovered."""
        return {
            "recovery": run.done.get("recovery"),
            "adapters": run.done.get("adapters"),
            "layers": list(records),
        }
