"""Record of a quantised checkpoint, in `ckpt_prune_quantised.json`, and its model card."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ckpt_prune.checkpoint.files import read_input
from ckpt_prune.checkpoint.folder_kinds import FolderKind
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import QUANTISED_RECORD
from ckpt_prune.common.formatting import human_bytes, plural
from ckpt_prune.common.records import Count, Figure, FixedRecord
from ckpt_prune.common.safe_text import as_code, as_markdown
from ckpt_prune.evaluation.quality import lines_of
from ckpt_prune.job.report import Loss, Source
from ckpt_prune.show.model_card import described_by_card, front_matter
from ckpt_prune.stages.quantize.scheme import Format, PackingScheme, Rounding

QUANTISATION_KIND = FolderKind(QUANTISED_RECORD, "what `quantize` wrote", frozenset({"README.md"}))


class RoundedWeight(FixedRecord):
    """One weight: its name on disk, and the change by rounding, Σ(ŵ − w)² / Σw².

    Attributes:
        stored: name of its scheme, if that is not the one of most.
    """

    optional = frozenset({"stored"})

    weight: str
    error: Figure = None
    stored: str | None = None

    @field_validator("stored")
    @classmethod
    def _check_scheme(cls, stored: str | None) -> str | None:
        if stored is not None and PackingScheme.parse(stored) is None:
            raise ValueError("a rounded weight is not dense")
        return stored


class QuantizedWeights(FixedRecord):
    """Which weights were rounded, and how.

    Attributes:
        format, group_size: of most weights; columns that share a scale, None for whole rows.
    """

    format: Format
    group_size: Annotated[int, Field(ge=1)] | None
    rounding: Rounding = "nearest"
    weights: list[RoundedWeight]

    @property
    def scheme(self) -> PackingScheme:
        return PackingScheme(self.format, self.group_size)

    def scheme_of(self, weight: RoundedWeight) -> PackingScheme:
        return (weight.stored and PackingScheme.parse(weight.stored)) or self.scheme

    @property
    def words(self) -> str:
        """Say how weights are stored, and how many in each way if there are several."""
        counts = Counter(self.scheme_of(weight) for weight in self.weights)
        if set(counts) <= {self.scheme}:
            return self.scheme.words
        return ", ".join(f"{count} in {scheme.name}" for scheme, count in counts.most_common())

    def describe(self) -> str:
        """Say in a sentence what is stored how, and what rounding has changed."""
        errors = [weight.error for weight in self.weights if weight.error is not None]
        rounded = "to nearest" if self.rounding == "nearest" else "by GPTQ"
        mean = sum(errors) / max(1, len(errors))
        return (
            f"{plural(len(self.weights), 'linear weight')} of the blocks as {self.words}, rounded {rounded}; "
            "embeddings, norms and heads stay as they were. Rounding changed a weight by "
            f"{mean:.2%} of its energy on average."
        )


class QuantizeFields(FixedRecord):
    """The stored weights of an output that was pruned and rounded in one go."""

    optional = frozenset({"quantize"})

    quantize: QuantizedWeights | None = None


class QuantizationRecord(QuantizedWeights):
    """Content of the file.

    Attributes:
        version: of the file's format.
        ckpt_prune, compressed_tensors, torch, transformers: versions of what wrote it.
        auto_class: of transformers; it loads both checkpoints.
        before, after: bytes of tensors.
        statistics: digest of those that gptq rounded by, if they were measured before.
        samples, sample_digest: number and fingerprint of the samples that it measured behind the rounded blocks.
        report: `ckpt_prune.json` of the source, if it has one.
        losses: measured on held-out data beside the source, and beside the dense model if the source was pruned.
        files: file → sha256.
        side_files: names of other files written.
        job: digest of all that the output depends on.
    """

    optional = frozenset({"losses"})

    version: Literal[1] = 1
    ckpt_prune: str
    compressed_tensors: str
    torch: str
    transformers: str
    source: Source
    auto_class: Annotated[str, Field(pattern=r"^\w+$")]
    before: Count
    after: Count
    statistics: str | None = None
    samples: Count | None = None
    sample_digest: str | None = None
    report: dict[str, Any] | None = None
    losses: list[Loss] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    side_files: list[str] = Field(default_factory=list)
    job: str = ""

    def data(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [
            ("source", self.source.name),
            ("format", self.format),
            ("group_size", self.group_size),
            ("rounding", self.rounding),
            ("before", self.before),
            ("after", self.after),
            ("weights", len(self.weights)),
        ]


def find_record(folder: Path) -> QuantizationRecord | None:
    """Return the record of a quantised checkpoint; None if there is none."""
    return read_record(folder) if (folder / QUANTISED_RECORD).is_file() else None


def read_record(folder: Path) -> QuantizationRecord:
    """Read the record of a quantised checkpoint; refuse one that is missing or damaged."""
    path = folder / QUANTISED_RECORD
    try:
        return QuantizationRecord.read(parse_json_object(read_input(path)))
    except OSError as error:
        raise UserError(
            f"{folder} has no {QUANTISED_RECORD}: give a folder that `ckpt-prune quantize` wrote"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: quantise again") from error


QUANTISED_FROM = "quantized"
"""How the Hub calls what such a model is to its base."""


def card_metadata(record: QuantizationRecord) -> dict[str, Any]:
    values: dict[str, Any] = {"library_name": "transformers"}
    if "/" in record.source.name:
        values |= {"base_model": record.source.name, "base_model_relation": QUANTISED_FROM}
    values |= described_by_card(record.source.card, record.auto_class)
    return values | {"tags": ["ckpt-prune", "compressed-tensors"]}


def make_card(record: QuantizationRecord, found: Sequence[str] = ()) -> str:
    """Make README.md of a quantised checkpoint from its record, with sentences of what else is known."""
    share = record.after / record.before
    return "\n".join(
        [
            front_matter(card_metadata(record)),
            f"# {as_markdown(f'{record.source.name}, {record.format}')}",
            "",
            f"{as_markdown(f'Made by ckpt_prune {record.ckpt_prune}')} from {as_code(record.source.name)}: "
            + record.describe(),
            f"{human_bytes(record.after)} of {human_bytes(record.before)} ({share:.1%}), in the form of "
            f"compressed-tensors (pack-quantized). What it was made from is in `{QUANTISED_RECORD}`.",
            *found,
            "",
            *(f"- {as_markdown(f'{line[0].upper()}{line[1:]}.')}" for loss in record.losses for line in lines_of(loss)),
            *([""] if record.losses else ["What it costs in quality was not measured.", ""]),
            "```python",
            f"from transformers import {record.auto_class}  # needs the package compressed-tensors",
            "",
            f'model = {record.auto_class}.from_pretrained("PATH")',
            "```",
            "",
        ]
    )
