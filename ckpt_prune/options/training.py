"""How what stays of a model is trained: the keys of a recipe's `recovery`, and options of `recover`. Without torch."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, field_validator

from ckpt_prune.common.block_range import blocks_of, checked_range
from ckpt_prune.common.fields import Strict
from ckpt_prune.common.ratios import Ratio
from ckpt_prune.options.option import TRAINING, Accepts, option

Teacher = Literal["dense", "pruned"]
Method = Literal["laco", "lora", "scales", "snows"]
Schedule = Literal["cosine", "linear", "constant"]
Part = Literal["mlp", "attention"]
"""Which linear modules of a block, where a recipe does not mean all."""

_PAPER_RATE, _PAPER_HIDDEN = 5e-5, 4096
"""LaCo's learning rate (section 4.4), and the hidden size of the models that it was found on."""


def _by_method(others: float, scales: float, snows: float) -> Any:
    """Make a default that depends on the method.

    Scales are few: more passes over few samples overfit them, and what they gain, a few per cent, is more than a few
    held-out samples can tell. SNOWS has its authors' settings.
    """

    def default(given: Mapping[str, Any]) -> float:
        return {"scales": scales, "snows": snows}.get(given["method"], others)

    return default


class RecoverySettings(Strict):
    """How what stays is trained."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group: ClassVar[str] = TRAINING
    method: Method = option(default="laco")
    """laco: train block by block towards the dense model's hidden states. scales: fit factors of what the linear
    modules read and write, towards the dense model's predictions. snows: behind a mask, Newton steps on the weights
    that stay, towards what the next operations make of the dense ones. lora: train adapters on the whole model, which
    is in memory, on the next token or the images' classes, and merge them; zeros stay zeros (needs the extra lora)."""
    epochs: Accepts[int | None, int] = option(default_factory=_by_method(10, 1, 1), ge=1)
    """Passes over the samples; for laco per block, at most. [default: 10; 1 for scales and snows]"""
    lr: float | None = option(default=None, gt=0, le=1e6)
    """Learning rate of Adam. [default: the paper's 5e-5 at a hidden size of 4096, larger at smaller sizes in inverse
    proportion; for scales 3e-3, or 7.5e-3 times the root of the divergence if that is less]"""
    batch: Accepts[int | None, int] = option(default_factory=_by_method(4, 1, 128), ge=1)
    """Samples per step of the optimizer. [default: 4; 1 for scales, 128 for snows]"""
    accumulate: int = option(default=1, ge=1)
    """Send a batch through the block in this many parts at most, which takes less memory; gradients add up."""
    schedule: Schedule = option(default="cosine")
    """Learning rate over a block's steps: down to zero along a cosine or in a line (linear), or constant."""
    only: Part | None = option(default=None)
    """Train only these linear modules. [default: all]"""
    layers: str | None = option(default=None, metavar="A:B")
    """Train only blocks A to B - 1; A or B may be left out. The other blocks stay as they are."""
    norms: bool = option(default=False)
    """Train the norms, too, as the paper does."""
    teacher: Teacher = option(default="dense")
    """Which hidden states the dense block is given: the dense model's (the paper's Algorithm 1) or the pruned model's
    (its eq. 9)."""
    held_out: Accepts[float | str | None, Ratio] = option(default_factory=_by_method(0.1, 0.0, 0.1), ge=0, lt=1)
    """Share of the samples that is not trained on. It decides which epoch's weights are kept, if any. 0: keep those of
    the last epoch that is better than the start; no other learning rate is tried, and errors are those of training
    samples. [default: 0.1; 0 for scales]"""
    patience: int = option(default=3, ge=1)
    """Stop after this many epochs in which the error on held-out samples did not fall."""

    @field_validator("layers")
    @classmethod
    def _check_layers(cls, value: str | None) -> str | None:
        return checked_range(value)

    def blocks(self, count: int) -> range:
        """Return the blocks to train in a model of `count` blocks; UserError if there are none, or it has fewer."""
        return blocks_of(self.layers, count)

    def of_all(self) -> dict[str, Any]:
        """Return as JSON the settings that matter if all blocks are trained at once."""
        other_fields = {"method", "lr", "samples", "seed", "lora", *SnowsSettings.model_fields}
        return self.model_dump(mode="json", exclude={*other_fields, "norms", "teacher"})

    def rate(self, hidden: int) -> float:
        return self.lr if self.lr is not None else _PAPER_RATE * _PAPER_HIDDEN / hidden


class SnowsSettings(Strict):
    """Newton steps on the weights that a mask leaves (SNOWS)."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group: ClassVar[str] = TRAINING
    operations: int = option(default=3, ge=0, le=64)
    """How many operations behind a linear module count beside its own outputs (snows): attention, norm, activation and
    linear modules, up to the end of the block. 0: least squares on its outputs."""
    ridge: float = option(default=1e-4, ge=0, le=1e6)
    """Added to the Hessian's diagonal (snows)."""
    iterations: int = option(default=500, ge=1)
    """Products with the Hessian for each step, at most (snows)."""


class LoraSettings(Strict):
    """Adapters on a whole model."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    group: ClassVar[str] = TRAINING
    rank: int = option(default=8, ge=1, le=2**16)
    """Rank of the adapters (lora)."""
    alpha: float = option(default=16.0, gt=0, le=1e6)
    """The adapters are multiplied by this number divided by the rank (lora)."""
    dropout: Accepts[float | str, Ratio] = option(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that a step leaves out (lora). [default: 0; 0.05 with --data]"""
    warm_up: int | None = option(default=None, ge=0)
    """Steps over which the learning rate climbs (lora). [default: a twentieth of them; 100 with --data]"""
    weight_decay: float = option(default=0.01, ge=0, le=1)
    """Of AdamW (lora). [default: 0.01; 0 with --data]"""
    seconds: float | None = option(default=None, gt=0)
    """End training after this many seconds, whatever --epochs says (lora)."""
    keep_adapter: bool = option(default=False)
    """Also write the adapter itself, as peft does, to OUT/adapter: `peft.PeftModel.from_pretrained` puts it on PRUNED
    (lora)."""

    def beyond_adapters(self) -> dict[str, Any]:
        """Return settings of training that are not the defaults."""
        kept = {"dropout", "warm_up", "weight_decay"}
        return self.model_dump(mode="json", include=kept, exclude_defaults=True)


LLM_PRUNER: Mapping[str, Any] = {
    **{"epochs": 2, "batch": 64, "lr": 1e-4, "schedule": "linear", "held_out": 2000 / 51760},
    **{"dropout": 0.05, "warm_up": 100, "weight_decay": 0.0, "window": 256},
}
"""Settings of LLM-Pruner's tuning (Ma et al. 2023, its released code), the LoRA of LaCo's tables, where `recover
--data` leaves them open. The rest are defaults here. Of Alpaca's 51,760 rows 49,760 are trained on."""
