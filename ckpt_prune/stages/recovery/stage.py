"""The stage `recovery`: train what stays. `Recovery` is part of a recipe, `Afterwards` is the command `recover`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import ADAPTER_FOLDER, ROTATIONS
from ckpt_prune.job.recipe import Recipe, StageKeys
from ckpt_prune.job.stage import Stage
from ckpt_prune.options.training import LoraSettings, RecoverySettings

if TYPE_CHECKING:
    from ckpt_prune.job.form import Form
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
        laco_keys = [key for key, odd in (("norms", self.norms), ("teacher", self.teacher != "dense")) if odd]
        if self.method == "scales" and laco_keys:
            raise ValueError(
                f"{laco_keys[0]} is for method laco: scales are of linear modules, towards the dense model"
            )
        return self

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.has("depth") and not self.at_the_end:
            raise ValueError(
                "depth drops whole blocks: recover the others by scales (recovery.method), or afterwards, with "
                "`ckpt-prune recover`"
            )

    def needs_samples(self, recipe: Recipe) -> bool:
        return True

    @property
    def at_the_end(self) -> bool:
        """Whether all blocks are recovered at the end, rather than each right after it is pruned."""
        return self.method == "scales"

    # ---- work ------------------------------------------------------------------------------------------------

    def check(self, prepared: "Prepared") -> None:
        from ckpt_prune.stages.recovery.run import check_trainable

        self.blocks(prepared.model.blocks)
        if prepared.job.training is not None:
            check_trainable(len(prepared.job.training.samples))

    def check_training(self, prepared: "Prepared") -> None:
        from ckpt_prune.model.family import DATA_OPTIONS

        if prepared.job.training is None:
            data = DATA_OPTIONS[prepared.model.family.modality]
            raise UserError(f"recipe {prepared.recipe.name} recovers on samples, beside any statistics: give {data}")

    def step(self, prepared: "Prepared", run: "Run") -> "Step | None":
        from ckpt_prune.stages.recovery.run import recover_step

        return recover_step(self, prepared)

    def rewrites_blocks(self, run: "Run") -> bool:
        from ckpt_prune.stages.recovery.scale_blocks import SCALES

        return run.writer is not None and SCALES in run.writer.notes

    def after_blocks(self, prepared: "Prepared", run: "Run") -> None:
        from ckpt_prune.stages.recovery.run import finish_recovery

        finish_recovery(self, prepared, run)

    def report(self, prepared: "Prepared", records: Sequence[Any], run: "Run") -> dict[str, Any]:
        return {
            "recovery": run.done.get("recovery"),
            "adapters": run.done.get("adapters"),
            "layers": list(records),
        }


class Afterwards(Recovery):
    """Recovery of a model that was pruned before, also by LoRA. Shapes, dtypes, names and zeros stay."""

    prunes = True
    doing = "recovered"
    bar = "writing"
    takes_outputs = True
    writes = (ROTATIONS, ADAPTER_FOLDER)

    lora: LoraSettings = Field(default_factory=lambda: LoraSettings.model_validate({}))

    @model_validator(mode="after")
    def _in_a_recipe(self) -> Self:
        return self

    def check(self, prepared: "Prepared") -> None:
        from ckpt_prune.stages.recovery.run_afterwards import check_afterwards

        super().check(prepared)
        check_afterwards(self, prepared)

    def preview(self, prepared: "Prepared") -> "Prepared":
        from ckpt_prune.stages.recovery.run_afterwards import lay_out

        return lay_out(self, prepared)

    def before_blocks(self, prepared: "Prepared", run: "Run") -> "Prepared":
        from ckpt_prune.stages.recovery.run_afterwards import train_before_blocks

        train_before_blocks(self, prepared, run)
        return prepared

    def step(self, prepared: "Prepared", run: "Run") -> "Step | None":
        from ckpt_prune.stages.recovery.run_afterwards import afterwards_step

        return afterwards_step(self, prepared, run)

    def after_blocks(self, prepared: "Prepared", run: "Run") -> None:
        from ckpt_prune.stages.recovery.run_afterwards import write_adapter

        super().after_blocks(prepared, run)
        write_adapter(self, prepared, run)

    def form(self) -> "Form":
        from ckpt_prune.stages.recovery.reports import RECOVERED

        return RECOVERED


class RecoverRecipe(Recipe):
    """The recipe of the command `recover`: one stage."""

    kinds: ClassVar[tuple[type[StageKeys], ...]] = (Afterwards,)

    recovery: Afterwards


def recover_recipe(settings: RecoverySettings, lora: LoraSettings | None = None, seed: int = 0) -> RecoverRecipe:
    """Return the recipe that recovers a model by some settings."""
    values = settings.model_dump() | {"seed": seed} | ({} if lora is None else {"lora": lora})
    return RecoverRecipe.model_validate({"version": 1, "name": "recover", "recovery": values})
