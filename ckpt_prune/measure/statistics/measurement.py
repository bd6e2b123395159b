"""Measuring statistics: the dense model's blocks run over the calibration windows, moments written block by block."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import combinations
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from ckpt_prune.architectures.model import Model
from ckpt_prune.checkpoint.digests import READER_FILES
from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import Staging, disk_failures, partial_of, refuse_inside, write_atomically
from ckpt_prune.checkpoint.writer import check_free_space
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.measure.moments.inputs import ACTIVE_THRESHOLD, Taylor
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.measure.moments.logits import choose_form, packed_width
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.measure.statistics.files import INDEX, STATISTICS
from ckpt_prune.measure.statistics.folder import (
    BlockMoments,
    Statistics,
    StatisticsIndex,
    add_block,
    add_fisher,
    add_index,
    block_file,
    check_addable,
    files_of,
    name_file,
    taylor_file,
    write_block,
    write_fisher,
    write_taylor,
)
from ckpt_prune.measure.statistics.taylor import measure_taylor
from ckpt_prune.measure.streams.hidden_stream import open_stream, split_folds
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.parallel.group import process_group

_UNIT = "statistics"


def _staging(out: Path, blocks: int, collect: Sequence[str], *, overwrite: bool) -> Staging:
    names = [INDEX, *files_of(blocks, collect)]
    return Staging(out, job=_UNIT, overwrite=overwrite, kind=STATISTICS, wants=dict.fromkeys(names))


def list_collectable(model: Model) -> tuple[Collect, ...]:
    """All that can be collected for a model."""
    family = model.family
    if model.own_code:
        # What it is measured for is a mask: nothing else is done to it again.
        return ("moments", "gram", "linears")
    # Importances of units add up weights' gradients sample by sample, and experts see no whole samples.
    lacking = {
        "logits": not family.logits,
        "centred": not family.logits,
        "rotary": not family.turned,
        "taylor": not family.causal or family.experts is not None,
    }
    return tuple(kind for kind in get_args(Collect) if not lacking.get(kind))


def list_collected_by_default(model: Model) -> tuple[Collect, ...]:
    """What is collected where nobody says: all but what single recipes alone need."""
    return tuple(kind for kind in list_collectable(model) if kind not in ("centred", "rotary", "taylor"))


def count_statistics_bytes(model: Model, *, collect: Sequence[Collect], folds: int, samples: int) -> int:
    """Bytes a statistics folder will take."""
    per_block = 0
    widths = [*model.consumer_widths.values()]
    if "linears" in collect:
        widths += model.linear_widths.values()
    for each in widths:
        width = each if isinstance(each, int) else max(each)
        per_block += folds * (4 * 8 * width + (2 * width * (width + 1) if "gram" in collect else 0))
    if "logits" in collect:
        for heads, head_dim in model.query_heads.values():
            packed = packed_width(head_dim)
            for run in split_folds(samples, folds):
                count = run.stop - run.start
                per_sample = choose_form(count, head_dim) == "per-sample"
                kinds = 1 + ("centred" in collect)
                per_block += 4 * heads * ((1 + kinds) * count * packed if per_sample else kinds * packed**2)
    pairs = model.turned_heads.values() if "rotary" in collect else []
    per_block += sum(8 * folds * heads * packed_width(2 * count) for heads, count in pairs)
    if "fisher" in collect:
        for space in model.family.consumers.values():
            outputs = model.tensors[model.tensor(model.spaced.start, space.consumer)][1][0]
            per_block += 2 * outputs * (outputs + 1)
        per_block += sum(4 * heads for heads, _ in (*model.query_heads.values(), *pairs))
    if "taylor" in collect:
        per_block += sum(2 * 8 * model.units(space) for space in model.family.consumers)
    return per_block * len(model.spaced)


def check_measurable(
    model: Model, samples: Samples, out: Path, *, folds: int, collect: Sequence[Collect], overwrite: bool = False
) -> int:
    """Refuse what `measure` would, and write nothing.

    Args:
        model: the dense model.
        samples: what it would be run on.
        out: the folder that would be written.
        folds: of samples.
        collect: what the folder would hold.
        overwrite: whether an existing statistics folder may be replaced.

    Returns:
        Bytes the folder will take.

    Raises:
        UserError: the folder exists, there are too few samples for the folds, or the disk has no room.
    """
    check_folds(samples, folds)
    needed = count_statistics_bytes(model, collect=collect, folds=folds, samples=len(samples))
    _staging(out, model.blocks, collect, overwrite=overwrite)
    check_free_space(out.absolute().parent, needed)
    return needed


def measure_statistics(
    model: Model,
    samples: Samples,
    out: Path,
    *,
    seed: int,
    folds: int,
    collect: tuple[Collect, ...],
    device: torch.device,
    compute_dtype: torch.dtype,
    overwrite: bool = False,
    announce: Callable[[int], None] | None = None,
    allocate: Allocate = allocate_in_memory,
    skeleton: nn.Module | None = None,
    finish: Callable[[Statistics], object] | None = None,
    active_above: float = ACTIVE_THRESHOLD,
) -> Statistics:
    """Measure the dense model's moments over samples and write them to a folder.

    One block and its moments are in memory at a time.

    Args:
        model: the dense model.
        samples: what to run it on.
        out: the folder to write.
        seed: of the choice of samples, for the record.
        folds: contiguous runs of samples whose moments are kept apart.
        collect: what the folder is to hold; the metric `fisher` is up to `finish`.
        device: where blocks run.
        compute_dtype: in which they run.
        overwrite: replace an existing statistics folder.
        announce: told, once everything is checked, how many bytes the folder will take.
        allocate: makes the tensor that holds hidden states.
        skeleton: the model on the meta device, where it is not the stock one of its config.
        finish: given the moments, measures more into their folder before it gets its name.
        active_above: absolute value above which an input counts as active.

    Raises:
        UserError: the folder exists, or the disk has no room.
    """
    check_folds(samples, folds)
    group = process_group()
    needed = count_statistics_bytes(model, collect=collect, folds=folds, samples=len(samples))
    staging = group.on_first(lambda: _staging(out, model.blocks, collect, overwrite=overwrite))
    with nullcontext() if staging is None else staging:
        group.on_first(lambda: check_free_space(out.absolute().parent, needed))
        if announce is not None:
            announce(needed)
        found = measure_into(
            model,
            samples,
            partial_of(out, STATISTICS),
            seed=seed,
            folds=folds,
            collect=collect,
            device=device,
            compute_dtype=compute_dtype,
            allocate=allocate,
            skeleton=skeleton,
            active_above=active_above,
        )
        if finish is not None:
            finish(found)
        if staging is not None:
            staging.publish()
    return group.once(lambda: Statistics(out))


def check_folds(samples: Samples, folds: int) -> None:
    """Refuse more folds than samples.

    Raises:
        UserError: some fold would have none.
    """
    if folds > len(samples):
        raise UserError(f"{folds} folds of {len(samples)} samples: every fold needs at least one")


def measure_into(
    model: Model,
    samples: Samples,
    folder: Path,
    *,
    seed: int,
    folds: int,
    collect: tuple[Collect, ...],
    device: torch.device,
    compute_dtype: torch.dtype,
    allocate: Allocate = allocate_in_memory,
    skeleton: nn.Module | None = None,
    journal: Journal | None = None,
    active_above: float = ACTIVE_THRESHOLD,
) -> Statistics:
    """Measure as `measure` does, into a folder that is there.

    Args:
        model: the dense model.
        samples: what to run it on.
        folder: to write into.
        seed: of the choice of samples, for the record.
        folds: contiguous runs of samples whose moments are kept apart.
        collect: which moments.
        device: where blocks run.
        compute_dtype: in which they run.
        allocate: makes the tensor that holds hidden states.
        skeleton: as of `measure`.
        journal: of the run, in which every block is entered when it is measured; blocks that are in it are run, but
            not measured again.
        active_above: as of `measure`.

    Raises:
        UserError: what is measured is not finite, or the disk has no room.
    """
    family, checkpoint, blocks, group = model.family, model.checkpoint, model.blocks, process_group()
    stream = open_stream(
        model,
        samples,
        device=device,
        compute_dtype=compute_dtype,
        skeleton=skeleton,
        folds=folds,
        allocate=allocate,
        group=group,
        active_above=active_above,
    )
    wanted: dict[str, bool] = dict.fromkeys(family.consumers, "gram" in collect)
    wanted |= dict.fromkeys(family.routers, False)
    if "logits" in collect:
        wanted |= dict.fromkeys(family.logits, "centred" in collect)
    if "rotary" in collect:
        wanted |= dict.fromkeys(family.turned, False)
    if "linears" in collect:
        wanted |= dict.fromkeys(family.producer_inputs, "gram" in collect)
    known: dict[str, str] = group.once(lambda: {} if journal is None else journal.notes)
    files: dict[str, str] = {}

    def write(block: int, named: BlockMoments) -> None:
        for name, moments in named.items():
            if not all(each.finite for each in moments):
                raise UserError(f"what reaches {name} is not finite: the model overflows in {compute_dtype}")
        file = block_file(block)
        files[file] = write_block(folder, block, named)
        if journal is not None:
            with disk_failures(folder):
                sync(folder / file)
                journal.record(_unit(block), note=files[file])

    def write_units(block: int, units: Mapping[str, Taylor]) -> None:
        files[taylor_file(block)] = write_taylor(folder, block, units)

    for block in track(range(blocks), "calibrating", total=blocks):
        if _unit(block) in known:
            stream.advance(block, model.read_block(block))
            files[block_file(block)] = known[_unit(block)]
            continue
        own = wanted if block in model.spaced else {}
        found = stream.observe(block, model.read_block(block), own, advance=True)
        named = {model.moments_name(block, key): moments for key, moments in found.items()}
        group.on_first(partial(write, block, named))
    if "taylor" in collect:
        for block, units in measure_taylor(
            model, samples, device=device, compute_dtype=compute_dtype, allocate=allocate, group=group
        ):
            group.on_first(partial(write_units, block, units))
    reader = model.reader_fingerprint
    # After that, so that it is one of the files that turned data into input.
    checkpoint.check_unchanged(name for name in READER_FILES if name in checkpoint.stamps)
    index = StatisticsIndex(
        model=checkpoint.fingerprint,
        tokenizer=reader,
        dtype=str(model.dtype).removeprefix("torch."),
        modality=family.modality,
        data=[samples.fingerprint],
        seed=seed,
        samples=len(samples),
        window=samples.tokens,
        tokens=len(samples) * samples.tokens,
        folds=folds,
        collect=[kind for kind in collect if kind != "fisher"],
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        blocks=blocks,
        leading=model.spaced.start,
        consumers=model.consumer_widths,
        queries=model.query_heads,
        turned=model.turned_heads if "rotary" in collect else {},
        routers=model.router_experts,
        linears=model.linear_widths if "linears" in collect else {},
        active_above=active_above,
        files=files,
    )

    def enter() -> Statistics:
        write_atomically(folder / INDEX, index.model_dump_json(indent=2) + "\n")
        return Statistics(folder)

    return group.once(enter)


def _unit(block: int) -> str:
    return f"{_UNIT} {block}"


def add_statistics(folders: Sequence[Statistics], out: Path, *, overwrite: bool = False) -> Statistics:
    """Write the sum of several statistics folders.

    Raises:
        UserError: there are not two, they do not belong together, or the folder exists.
    """
    if len(folders) < 2:
        raise UserError("there is nothing to add: name two statistics folders, or more")
    for a, b in combinations(folders, 2):
        check_addable(a, b)
    refuse_inside(out, [each.folder for each in folders])
    first = folders[0].index
    with _staging(out, first.blocks, first.collect, overwrite=overwrite) as staging:
        files = {}
        for block in track(range(first.blocks), "adding", total=first.blocks):
            files[block_file(block)] = write_block(staging.path, block, add_block(folders, block))
            if first.fisher:
                files[name_file("fisher", block)] = write_fisher(staging.path, block, add_fisher(folders, block))
        index = reduce(add_index, (each.index for each in folders)).model_copy(update={"files": files})
        write_atomically(staging.path / INDEX, index.model_dump_json(indent=2) + "\n")
        staging.publish()
    return Statistics(out)
