"""Slice the residual stream: its bases are measured block by block, and kept on disk for a resumed run."""

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.progress import track
from ckpt_prune.job.prepared import Prepared, RankedSites
from ckpt_prune.job.run import Run
from ckpt_prune.stages.hidden.bases import principal_directions
from ckpt_prune.stages.hidden.count_search import DimensionCountSearch
from ckpt_prune.stages.hidden.keys import Hidden
from ckpt_prune.stages.hidden.preview import (
    hidden_record,
    narrow_jointly,
    slice_stream,
    slice_unmeasured,
    view_of,
    wanted_width,
)
from ckpt_prune.stages.hidden.records import HiddenRecord
from ckpt_prune.stages.hidden.shared_basis import open_sliced_stream, shared_basis, shared_gram
from ckpt_prune.stages.hidden.sliced_checkpoint import SlicedCheckpoint
from ckpt_prune.stages.rotation.absorbing import residual_of
from ckpt_prune.stages.shared.count_search import measure_unpruned

HIDDEN = "hidden"
"""Entry of the journal: how many dimensions stay, if spaces lose units, too."""
BASIS = "basis"
"""Before the number of a block, of entries of the journal; alone, the one basis of all blocks."""
_SHARED = "shared"


@dataclass(frozen=True)
class WrittenBases:
    """Bases as they stand on disk, float32: a resumed run sees the same bits."""

    folder: Path
    shared: bool
    sublayers: int

    def __call__(self, block: int) -> tuple[Tensor, ...]:
        headers = read_header(self.folder / self.name(block)).tensors
        stored = read_tensors(self.folder, list(headers.values()))
        bases = [stored[str(place)].double() for place in range(len(stored))]
        return tuple(bases * self.sublayers if self.shared else bases)

    def name(self, block: int) -> str:
        return f"{_SHARED if self.shared else block}.safetensors"

    def write(self, block: int, bases: list[Tensor]) -> Path:
        path = self.folder / self.name(block)
        save_file({str(place): basis.float().cpu().contiguous() for place, basis in enumerate(bases)}, path)
        sync(path)
        return path


def narrow_stream(prepared: Prepared, run: Run) -> Prepared:
    """Return the state in which the recipe's dimensions of the stream are gone: later stages see other bases."""
    if prepared.recipe.spaces:
        return _narrow_jointly(prepared, run)
    journal, folder, timer = run.own_journal, run.scratch, run.timer
    view = slice_unmeasured(prepared).basis
    if not isinstance(view, SlicedCheckpoint):
        return slice_unmeasured(prepared)
    bases = WrittenBases(folder / "bases", view.shared, len(view.sublayers))
    with timer.time("hidden"):
        with disk_failures(folder):
            bases.folder.mkdir(parents=True, exist_ok=True)
        energy = (_measure_shared_basis if bases.shared else _measure_bases)(prepared, view, bases, journal)
    return slice_stream(prepared, bases, energy)


def _narrow_jointly(prepared: Prepared, run: Run) -> Prepared:
    """Return the state with a narrower stream, whose spaces then lose units."""
    journal, folder, timer = run.own_journal, run.scratch, run.timer
    with disk_failures(folder):
        folder.mkdir(exist_ok=True)
    search = None
    if prepared.stage(Hidden).auto:
        statistics = measure_unpruned(prepared, run)
        with timer.time("ranking"):
            search = DimensionCountSearch(prepared, statistics, run)

    def choose() -> HiddenRecord:
        with timer.time("hidden"):
            return hidden_record(prepared, wanted_width(prepared)) if search is None else search.record()

    record, view = run.remember(HIDDEN, HiddenRecord, choose), None
    if record.kept < record.dimensions:
        bare = view_of(prepared, record.kept)
        bases = WrittenBases(folder / "bases", True, len(bare.sublayers))
        with disk_failures(folder):
            bases.folder.mkdir(exist_ok=True)
        with timer.time("hidden"):
            energy = _measure_shared_basis(prepared, bare, bases, journal)
        record, view = record.model_copy(update={"energy": energy}), view_of(prepared, record.kept, bases)
    narrowed = narrow_jointly(prepared, record, view)
    if search is not None:
        # The widths are those that were tried. Where all dimensions stay, so do what they were measured on.
        narrowed = replace(
            narrowed.knowing(RankedSites(search.ranking)), statistics=statistics if view is None else None
        )
    return narrowed


def _measure_bases(prepared: Prepared, view: SlicedCheckpoint, bases: WrittenBases, journal: Journal) -> list[float]:
    """Measure the bases of every block. If the recipe is sequential, the blocks before it are sliced already."""
    model = prepared.model
    centred, sequential = residual_of(model.family).norm == "layer", prepared.recipe.target == "sequential"
    sliced = open_sliced_stream(prepared)
    shares: list[float] = []
    for block in track(range(model.blocks), "measuring the stream", total=model.blocks):
        tensors, unit = model.read_block(block), f"{BASIS} {block}"
        if unit in journal.entries and sequential:
            sliced.skip(block, tensors, bases(block))
        elif unit in journal.entries:
            sliced.stream.advance(block, tensors)
        else:
            found: list[Tensor] = []
            kept: list[float] = []

            def choose(_: int, gram: Tensor, found: list[Tensor] = found, kept: list[float] = kept) -> Tensor | None:
                basis, share = principal_directions(gram.to(prepared.device), view.kept, centred=centred)
                basis = basis.float().double()  # as it is read again
                found.append(basis)
                kept.append(share)
                return basis if sequential else None

            sliced.block(block, tensors, choose)
            with disk_failures(bases.folder):
                journal.record(unit, note=kept, files=[bases.write(block, found)])
        shares += journal.notes[unit]
    return shares


def _measure_shared_basis(
    prepared: Prepared, view: SlicedCheckpoint, bases: WrittenBases, journal: Journal
) -> list[float]:
    """Measure one basis for everything that reads the stream of the dense model."""
    if BASIS in journal.entries:
        shares: list[float] = journal.notes[BASIS]
        return shares
    basis, share = shared_basis(view, shared_gram(prepared))
    with disk_failures(bases.folder):
        journal.record(BASIS, note=[share], files=[bases.write(0, [basis])])
    return [share]
