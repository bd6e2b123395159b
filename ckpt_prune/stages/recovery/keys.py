"""The keys of `recovery`: train what stays. `Recovery` is part of a recipe, `Afterwards` is the command `recover`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from ckpt_prune.common.filenames import ADAPTER_FOLDER, ROTATIONS
from ckpt_prune.options.training import LoraSettings, RecoverySettings, SnowsSettings
from ckpt_prune.recipe.recipe import Recipe, StageKeys


class Recovery(SnowsSettings, RecoverySettings, StageKeys):
    """Recovery in a recipe: by LaCo or SNOWS of each block right after it is pruned, by scales of all at the end."""

    key = "recovery"
    goal = "recovery"
    summary = "Train what stays: of each block right after it is pruned (LaCo, SNOWS), or scales of all at the end."
    prunes = False
    trains = True
    later: ClassVar[Mapping[str, Any]] = {
        "method": "laco",
        **{key: field.default for key, field in SnowsSettings.model_fields.items()},
    }

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
        if self.method == "snows":
            laco_keys += [key for key, odd in (("lr", self.lr), ("schedule", self.schedule != "cosine")) if odd]
            if laco_keys:
                raise ValueError(f"{laco_keys[0]} is for method laco: snows takes Newton steps on weights")
        elif set_keys := [k for k, field in SnowsSettings.model_fields.items() if getattr(self, k) != field.default]:
            raise ValueError(f"{set_keys[0]} is for method snows, not {self.method}")
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

        if self.method == "snows" and not self.prunes and not recipe.has("mask"):
            raise ValueError("recovery by snows fits the weights that a mask leaves, and the recipe has no mask")

    def alone(self, recipe: Recipe) -> str | None:
        return "recovers by snows" if self.method == "snows" else super().alone(recipe)

    def needs_samples(self, recipe: Recipe) -> bool:
        return True

    @property
    def beside_plan(self) -> str:
        return (
            f"the recipe ends with recovery ({self.method}), which these figures leave out: `prune --plan` asks for "
            "the samples that it takes"
        )

    @property
    def at_the_end(self) -> bool:
        """Whether all blocks are recovered at the end, rather than each right after it is pruned."""
        return self.method == "scales"


class Afterwards(Recovery):
    """Recovery of a model that was pruned before, also by LoRA. Shapes, dtypes, names and zeros stay."""

    prunes = True
    doing = "recovered"
    bar = "writing"
    writes = (ROTATIONS, ADAPTER_FOLDER)

    lora: LoraSettings = Field(default_factory=lambda: LoraSettings.model_validate({}))

    @model_validator(mode="after")
    def _in_a_recipe(self) -> Self:
        return self


class RecoverRecipe(Recipe):
    """The recipe of the command `recover`: one stage."""

    kinds: ClassVar[tuple[type[StageKeys], ...]] = (Afterwards,)

    recovery: Afterwards


def recover_recipe(
    settings: RecoverySettings, lora: LoraSettings | None = None, seed: int = 0, snows: SnowsSettings | None = None
) -> RecoverRecipe:
    """Return the recipe that recovers a model by some settings."""
    values = settings.model_dump() | {"seed": seed} | ({} if lora is None else {"lora": lora})
    values |= {} if snows is None else snows.model_dump()
    return RecoverRecipe.model_validate({"version": 1, "name": "recover", "recovery": values})
