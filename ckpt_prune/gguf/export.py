"""Writing a checkpoint as a GGUF file that llama.cpp runs, and proving the file before it takes its place."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.files import check_place
from ckpt_prune.checkpoint.model_folder import way_to_source
from ckpt_prune.checkpoint.staging import disk_failures, staged_file
from ckpt_prune.common.dense_source import DenseSource
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import human_bytes
from ckpt_prune.common.graph_types import GgufType, OtherTypes
from ckpt_prune.common.progress import Notices
from ckpt_prune.evaluation.whole_model import config_of
from ckpt_prune.gguf import check_gguf_place
from ckpt_prune.gguf.encoders import is_encoder
from ckpt_prune.gguf.fitting import Fitter
from ckpt_prune.gguf.importance import Importance, importance_of_statistics, read_imatrix
from ckpt_prune.gguf.layout import checkpoint_of, lay_out
from ckpt_prune.gguf.llama_cpp import require_runtime
from ckpt_prune.gguf.proof import prove
from ckpt_prune.gguf.reading import open_gguf
from ckpt_prune.gguf.rounding import check_rounding
from ckpt_prune.gguf.stacks import is_stacked
from ckpt_prune.gguf.tokenizer import load_stored_tokenizer, read_tokenizer
from ckpt_prune.gguf.types import (
    NO_OTHERS,
    default_type,
    describe_type,
    kinds_of,
    tensor_bytes,
    type_of_file,
    zero_bytes,
)
from ckpt_prune.gguf.weights import other_weights
from ckpt_prune.gguf.writing import write_gguf
from ckpt_prune.job.job import LiveSamples
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.model.composites import text_part
from ckpt_prune.model.containers.opening import Opening, open_model
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runtimes.comparison import Proof

CPU = torch.device("cpu")
_OF_TEXT = (
    "the file holds the part that generates text; for images llama.cpp takes a second file, which its own converter "
    "makes (--mmproj)"
)
_LARGE = 2**32
"""Bytes in float32, from which on a line says that the proof takes so many."""


@dataclass(frozen=True)
class ExportedGguf:
    """The result of an export.

    Attributes:
        path: of the file.
        architecture: of llama.cpp that it names.
        type: of its matrices.
        bytes: of the file; 0 if it did not pass, and nothing is left.
        notes: what else to say, a line each, printed before the file was written.
        proof: the comparison with PyTorch; None if none was asked for.
    """

    format: ClassVar[str] = "gguf"
    path: Path
    architecture: str
    type: str
    bytes: int
    notes: tuple[str, ...]
    proof: Proof | None

    @property
    def passed(self) -> bool:
        return self.bytes > 0

    def data(self) -> dict[str, Any]:
        proof = None if self.proof is None else self.proof.model_dump()
        return {
            "written": self.passed,
            "out": str(self.path),
            "architecture": self.architecture,
            "type": self.type,
            "bytes": self.bytes,
            "notes": list(self.notes),
            "validation": proof,
        }

    def lines(self) -> list[str]:
        """Return the lines that the terminal shows at the end; the notes were shown before."""
        lines = self.proof.lines() if self.proof else ["not compared with PyTorch"]
        if not self.passed:
            return [*lines, f"nothing is written to {self.path}"]
        return [*lines, f"{self.architecture}, {self.type}, {human_bytes(self.bytes)}: written to {self.path}"]


class _FailedProofError(Exception):
    """The file computes something else."""


def export_gguf(
    model: str,
    out: Path,
    proving: ProofOptions,
    *,
    kind: GgufType | None = None,
    others: OtherTypes = NO_OTHERS,
    proof: bool = True,
    dense: DenseSource | None = None,
    statistics: Path | None = None,
    imatrix: Path | None = None,
    live: LiveSamples | None = None,
    feedback: bool = False,
    device: torch.device = CPU,
    overwrite: bool = False,
    trust: bool = False,
) -> ExportedGguf:
    """Write a checkpoint as a GGUF file; it takes its place only if llama.cpp computes what PyTorch does.

    Args:
        model: folder or Hub id.
        out: file to write.
        proving: what to compare on.
        kind: type of the matrices; None: what the checkpoint has.
        others: types that single matrices have in place of what `kind` gives them.
        proof: compare the file in llama.cpp with PyTorch.
        dense: the model that the checkpoint was pruned from, to say what is lost beside it.
        statistics: folder with sums over the inputs of this checkpoint's matrices, by which errors in them are weighed.
        imatrix: a file with the same, as llama.cpp's tool writes it.
        live: samples that the model is run on, block behind rounded block, to round by what reaches each matrix.
        feedback: with these also try error feedback.
        device: where blocks run on them.
        overwrite: replace another GGUF file.
        trust: accept a checkpoint that asks for code of its own.

    Raises:
        UserError: llama.cpp computes no such model or has no such tokenizer, or is not installed to prove the file;
            or the importance of inputs is of another model.
    """
    check_gguf_place(out, overwrite=overwrite)
    if proof:
        require_runtime()
    source = _open_source(model, trust=trust)
    checkpoint = checkpoint_of(source)
    folder = checkpoint.whole
    chosen = kind or default_type(checkpoint)
    layout = lay_out(source, chosen)
    tokenizer = read_tokenizer(folder, layout.values["vocab_size"], encodes=layout.embeds)
    importance: Importance = {}
    if statistics is not None:
        if not isinstance(source, Model):
            name = layout.architecture.name
            raise UserError(f"--statistics do not go with {name}, whose matrices are rounded to nearest")
        importance = importance_of_statistics(Statistics(statistics), source, chosen)
    elif imatrix is not None:
        importance = read_imatrix(imatrix, layout)
    weighted = bool(importance) or live is not None
    kinds, changed = kinds_of(layout, chosen, others, weighted=weighted)
    check_rounding(kinds.values(), weighted=weighted)
    notes = Notices()
    whole, zeros = sum(tensor_bytes(layout, kinds).values()), zero_bytes(layout, kinds)
    filled = [f"zeros take {human_bytes(zeros)} of {human_bytes(whole)}"] if zeros else []
    part = [_OF_TEXT] if checkpoint.within is not None else []
    for line in (*part, *layout.notes, *tokenizer.notes, *filled, *changed):
        notes(line)
    in_float32 = 4 * sum(math.prod(weight.shape) for weight in layout.tensors.values())
    if proof and in_float32 > _LARGE:
        notes(
            f"the proof loads the whole model, {human_bytes(whole)} in llama.cpp and then {human_bytes(in_float32)} in "
            "PyTorch; --no-validate needs the memory of a tensor or two"
        )
    result: Proof | None = None
    name, size = layout.architecture.name, 0
    try:
        with staged_file(check_place(out)) as (place, _):
            if live is None or not isinstance(source, Model):
                write_gguf(place, layout, chosen, kinds, tokenizer, folder, importance)
            else:
                with _empty_folder(place, "rounded") as rows:
                    fitter = Fitter(source, live, layout, chosen, kinds, rows, feedback=feedback, device=device)
                    write_gguf(place, layout, chosen, kinds, tokenizer, folder, importance, fitter.rounded)
                notes(fitter.describe())
            if proof:
                shown = describe_type(chosen, kinds)
                with _empty_folder(place, "proof") as scratch:
                    result = prove(
                        place,
                        folder,
                        shown,
                        proving,
                        ends=tokenizer.ends,
                        dense=dense,
                        scratch=scratch,
                        trust=trust,
                    )
                if not result.passed:
                    raise _FailedProofError
            size = place.stat().st_size
            checkpoint.check_unchanged()
            check_gguf_place(out, overwrite=overwrite)  # another program may have put a file there
    except _FailedProofError:
        pass
    return ExportedGguf(out, name, chosen, size, tuple(notes.lines), result)


def _open_source(model: str, *, trust: bool) -> Model | Checkpoint:
    """Open what a file is made of: of stacks nothing need be known but their tensors."""
    stored = Checkpoint.open(model, packed=True)
    return stored if is_stacked(stored.config.get("model_type")) else open_text_model(model, trust=trust)


def open_text_model(model: str, *, trust: bool = False) -> Model:
    """Open a model that generates text, or the part of several that does."""
    part = text_part(Checkpoint.open(model, packed=True).config)
    return open_model(model, Opening(trust, packed=True, part=part, spaceless=True))


@contextmanager
def _empty_folder(place: Path, name: str) -> Iterator[Path]:
    """Yield a folder beside a file that grows, and delete it at the end; a killed run may have left one."""
    folder = place.with_name(f"{place.name}-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    with disk_failures(folder):
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def validate_gguf(
    file: Path, against: str, proving: ProofOptions, *, dense: DenseSource | None = None, trust: bool = False
) -> Proof:
    """Compare a GGUF file in llama.cpp with a checkpoint in PyTorch, and its weights with the checkpoint's.

    Raises:
        UserError: the file is damaged, or llama.cpp is not installed or does not load it.
    """
    require_runtime()
    source = _open_source(against, trust=trust)
    folder, opened = checkpoint_of(source).whole, open_gguf(file)
    kind = type_of_file(opened)
    tokens = len(opened.values.get("tokenizer.ggml.tokens", ()))
    _check_tokens(file, tokens, folder, trust=trust)
    ends: tuple[int, ...] = ()
    if not is_encoder(opened.values):
        with suppress(UserError):  # a tokenizer that only another tool writes
            ends = read_tokenizer(folder, tokens).ends
    shown = describe_type(kind, {name: tensor.kind for name, tensor in opened.tensors.items()})
    proof = prove(file, folder, shown, proving, ends=ends, dense=dense, trust=trust)
    return proof.model_copy(update={"other_weights": tuple(other_weights(file, source, kind))})


def _check_tokens(file: Path, tokens: int, folder: Path, *, trust: bool) -> None:
    """Refuse a checkpoint whose texts have tokens that a file lacks, or the other way round.

    A file may lack rows of the embedding that no token of the tokenizer has.
    """
    rows = config_of(folder, trust=trust).get_text_config().vocab_size
    if not min(rows, len(load_stored_tokenizer(folder))) <= tokens <= rows:
        source = f"{'pruned ' if tokens < rows else ''}checkpoint that it was made of{way_to_source(file.parent)}"
        raise UserError(f"{file} has {tokens:,} tokens and {folder} has {rows:,}: give --against the {source}")
