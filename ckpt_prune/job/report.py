"""`ckpt_prune.json`: the model that writes it and reads it.

Files of every version with version number 1 are read: keys that are absent have defaults, keys that are not known stay.
Nothing here needs torch.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from ckpt_prune.checkpoint.sentence_modules import SentenceClass
from ckpt_prune.common.filenames import PRUNED_ELSEWHERE
from ckpt_prune.common.records import Block, Count, Figure, FixedRecord, Record
from ckpt_prune.model.cost_record import Cost, WholeSizes
from ckpt_prune.recipe.origin import Origin
from ckpt_prune.recipe.recipe import Recipe

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


class SourceCard(FixedRecord):
    """Metadata of the source's model card that is true of the output too, under the Hub's keys."""

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
    """The size that was asked for, if the recipe was changed to reach it.

    Attributes:
        size: to come down to, as the recipe had it.
        digest: of the recipe that was asked for.
    """

    size: dict[str, Any] | None = None
    digest: str


class RecipeChange(FixedRecord):
    """A key of the recipe that the run has another value for than was asked for.

    Attributes:
        key: with dots.
        asked, used: None where there is none.
        why: in words that follow a colon.
    """

    key: str
    asked: Any = None
    used: Any = None
    why: str = ""

    @property
    def words(self) -> str:
        if self.used is None or self.asked is None:
            return f"{self.key} is {'left out' if self.used is None else 'added'}: {self.why}"
        return f"{self.key} is {self.used} here, and not {self.asked} as the recipe says: {self.why}"


class StoredAs(FixedRecord):
    """The container of the output.

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


class Latency(FixedRecord):
    """Latency of an output and of the dense model, in milliseconds on the machine that pruned.

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


class Loss(FixedRecord):
    """The loss by pruning or rounding: scores of the output and of the dense model on held-out data.

    Attributes:
        of: what was measured: perplexity, top-1 accuracy, cosine of embeddings.
        before, after: of the dense model and of the output; a cosine to the dense model has no `before`.
        kl: mean KL(dense ‖ output) over tokens or images, nats.
        agreement: share of them for which both put the same token or class first.
        samples: how many images an accuracy and `agreement` are shares of; None of tokens, which depend on each other.
        windows: of text, or pairs, that it was measured on; None if that is not known.
        data: the text or images, and how much of them, in words.
        against: name of the dense model.
        verdict: a sentence if the output is bad (`quality.judge`).
        file: in the output that was measured, if not the weights in safetensors.
    """

    optional = frozenset({"samples", "windows", "against", "verdict", "file"})

    of: str
    before: Figure = None
    after: Figure = None
    kl: Figure = None
    agreement: Figure = None
    samples: Annotated[int, Field(ge=1, le=2**63)] | None = None
    windows: Annotated[int, Field(ge=1, le=2**63)] | None = None
    data: str = ""
    against: str | None = None
    verdict: str | None = None
    file: str | None = None


class FileSize(FixedRecord):
    """Bytes of the GGUF file of an output, where a size of it was asked for.

    Attributes:
        name: of the file.
        before: bytes of the file of the dense model, in its own type.
        after: of the file.
    """

    name: str
    before: Count
    after: Count


class BlockTime(FixedRecord):
    """Seconds of one block: of all, and of each `common.phases.Phase`; the rest is reading and writing."""

    block: Block
    seconds: Figure = None
    phases: dict[str, Figure] = Field(default_factory=dict)


class PhaseRecord(FixedRecord):
    """The time of one phase. A resumed run counts only its own time.

    Attributes:
        seconds: wall time.
        peak_bytes: largest resident memory of the process from its start to the phase's end; None if the system does
            not say.
        device_peak_bytes: largest memory allocated on the accelerator during the phase.
        phases: seconds of `common.phases.Phase` in it; the rest is reading and writing.
        blocks: of each block that the phase worked on by itself.
    """

    optional = frozenset({"blocks"})

    name: str
    seconds: Figure = None
    peak_bytes: Count | None = None
    device_peak_bytes: Count | None = None
    phases: dict[str, Figure] = Field(default_factory=dict)
    blocks: list[BlockTime] = Field(default_factory=list)


class CommonReport(FixedRecord):
    """The fields of a report that no stage owns. README.md of show/ lists the keys.

    Attributes:
        origin: where the recipe was fetched from; None for a file on this machine.
        ignored: tensors of the source that are left out, because its class does not load them or another that it ties
            to them has the same values.
        part: of a source that is made of several models; all other figures are about this part, but `loss` and `whole`.
        others: reports of the other parts of it that were pruned before, the last one first.
        whole: sizes of the dense model and of the output, if other parts were pruned before.
        asked: what the recipe was changed for.
        changes: keys of the recipe that the model, the data or runtimes gave another value.
        loss: measured on held-out data when the output was complete, or by `evaluate`; None if it was not.
        warnings: that should be read with the figures, such as of too few calibration tokens.
        calibration: where the moments came from; empty if another tool pruned.
        plan: digest of the plan that was applied.
        stages: phases of the run, in order.
        files: file → sha256, of all but this report and the card; in old files of tensors and config alone.
        side_files: names of what was written beside tensors and config; None in old files.
        job: digest of all that the output depends on: another run of the same job has nothing to do. None in old files.
    """

    optional = frozenset({"origin", "ignored", "part", "others", "whole", "changes"})
    optional |= {"file", "latency", "loss", "warnings"}

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
    others: list[dict[str, Any]] = Field(default_factory=list)
    whole: WholeSizes | None = None
    asked: Asked | None = None
    changes: list[RecipeChange] = Field(default_factory=list)
    calibration: Record
    plan: str | None = None
    container: StoredAs
    before: Cost
    after: Cost
    file: FileSize | None = None
    latency: Latency | None = None
    loss: Loss | None = None
    warnings: list[str] = Field(default_factory=list)
    stages: list[PhaseRecord] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    side_files: list[str] | None = None
    job: str | None = None

    @classmethod
    def more_keys(cls) -> Collection[str]:
        """Return the keys of stages: a stage without a field of its own here has its records under its key."""
        return {kind.key for kind in Recipe.full.kinds}

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
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
        return self.model_dump(mode="json")
