"""`ckpt_prune.json`: the model that writes it and reads it.

Files of every version with version number 1 are read: keys that are absent have defaults, keys that are not known stay.
Nothing here needs torch.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from ckpt_prune.checkpoint.sentence_modules import SentenceClass
from ckpt_prune.common.filenames import PRUNED_ELSEWHERE
from ckpt_prune.common.records import Amount, Block, Count, Figure, FixedRecord, Record
from ckpt_prune.job.recipe import Recipe
from ckpt_prune.job.records import (
    Cost,
    DepthRecord,
    FactoredLinear,
    HiddenRecord,
    MaskedLinear,
    MaskShares,
    Origin,
    SiteRecord,
)
from ckpt_prune.job.recovery_records import RecoveredLayer

UNKNOWN = "?"
"""Stands for a version in a file that does not say."""


class UsedRecipe(Record):
    """The recipe as it was used, whole; of what another tool pruned, a name alone."""

    version: int | None = None
    name: str
    summary: str = ""
    source: str = ""

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}

    @property
    def elsewhere(self) -> bool:
        """Whether another tool pruned, so that there was no recipe."""
        return self.name == PRUNED_ELSEWHERE

    @property
    def damp(self) -> float | None:
        """Damping of Hessians that the recipe's mask asks for, as a share of their mean diagonal; None without one."""
        mask = self.entries.get("mask")
        return Record.read(mask).figure("damp") if isinstance(mask, dict) else None


class SourceCard(FixedRecord):
    """What the model card of the source says that holds of the output too, under the Hub's keys."""

    optional = frozenset({"license", "license_name", "license_link", "language", "datasets", "pipeline_tag"})

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: list[str] = Field(default_factory=list)
    datasets: list[str] = Field(default_factory=list)
    pipeline_tag: str | None = None


class Source(FixedRecord):
    """Which model: its Hub id or the name of its folder, `Checkpoint.fingerprint`, and what its card says."""

    optional = frozenset({"card"})

    name: str
    fingerprint: str
    card: SourceCard | None = None


class Asked(FixedRecord):
    """What was asked for, if the recipe was changed to reach it.

    Attributes:
        size: to come down to, as the recipe had it.
        digest: of the recipe that was asked for.
    """

    size: dict[str, Any] | None = None
    digest: str


class StrengthSearch(FixedRecord):
    """The λ that was chosen, and text of every λ that was tried → its calibration perplexity; None: not finite."""

    chosen: float
    perplexity: dict[str, Figure] = Field(default_factory=dict)


class StoredAs(FixedRecord):
    """What the output is stored as.

    Attributes:
        remote_code: whether code of this tool travels with it.
        auto_class: the transformers Auto class that loads it.
        padded: spaces that have zeros in place of what was dropped.
        note: why it is not what one might expect.
        sentence_class: the class of sentence-transformers that loads it, if that is another than SentenceTransformer.
    """

    optional = frozenset({"sentence_class"})

    model_type: str
    remote_code: bool = False
    auto_class: Annotated[str, Field(pattern=r"^\w+$")] = "AutoModel"
    padded: list[str] = Field(default_factory=list)
    note: str | None = None
    sentence_class: SentenceClass | None = None


class Mask(FixedRecord):
    """Which weights were zeroed.

    Attributes:
        ratio: the share that was asked for.
        allocation, shares: how blocks came by shares of their own; None if all have one.
    """

    optional = frozenset({"allocation", "shares"})

    method: str
    pattern: str
    ratio: Figure = None
    allocation: str | None = None
    shares: MaskShares | None = None


class ImportanceMap(FixedRecord):
    """Where the importance of a weight lies, before and after it was rotated (DenoiseRotator, Figure 2).

    Attributes:
        rows, columns: shape of the weight.
        before, after: means over cells, from the first row on, as shares of the mean over the whole weight.
        largest_before, largest_after: share of the importance in the largest hundredth of the weights.
    """

    weight: str
    rows: Count
    columns: Count
    before: list[list[Figure]]
    after: list[list[Figure]]
    largest_before: Figure = None
    largest_after: Figure = None


class Learned(FixedRecord):
    """The rotations of one block, or of all (block None): entropy of the importance in nats, and steps of training.

    Attributes:
        curve: steps and the entropy there, as it was computed while training; no more than a plot needs.
        map: of the output projection of the first block alone, if it is turned.
    """

    optional = frozenset({"curve", "map"})

    block: Block | None
    entropy_before: Figure = None
    entropy_after: Figure = None
    steps: Amount = None
    curve: list[tuple[Count, Figure]] = Field(default_factory=list)
    map: ImportanceMap | None = None


