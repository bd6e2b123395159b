"""A stock checkpoint to be written: its files, and how each of its tensors is made. Writing it is a run like any."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint
from ckpt_prune.checkpoint.files import read_input, sha256_files
from ckpt_prune.checkpoint.folder_kinds import FolderKind
from ckpt_prune.checkpoint.json_files import canonical_json, parse_json_object, pretty_json
from ckpt_prune.checkpoint.side_files import carried_files, side_files_of, top_names
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import CONVERSION_RECORD
from ckpt_prune.common.progress import track
from ckpt_prune.common.records import FixedRecord
from ckpt_prune.job.form import Form
from ckpt_prune.job.run import Announce, Run, say_changed, say_nothing
from ckpt_prune.job.timing import PhaseTimer
from ckpt_prune.model.containers.rope_keys import state_rope
from ckpt_prune.runner.open_run import OutputFacts, open_staging
from ckpt_prune.runner.publish import put_in_place


class Comparison(Protocol):
    """How a new checkpoint compares with its source in another runtime: see `runtimes.comparison.Proof`."""

    @property
    def passed(self) -> bool:
        """Whether both compute the same."""

    def lines(self) -> list[str]:
        """Return lines for the user."""

    def model_dump(self) -> dict[str, Any]:
        """Return all of it for JSON."""


Compare = Callable[[Path], Comparison]
"""Compares a finished folder, before it takes its place, with its source in another runtime."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor of the new checkpoint. `read` makes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        names: Sequence[str],
        shape: tuple[int, ...],
        make: Callable[..., Tensor] = lambda tensor: tensor,
    ) -> "NewTensor":
        """Return what `make` makes of tensors of a checkpoint, in the dtype of the first."""
        return cls(source.tensors[names[0]].dtype, shape, lambda: make(*source.read(names).values()))


@dataclass(frozen=True)
class StockCheckpoint:
    """A stock checkpoint to be written.

    Attributes:
        name: of the source.
        fingerprint: of the source.
        tensors: on-disk name → how it is made, in the order of the file.
        texts: other files that are made. They replace files of the same name that the source has.
        source: whose side files are copied, if it is a checkpoint.
        notes: lines for the user.
    """

    name: str
    fingerprint: str
    config: dict[str, Any]
    tensors: Mapping[str, NewTensor]
    texts: Mapping[str, str] = field(default_factory=dict)
    source: Checkpoint | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, source: Checkpoint, config: dict[str, Any], tensors: Mapping[str, NewTensor], **changes: Any
    ) -> "StockCheckpoint":
        return cls(source.name, source.fingerprint, config, tensors, source=source, **changes)

    @property
    def copied(self) -> dict[str, Path]:
        """Files of the source that are copied; UserError if one changed since the source was opened."""
        files = {} if self.source is None else carried_files(self.source)
        return {name: path for name, path in files.items() if name not in self.texts}


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint: its folder, the stock class that loads it, lines for the user, perhaps a comparison."""

    output: Path
    model_type: str
    architecture: str
    parameters: int
    notes: tuple[str, ...]
    proof: Comparison | None = None

    @property
    def passed(self) -> bool:
        """Whether it was written: it is not if it computes something else than its source."""
        return self.proof is None or self.proof.passed

    def data(self) -> dict[str, Any]:
        plain = asdict(replace(self, proof=None)) | {"output": str(self.output), "notes": list(self.notes)}
        del plain["proof"]
        validation = None if self.proof is None else self.proof.model_dump()
        return plain | {"written": self.passed, "validation": validation}


class ConversionRecord(FixedRecord):
    """Content of `ckpt_prune_converted.json`.

    Attributes:
        fingerprint: of the source.
        files: file → sha256.
        side_files: names of other files written.
        job: digest of all that the output depends on.
    """

    source: str
    fingerprint: str = ""
    notes: list[str] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)
    side_files: list[str] = Field(default_factory=list)
    job: str = ""

    def data(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def find_conversion(folder: Path) -> ConversionRecord | None:
    """Return the record of a converted checkpoint; None if it is missing or damaged."""
    try:
        return ConversionRecord.read(parse_json_object(read_input(folder / CONVERSION_RECORD)))
    except (OSError, ValueError):
        return None


_CONVERTED = Form(find_conversion, kind=FolderKind(CONVERSION_RECORD, "what `convert` wrote"))


class _FailedProofError(UserError):
    """The new checkpoint computes something else than its source."""

    def __init__(self, proof: Comparison) -> None:
        super().__init__(proof.lines()[-1])
        self.proof = proof


def write_stock(
    stock: StockCheckpoint,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    compare: Compare | None = None,
    announce: Announce = say_nothing,
) -> Conversion:
    """Write a checkpoint, one tensor at a time, or continue an interrupted run that did.

    Nothing is kept of one that does not compute what its source does, if `compare` is given.
    """
    record = ConversionRecord(source=stock.name, fingerprint=stock.fingerprint, notes=list(stock.notes))
    made = [SINGLE, CONFIG, CONVERSION_RECORD, *stock.texts]
    opening = OutputFacts(
        _CONVERTED,
        hashlib.sha256(canonical_json([__version__, "convert", stock.fingerprint]).encode()).hexdigest(),
        [] if stock.source is None else [stock.source],
        lambda: top_names(stock.copied) | {name.partition("/")[0]: None for name in made},
        lambda journal: f"{len(journal.entries)} of {len(stock.tensors)} tensors converted",
    )
    run = Run(out, None, PhaseTimer(torch.device("cpu")), announce)
    proof: Comparison | None = None
    try:
        with open_staging(opening, run, resume=resume, overwrite=overwrite):
            if run.report is None:
                proof = _write(stock, record, run, compare)
    except _FailedProofError as error:
        proof = error.proof
    parameters = sum(prod(tensor.shape) for tensor in stock.tensors.values())
    architecture = stock.config["architectures"][0]
    return Conversion(out, stock.config["model_type"], architecture, parameters, stock.notes, proof)


def _write(stock: StockCheckpoint, record: ConversionRecord, run: Run, compare: Compare | None) -> Comparison | None:
    assert run.staging is not None
    layout = {SINGLE: {name: (tensor.dtype, tensor.shape) for name, tensor in stock.tensors.items()}}
    writer = CheckpointWriter(run.staging, layout, sharded=False)
    if writer.changed is not None:
        run.announce(say_changed(run.out, writer.changed))
    for name, tensor in track(list(stock.tensors.items()), "converting", unit="tensor"):
        if name not in writer.done:
            writer.write(name, tensor.read().contiguous())
            writer.commit(name)
    for name, text in {CONFIG: pretty_json(state_rope(stock.config)), **stock.texts}.items():
        writer.write_text(name, text)
    for name, path in stock.copied.items():
        writer.copy(path, name)
    proof = None if compare is None else compare(writer.folder)
    if proof is not None and not proof.passed:
        raise _FailedProofError(proof)
    digests = sha256_files(writer.folder, [SINGLE, *sorted(writer.side_names)])
    _ = stock.copied  # raises if one changed while it was copied
    if stock.source is not None and (left_out := side_files_of(stock.source).line) is not None:
        run.announce(left_out)
    put_in_place(writer, record, _CONVERTED, digests, run)
    return proof
