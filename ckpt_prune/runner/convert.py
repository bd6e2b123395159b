"""`convert`: a model of another kind is written as a stock checkpoint, one tensor at a time, in a run like any."""

import hashlib
from math import prod
from pathlib import Path

import torch

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint
from ckpt_prune.checkpoint.files import sha256_files
from ckpt_prune.checkpoint.folder_kinds import CONVERSION_KIND
from ckpt_prune.checkpoint.json_files import canonical_json, pretty_json
from ckpt_prune.checkpoint.quantised import is_gguf
from ckpt_prune.checkpoint.side_files import side_files_of, top_names
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import CONVERSION_RECORD
from ckpt_prune.common.progress import Notices, track
from ckpt_prune.conversion.convert import stock_of_checkpoint
from ckpt_prune.conversion.stock_checkpoint import (
    Compare,
    Conversion,
    ConversionRecord,
    RuntimeComparison,
    StockCheckpoint,
    find_conversion,
)
from ckpt_prune.gguf import require_gguf
from ckpt_prune.job.form import Form
from ckpt_prune.job.run import Announce, Run, say_changed, say_nothing
from ckpt_prune.job.timing import PhaseTimer
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.model.containers.rope_keys import state_rope
from ckpt_prune.options.commands import ConvertOptions
from ckpt_prune.options.data import ProofOptions
from ckpt_prune.runner.open_run import OutputFacts, open_staging
from ckpt_prune.runner.publish import put_in_place
from ckpt_prune.runner.resuming import resumable

_WINDOWS = 2
"""Windows of text that are compared: enough to see whether both models compute the same function."""
_CONVERTED = Form(find_conversion, kind=CONVERSION_KIND)


class _FailedProofError(UserError):
    """The new checkpoint computes something else than its source."""

    def __init__(self, proof: RuntimeComparison) -> None:
        super().__init__(proof.lines()[-1])
        self.proof = proof


def convert_model(options: ConvertOptions) -> Conversion:
    """Write a model as the stock class of transformers that computes the same (`ckpt_prune.convert`)."""
    source, out, say = Path(options.model), options.output, Notices()
    stock, compare = _read_gguf(source, options, say) if is_gguf(source) else (_read_checkpoint(options), None)
    with resumable(out, say):
        return write_stock(
            stock, out, resume=options.resume, overwrite=options.overwrite, compare=compare, announce=say
        )


def _read_checkpoint(options: ConvertOptions) -> StockCheckpoint:
    if options.text or options.samples or options.window:
        raise UserError(f"{options.model} is no GGUF file: nothing is compared on --text, --samples or --window")
    return stock_of_checkpoint(Checkpoint.open(options.model))


def _read_gguf(source: Path, options: ConvertOptions, say: Notices) -> tuple[StockCheckpoint, Compare | None]:
    require_gguf()
    from ckpt_prune.gguf.source import comparison_with, stock_of_gguf

    check_texts(options.text)
    stock = stock_of_gguf(source)
    proving = ProofOptions(text=options.text, samples=options.samples or _WINDOWS, window=options.window)
    return stock, comparison_with(source, stock, proving, say, wanted=options.proof)


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
    names = [SINGLE, CONFIG, CONVERSION_RECORD, *stock.texts]
    opening = OutputFacts(
        _CONVERTED,
        hashlib.sha256(canonical_json([__version__, "convert", stock.fingerprint]).encode()).hexdigest(),
        {"model": stock.fingerprint},
        [] if stock.source is None else [stock.source],
        lambda: top_names(stock.copied) | {name.partition("/")[0]: None for name in names},
        lambda journal: f"{len(journal.entries)} of {len(stock.tensors)} tensors converted",
    )
    run = Run(out, None, PhaseTimer(torch.device("cpu")), announce)
    proof: RuntimeComparison | None = None
    try:
        with open_staging(opening, run, resume=resume, overwrite=overwrite):
            if run.report is None:
                proof = _write(stock, record, run, compare)
    except _FailedProofError as error:
        proof = error.proof
    parameters = sum(prod(tensor.shape) for tensor in stock.tensors.values())
    architecture = stock.config["architectures"][0]
    return Conversion(out, stock.config["model_type"], architecture, parameters, stock.notes, proof)


def _write(
    stock: StockCheckpoint, record: ConversionRecord, run: Run, compare: Compare | None
) -> RuntimeComparison | None:
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
