"""The keys of `bare`: blocks lose their attention and a part of their MLP, and are trained to do without (DC-ViT)."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator

from ckpt_prune.common.block_range import checked_blocks
from ckpt_prune.options.training import RecoverySettings
from ckpt_prune.recipe.recipe import Recipe, StageKeys

_OTHERS = ("depth", "hidden", "rotation", "mask", "low_rank", "recovery", "quantize")


class Bare(StageKeys):
    """Blocks without attention, with a share of their MLP, trained towards the dense model's last features."""

    key = "bare"
    summary = "Blocks that lose their attention and a part of their MLP, and are trained to do without (DC-ViT)."
    asks = frozenset({"attention", "widths"})
    goal = "vision"
    changes_model = True
    trains = True
    doing = "written"
    does = "takes the attention out of blocks"
    by_itself = "`ckpt-prune prune --recipe dc-vit`"
    unplannable = "trains what it leaves, on images: use `ckpt-prune prune --images`"
    excludes: ClassVar[Mapping[str, str]] = {
        other: f"bare trains the model that it leaves: {other} does not go with it" for other in _OTHERS
    }

    blocks: list[int] | None = Field(
        None,
        min_length=1,
        description="These blocks, counted from 0, lose their attention, in this order; nothing is tried. Default: "
        "those that are found by trying each.",
    )
    epochs: int = Field(2000, ge=1, description="Passes over the images after each block that is replaced.")
    trial_epochs: int | None = Field(
        None, ge=1, description="Passes while one block alone is replaced, to find which ones. Default: epochs."
    )
    lr: float = Field(3e-5, gt=0, le=1e6, description="Learning rate of AdamW; it falls along a cosine.")
    weight_decay: float = Field(1e-4, ge=0, le=1, description="Of AdamW.")
    warm_up: int = Field(20, ge=0, description="Epochs over which the learning rate climbs.")
    batch: int = Field(64, ge=1, description="Images per step of the optimizer.")
    accumulate: int = Field(1, ge=1, description="Send a batch through the model in this many parts at most.")
    held_out: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of the images that is not trained on. Trials are compared there, and the best epoch is "
        "chosen. 0: both on a tenth of the images that are trained on.",
    )
    patience: int = Field(2000, ge=1, description="Stop after so many epochs in which the error there did not fall.")

    @field_validator("blocks")
    @classmethod
    def _once(cls, value: list[int] | None) -> list[int] | None:
        return checked_blocks(value)

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.spaces:
            raise ValueError("bare takes the MLP's columns by itself: spaces do not go with it")
        recipe.refuse_keys_of_spaces("bare", containers=("any", "remote"))
        if recipe.size is not None and recipe.size.kind != "flops":
            raise ValueError("bare saves FLOPs: say --target-flops, or --ratio for the share that goes")
        if recipe.layers is not None:
            raise ValueError("layers is for spaces: say bare.blocks")

    def needs_moments(self, recipe: Recipe) -> bool:
        return True

    def measures_prefix(self, recipe: Recipe) -> bool:
        return True

    def needs_samples(self, recipe: Recipe) -> bool:
        return True

    def needs_own_code(self, recipe: Recipe) -> bool:
        return True

    def alone(self, recipe: Recipe) -> str:
        return "trains the whole model"

    @property
    def runs_model(self) -> bool:
        return True

    def settings(self, epochs: int) -> RecoverySettings:
        """Return the settings of the training loop."""
        training = self.model_dump(include={"batch", "accumulate", "held_out", "patience"})
        return RecoverySettings.model_validate({**training, "epochs": epochs, "schedule": "cosine"})