class Rotation(FixedRecord):
    """What was rotated before the mask.

    Attributes:
        importance: whose importance of weights was to concentrate.
        turns: whether matrices between blocks stay in the model.
    """

    kind: str
    importance: str | None = None
    turns: bool = False
    learned: list[Learned]


class Perplexity(FixedRecord):
    """The perplexity with only so many of the first blocks recovered (LaCo, Figure 3); None: too large for a float."""

    blocks: Block
    perplexity: Figure = None


class Earlier(FixedRecord):
    """The record of a recovery that this one followed."""

    recovery: "Recovery"
    layers: list[RecoveredLayer] | None = None


class Recovery(FixedRecord):
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
        lr: the highest learning rate.
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


class Latency(FixedRecord):
    """What an output takes beside the dense model, in milliseconds on the machine that pruned.

    Attributes:
        of: what was timed, in words.
        dense, foreseen: by the table of the machine.
        off: share by which that table missed a model that was timed to check it.
        measured_dense, measured: of both models whole, in turns; None if they are too large for that, or the run ended.
    """

    of: str
    dense: Figure = None
    foreseen: Figure = None
    off: Figure = None
    measured_dense: Figure = None
    measured: Figure = None


class Stage(FixedRecord):
    """What one phase of the run took; of a resumed run, the rest of it.

    Attributes:
        seconds: wall time.
        peak_bytes: largest resident memory of the process from its start to the phase's end; None if the system does
            not say.
        device_peak_bytes: largest memory allocated on the accelerator during the phase.
        phases: seconds of calibration, ranking and compensation in it; the rest is reading and writing.
    """

    name: str
    seconds: Figure = None
    peak_bytes: Count | None = None
    device_peak_bytes: Count | None = None
    phases: dict[str, Figure] = Field(default_factory=dict)


class Report(FixedRecord):
    """What an output's `ckpt_prune.json` holds. README.md of show/ lists the keys.

    Attributes:
        origin: where the recipe was fetched from; None for a file on this machine.
        ignored: tensors of the source that are left out, because its class does not load them or another that it ties
            to them has the same values.
        part: of a source that is made of several models; all other figures are about this part.
        asked: what the recipe was changed for.
        calibration: where the moments came from; empty if another tool pruned.
        plan: digest of the plan that was applied.
        depth: which whole blocks are gone; all other records have numbers of blocks in the output.
        stages: phases of the run, in order.
        files: file → sha256, of all but this report and the card; in old files of tensors and config alone.
        side_files: names of what was written beside tensors and config; None in old files.
        job: digest of all that the output depends on: another run of the same job has nothing to do. None in old files.
    """

    optional = frozenset(
        {"origin", "ignored", "part", "latency", "adapters", "depth", "hidden", "factored", "recovery"}
    )

    version: Literal[1] = 1
    ckpt_prune: str = UNKNOWN
    torch: str = UNKNOWN
    transformers: str = UNKNOWN
    recipe: UsedRecipe
    recipe_digest: str = ""
    origin: Origin | None = None
    source: Source
    ignored: list[str] = Field(default_factory=list)
    part: str | None = None
    asked: Asked | None = None
    calibration: Record
    plan: str | None = None
    lambda_search: StrengthSearch | None = None
    container: StoredAs
    before: Cost
    after: Cost
    depth: DepthRecord | None = None
    hidden: HiddenRecord | None = None
    mask: Mask | None = None
    rotation: Rotation | None = None
    sites: list[SiteRecord]
    linears: list[MaskedLinear] = Field(default_factory=list)
    factored: list[FactoredLinear] = Field(default_factory=list)
    latency: Latency | None = None
    adapters: Adapters | None = Field(default=None, validation_alias=AliasChoices("adapters", "lora"))
    recovery: Recovery | None = None
    layers: list[RecoveredLayer] = Field(default_factory=list)
    stages: list[Stage] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    side_files: list[str] | None = None
    job: str | None = None

    @classmethod
    def more_keys(cls) -> Collection[str]:
        """Return the keys of stages: a stage without a field of its own here has its records under its key."""
        return {kind.key for kind in Recipe.full.kinds}

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        """What is worth a glance."""
        return [
            ("source", self.source.name),
            ("recipe", self.recipe.name),
            ("container", self.container.model_type),
            ("before", self.before),
            ("after", self.after),
        ]

    def read_recipe(self) -> Recipe | None:
        """Return the recipe as it was used; None if this version cannot read it, or another tool pruned."""
        try:
            return Recipe.full.model_validate(self.recipe.model_dump(mode="json"))
        except ValidationError:
            return None

    def data(self) -> dict[str, Any]:
        """Return the content of the file."""
        values = self.model_dump(mode="json")
        if self.recovery is None:
            del values["layers"]
        return values
