"""How what stays of a model is trained: the keys of a recipe and the options of `recover` alike. Without torch."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from ckpt_prune.job.block_range import blocks_of, checked_range
from ckpt_prune.job.fields import Strict
from ckpt_prune.job.names import Part

Teacher = Literal["dense", "pruned"]
Method = Literal["laco", "lora", "scales"]

_PAPER_RATE, _PAPER_HIDDEN = 5e-5, 4096
"""LaCo's learning rate (section 4.4), and the hidden size of the models that it was found on."""


def _by_method(others: float, scales: float) -> Any:
    """A default that depends on the method.

    Scales are few: more passes over few samples overfit them, and what they gain, a few per cent, is more than a few
    held-out samples can tell.
    """

    def default(given: Mapping[str, Any]) -> float:
        return scales if given.get("method") == "scales" else others

    return default


class RecoverySettings(Strict):
    """How what stays is trained."""

    method: Method = Field(
        "laco",
        description="laco: block by block, towards the dense model's hidden states. scales: factors of what linear "
        "modules read and write, towards the dense model's predictions. lora: adapters on the whole model, which is in "
        "memory, on the next token or the images' classes; merged, zeros kept (extra lora).",
    )
    epochs: int = Field(
        default_factory=_by_method(10, 1),
        ge=1,
        description="Passes over the samples, by laco for each block, at most. [default: 10, of scales 1]",
    )
    lr: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Learning rate of Adam. Default: the paper's 5e-5 at a hidden size of 4096, more at smaller ones "
        "in inverse proportion; of scales 3e-3, or 7.5e-3 times the root of the divergence where that is less.",
    )
    batch: int = Field(
        default_factory=_by_method(4, 1), ge=1, description="Samples per optimiser step. [default: 4, of scales 1]"
    )
    accumulate: int = Field(
        1,
        ge=1,
        description="Parts, at most, that a batch goes through the block in to take less memory; gradients add up.",
    )
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="Of the learning rate over a block's steps: down to zero along a cosine, or constant."
    )
    only: Part | None = Field(None, description="Train these linear modules alone. Default: all.")
    layers: str | None = Field(
        None,
        description="Recover blocks a to b - 1 only, as A:B; either may be left out. The others stay as they are.",
    )
    norms: bool = Field(
        False, description="Train what blocks have beside linear modules, too, as the paper does: norms."
    )
    teacher: Teacher = Field(
        "dense",
        description="What the dense block makes of the dense model's stream (the paper's Algorithm 1), or of the "
        "pruned model's (pruned; its eq. 9).",
    )
    held_out: float = Field(
        default_factory=_by_method(0.1, 0.0),
        ge=0,
        lt=1,
        description="Share of the samples that is not trained on: it decides which epoch's weights are kept, if any. "
        "0: those of the last epoch, as in the paper; nothing is tried at other rates, and errors are told of samples "
        "that were trained on. [default: 0.1, of scales 0]",
    )
    patience: int = Field(
        3,
        ge=1,
        description="Stop a block early after so many epochs without less error on held-out samples than any before.",
    )

    @field_validator("layers")
    @classmethod
    def _a_range(cls, value: str | None) -> str | None:
        return checked_range(value)

    def blocks(self, count: int) -> range:
        """The blocks of a model of `count` that are recovered.

        Raises:
            UserError: the range is empty, or goes beyond the last block.
        """
        return blocks_of(self.layers, count)

    def of_all(self) -> dict[str, Any]:
        """As JSON, those that count where all blocks are trained at once, without what is recorded beside them."""
        own = {"method", "lr", "samples", "seed", "lora"}
        return self.model_dump(mode="json", exclude={*own, "norms", "teacher"})

    def rate(self, hidden: int) -> float:
        """The learning rate at a hidden size."""
        return self.lr if self.lr is not None else _PAPER_RATE * _PAPER_HIDDEN / hidden


class LoraSettings(Strict):
    """Adapters on a whole model."""

    rank: int = Field(8, ge=1, le=2**16, description="Of lora's adapters.")
    alpha: float = Field(16.0, gt=0, le=1e6, description="What lora's adapters are multiplied by, times rank.")
    seconds: float | None = Field(
        None, gt=0, description="Of lora: end training after so many seconds, whatever --epochs says."
    )
