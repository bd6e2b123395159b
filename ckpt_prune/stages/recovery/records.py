"""Records of recovery, block by block and of the model as a whole."""

import math
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from ckpt_prune.common.records import Amount, Block, Count, Figure, FixedRecord, Record
from ckpt_prune.job.report import Source


def _finite(value: float | None) -> float | None:
    return value if not isinstance(value, float) or math.isfinite(value) else None


# JSON has no infinity.
_Finite = Annotated[Figure, BeforeValidator(_finite)]


class RecoveredLayer(FixedRecord):
    """Recovery of one block, on held-out samples, against the dense model's hidden states after it.

    Figures are None where hidden states are not finite.

    Attributes:
        mse_before, cka_before: of the blocks as they were pruned, one after the other, none recovered. That is the
            pruned model itself, unless pruning looks at the recovered blocks before (on the fly, sequential).
        mse_start: of the block as it was pruned, behind recovered blocks.
        mse_after, cka_after: of the block as it is written, behind recovered blocks.
        epochs: run at all rates.
        best_epoch: its weights were kept; 0: the old ones.
        rate: the learning rate of the kept weights; None for the old ones.
        diverged: whether training diverged, at some rate.
        recovered: whether the block has new weights.
        curve: held-out error at the start and after every epoch at the last rate, as a share of the energy of the dense
            hidden states. Empty, and left out of JSON, if nothing was trained, and in files of earlier versions.
    """

    optional = frozenset({"curve"})

    block: Block
    mse_before: _Finite = None
    mse_start: _Finite = None
    mse_after: _Finite = None
    cka_before: _Finite = None
    cka_after: _Finite = None
    epochs: Count
    best_epoch: Count
    rate: Figure = None
    diverged: bool
    recovered: bool
    curve: list[_Finite] = Field(default_factory=list)


class Perplexity(FixedRecord):
    """The perplexity with only so many of the first blocks recovered (LaCo, Figure 3); None: too large for a float."""

    blocks: Block
    perplexity: Figure = None


class Earlier(FixedRecord):
    """The record of a recovery that this one followed."""

    recovery: "RecoveryRecord"
    layers: list[RecoveredLayer] | None = None


class RecoveryRecord(FixedRecord):
    """How blocks were recovered after they were pruned.

    Attributes:
        dense: the model whose hidden states were the target.
        on_the_fly: whether each block was recovered right after it was pruned.
        settings: as `RecoverySettings` has them, with the learning rate and seed that were used.
        data: which samples, how many of them held out, and their tokens.
        perplexity_after: None for models that have no perplexity.
        earlier: what the pruned checkpoint's own report said; absent if blocks were recovered on the fly.
    """

    as_given = True

    dense: Source
    on_the_fly: bool
    settings: Record
    data: Record
    perplexity_after: list[Perplexity] | None = None
    earlier: Earlier | None = None

    @property
    def trained_norms(self) -> bool:
        """Whether this recovery, or one that it followed, trained what blocks have beside linear modules."""
        if getattr(self.settings, "norms", False) is True:
            return True
        return self.earlier is not None and self.earlier.recovery.trained_norms


class Adapters(FixedRecord):
    """How a model was recovered as a whole: by LoRA, or by scales of its linear modules.

    Attributes:
        lr: the highest learning rate of all steps.
        seed: of the adapters and the order of samples.
        settings: of training, as `RecoverySettings.of_all` has them.
        data: fingerprint of the samples.
        seen: whether the model was pruned on these, or fitted to them before; None if that is not known.
        samples, window: how many, those held out among them, and their tokens.
        measured: samples that losses are of: held out, or if none are, some that it was trained on.
        modules: that were changed; 0 if no epoch was better on these.
        parameters: that were trained.
        earlier: the record of such a recovery before this one.
        loss_before, loss_after: on these samples, nats: cross entropy by LoRA, by scales the divergence from the dense
            model.
    """

    optional = frozenset({"earlier", "seen"})

    method: Literal["lora", "scales"] = "lora"
    rank: Amount = None
    alpha: Figure = None
    lr: Figure = None
    seed: Amount = None
    settings: dict[str, Any] = Field(default_factory=dict)
    data: str = ""
    seen: bool | None = None
    samples: Amount = None
    window: Amount = None
    measured: Amount = None
    modules: Count = 0
    parameters: Amount = None
    steps: Amount = None
    epochs: Figure = None
    seconds: Figure = None
    loss_before: Figure = None
    loss_after: Figure = None
    earlier: "Adapters | None" = None


class RecoveryFields(FixedRecord):
    """How blocks were recovered, and adapters or scales trained (in old files under the key lora)."""

    optional = frozenset({"recovery", "layers", "adapters"})

    recovery: RecoveryRecord | None = None
    layers: list[RecoveredLayer] = Field(default_factory=list)
    adapters: Adapters | None = Field(default=None, validation_alias=AliasChoices("adapters", "lora"))
