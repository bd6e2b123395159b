"""Measure statistics: the dense model's blocks run over the samples, and moments are written block by block."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ckpt_prune.checkpoint.block_thread import read_ahead
from ckpt_prune.checkpoint.digests import READER_FILES
from ckpt_prune.checkpoint.disk_space import check_free_space
from ckpt_prune.checkpoint.files import sync
from ckpt_prune.checkpoint.journal import Journal
from ckpt_prune.checkpoint.staging import Staging, disk_failures, partial_of, refuse_inside
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.measure.moments.inputs import Taylor
from ckpt_prune.measure.moments.logits import choose_form, packed_width
from ckpt_prune.measure.samples.samples import Samples, reads_whole
from ckpt_prune.measure.samples.shards import share_samples
from ckpt_prune.measure.statistics.files import INDEX, STATISTICS, Collect
from ckpt_prune.measure.statistics.fisher import Fisher
from ckpt_prune.measure.statistics.folder import (
    BlockMoments,
    Statistics,
    list_files,
    name_file,
    write_block,
    write_fisher,
    write_index,
    write_taylor,
)
from ckpt_prune.measure.statistics.index import StatisticsIndex, add_index
from ckpt_prune.measure.statistics.taylor import measure_taylor
from ckpt_prune.measure.streams.hidden_stream import HiddenStream, open_stream, split_folds
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.parallel.group import process_group


def _open_staging(out: Path, blocks: int, collect: Sequence[str], *, overwrite: bool) -> Staging:
    names = [INDEX, *list_files(blocks, collect)]
    return Staging(out, job="statistics", overwrite=overwrite, kind=STATISTICS, wants=dict.fromkeys(names))


def list_collectable(model: Model) -> tuple[Collect, ...]:
    family = model.family
    if model.has_remote_code:
        # It can only be masked: nothing else is done to it again.
        return ("moments", "gram", "linears")
    # Importances of units add up weights' gradients sample by sample, and experts see no whole samples.
    lacking = {
        "logits": not family.logits,
        "centred": not family.logits,
        "rotary": not family.rotary_spaces,
        "taylor": not family.causal or family.experts is not None,
    }
    return tuple(kind for kind in get_args(Collect) if not lacking.get(kind))


def list_collected_by_default(model: Model) -> tuple[Collect, ...]:
    """List all that can be collected but what single recipes alone need."""
    return tuple(kind for kind in list_collectable(model) if kind not in ("centred", "rotary", "taylor"))


def count_statistics_bytes(model: Model, *, collect: Sequence[Collect], folds: int, samples: int) -> int:
    """Count the bytes that the tensors of a statistics folder will take."""
    family, needed = model.family, 0

    def of_inputs(width: int) -> int:
        return folds * (4 * 8 * width + (2 * width * (width + 1) if "gram" in collect else 0))

    ends = {**family.consumers, **family.pooling}
    widths = model.consumer_widths
    for space, definition in ends.items():
        blocks, width = model.blocks_with(space), widths[model.consumer_weight(space)]
        needed += sum(of_inputs(width if isinstance(width, int) else width[block]) for block in blocks)
        if "fisher" in collect and blocks and space not in family.pooling:
            outputs = model.tensors[model.tensor(blocks[0], definition.consumer)][1][0]
            needed += len(blocks) * 2 * outputs * (outputs + 1)
        if "taylor" in collect:
            needed += sum(2 * 8 * units for units in model.unit_counts(space))
    if "linears" in collect:
        readers = [first for block in range(model.blocks) for first in model.inputs(block)]
        needed += sum(map(readers.count, family.producer_inputs)) * of_inputs(model.dimension("hidden"))
    for space, (heads, head_dim) in zip(family.logits, model.query_heads.values(), strict=True):
        of_block, packed = 4 * heads if "fisher" in collect else 0, packed_width(head_dim)
        for run in split_folds(samples, folds) if "logits" in collect else []:
            count = run.stop - run.start
            per_sample = choose_form(count, head_dim) == "per-sample"
            kinds = 1 + ("centred" in collect)
            of_block += 4 * heads * ((1 + kinds) * count * packed if per_sample else kinds * packed**2)
        needed += of_block * len(model.blocks_with(space))
    for space, (heads, count) in zip(family.rotary_spaces, model.turned_heads.values(), strict=True):
        of_block = 8 * folds * heads * packed_width(2 * count) + (4 * heads if "fisher" in collect else 0)
        needed += of_block * len(model.blocks_with(space)) if "rotary" in collect else 0
    return needed


def check_measurable(
    model: Model, samples: Samples, out: Path, *, folds: int, collect: Sequence[Collect], overwrite: bool = False
) -> int:
    """Refuse what `measure_statistics` would refuse, write nothing, and return the bytes that the folder will take."""
    check_folds(samples, folds)
    needed = count_statistics_bytes(model, collect=collect, folds=folds, samples=len(samples))
    _open_staging(out, model.blocks, collect, overwrite=overwrite)
    check_free_space(out.absolute().parent, needed)
    return needed


def check_folds(samples: Samples, folds: int) -> None:
    if folds > len(samples):
        raise UserError(f"{folds} folds of {len(samples)} samples: every fold needs at least one")


def measure_statistics(
    model: Model,
    samples: Samples,
    out: Path,
    *,
    folds: int,
    collect: tuple[Collect, ...],
    overwrite: bool = False,
    announce: Callable[[int], None] | None = None,
    finish: Callable[[Statistics], object] | None = None,
    **options: Any,
) -> Statistics:
    """Measure the dense model's moments over samples and write them to a new folder.

    `collect` says what the folder will hold; the metric `fisher` is measured by `finish`, which is given the moments
    before their folder gets its name. `announce` takes the bytes that the folder will take, once everything is
    checked. `options` are other arguments of `measure_into`.
    """
    check_folds(samples, folds)
    group = process_group()
    needed = count_statistics_bytes(model, collect=collect, folds=folds, samples=len(samples))
    staging = group.on_first(lambda: _open_staging(out, model.blocks, collect, overwrite=overwrite))
    with nullcontext() if staging is None else staging:
        group.on_first(lambda: check_free_space(out.absolute().parent, needed))
        if announce is not None:
            announce(needed)
        folder = partial_of(out, STATISTICS)
        statistics = measure_into(model, samples, folder, folds=folds, collect=collect, **options)
        if finish is not None:
            finish(statistics)
        if staging is not None:
            staging.publish()
    return group.once(lambda: Statistics(out))


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
    see_stream: Callable[[int, HiddenStream], object] | None = None,
    grams: Mapping[int, Collection[str]] | None = None,
) -> Statistics:
    """Measure the dense model's moments over samples into a folder that exists. One block is in memory at a time.

    `seed` of the choice of samples is for the record, `folds` are contiguous runs of samples whose moments are kept
    apart. `skeleton` is the model on the meta device, if it is not the stock one of its config. Every block is entered
    in the journal when it is measured; blocks that are in it are run, but not measured again. `see_stream` is given
    the stream behind every block, with the block's number. Spaces and linear modules of the blocks in `grams` get
    Grams, though `collect` does not say so.
    """
    checkpoint, blocks, group = model.checkpoint, model.blocks, process_group()
    run: dict[str, Any] = {"device": device, "compute_dtype": compute_dtype, "allocate": allocate, "group": group}
    stream = open_stream(model, samples, skeleton=skeleton, folds=folds, **run)
    gram, files, lacking = _what_to_observe(model.family, collect), dict[str, str](), list[str]()
    done: dict[str, str] = group.once(lambda: {} if journal is None else journal.notes)

    def write(block: int, named: BlockMoments) -> None:
        for name, moments in named.items():
            if not all(fold.is_finite for fold in moments):
                raise UserError(f"what reaches {name} is not finite: the model overflows in {compute_dtype}")
        file = name_file("block", block)
        files[file] = write_block(folder, block, named)
        if journal is not None:
            with disk_failures(folder):
                sync(folder / file)
                journal.record(_entry(block), note=files[file], files=[folder / file])

    def write_units(block: int, importances: Mapping[str, Taylor]) -> None:
        files[name_file("taylor", block)] = write_taylor(folder, block, importances)

    for block, tensors in track(read_ahead(model.read_block, range(blocks)), "calibrating", total=blocks):
        keys = model.spaces(block).keys() | model.inputs(block).keys()
        there = {model.moments_name(block, key) for key in keys}
        names = (model.moments_name(block, key) for key in gram if key not in {*keys, *model.family.pooling})
        lacking += [name for name in names if name not in there]
        if _entry(block) in done:
            stream.advance(block, tensors)
            files[name_file("block", block)] = done[_entry(block)]
        else:
            own = (grams or {}).get(block, ())
            block_gram = {key: whole or key in own for key, whole in gram.items() if key in keys}
            observed = stream.observe(block, tensors, block_gram, advance=True)
            named = {model.moments_name(block, key): moments for key, moments in observed.items()}
            group.on_first(partial(write, block, named))
        if see_stream is not None:
            see_stream(block, stream)
    if "taylor" in collect:
        for block, importances in measure_taylor(model, samples, **run):
            group.on_first(partial(write_units, block, importances))
    reader = model.reader_fingerprint
    # After that, so that it is one of the files that turned data into input.
    checkpoint.check_unchanged(name for name in READER_FILES if name in checkpoint.stamps)
    checkpoint.check_unchanged()
    index = StatisticsIndex(
        model=checkpoint.fingerprint,
        tokenizer=reader,
        dtype=str(model.dtype).removeprefix("torch."),
        modality="image-text" if reads_whole(samples) else model.family.modality,
        data=[samples.fingerprint],
        texts=getattr(samples, "origin", ""),
        seed=seed,
        samples=len(samples),
        window=samples.tokens,
        tokens=len(samples) * samples.tokens,
        folds=folds,
        collect=[kind for kind in collect if kind != "fisher"],
        compute_dtype=str(compute_dtype).removeprefix("torch."),
        blocks=blocks,
        lacking=lacking,
        consumers=model.consumer_widths,
        queries=model.query_heads,
        turned=model.turned_heads if "rotary" in collect else {},
        routers=model.router_experts,
        linears=model.linear_widths if "linears" in collect else {},
        files=files,
    )
    return group.once(lambda: write_index(folder, index))


def _what_to_observe(family: Family, collect: Sequence[Collect]) -> dict[str, bool]:
    """Return the spaces and linear modules of a block whose moments are measured, and whether with the Gram."""
    gram: dict[str, bool] = dict.fromkeys([*family.consumers, *family.pooling], "gram" in collect)
    gram |= dict.fromkeys(family.expert_spaces, False)
    if "logits" in collect:
        gram |= dict.fromkeys(family.logits, "centred" in collect)
    if "rotary" in collect:
        gram |= dict.fromkeys(family.rotary_spaces, False)
    if "linears" in collect:
        gram |= dict.fromkeys(family.producer_inputs, "gram" in collect)
    return gram


def _entry(block: int) -> str:
    return f"statistics {block}"


_SAME = {
    "model": "models",
    "tokenizer": "tokenizers",
    "dtype": "checkpoint dtypes",
    "folds": "numbers of folds",
    "collect": "kinds of moments",
    "compute_dtype": "compute dtypes",
    "modality": "modalities",
    "window": "windows",
    "consumers": "consumers",
    "queries": "queries",
    "turned": "rotary pairs",
    "routers": "routers",
    "linears": "linears",
}
"""Fields of the index that must be equal in folders that are added, and their names in messages."""


def check_addable(a: Statistics, b: Statistics) -> None:
    """Refuse to add statistics of different kinds, of the same samples, or that do not add."""
    for field, name in _SAME.items():
        if getattr(a.index, field) != getattr(b.index, field):
            raise UserError(f"{a.folder} and {b.folder} are of different {name}: only equal ones can be added")
    if share_samples(a.index.data, b.index.data):
        raise UserError(f"{a.folder} and {b.folder} hold the same calibration samples: they would count twice")
    if "taylor" in a.index.collect:
        raise UserError(
            f"{a.folder} and {b.folder} hold Taylor importances, absolute values of sums over samples, which do not "
            "add: calibrate once on all samples, or leave taylor out of --collect"
        )


def add_statistics(folders: Sequence[Statistics], out: Path, *, overwrite: bool = False) -> Statistics:
    """Write the sum of two or more statistics folders, which belong together, to a new folder."""
    if len(folders) < 2:
        raise UserError("there is nothing to add: name two statistics folders, or more")
    for a, b in combinations(folders, 2):
        check_addable(a, b)
    refuse_inside(out, [each.folder for each in folders])
    first = folders[0].index
    with _open_staging(out, first.blocks, first.collect, overwrite=overwrite) as staging:
        files = {}
        for block in track(range(first.blocks), "adding", total=first.blocks):
            files[name_file("block", block)] = write_block(staging.path, block, _add_moments(folders, block))
            if first.fisher:
                files[name_file("fisher", block)] = write_fisher(staging.path, block, _add_fisher(folders, block))
        index = reduce(add_index, (each.index for each in folders)).model_copy(update={"files": files})
        write_index(staging.path, index)
        staging.publish()
    return Statistics(out)


def _add_moments(folders: Sequence[Statistics], block: int) -> BlockMoments:
    def add_two(left: Mapping[str, Any], right: Mapping[str, Any]) -> BlockMoments:
        return {name: tuple(map(operator.add, left[name], right[name])) for name in left}

    return reduce(add_two, (each.read_moments(block) for each in folders))


def _add_fisher(folders: Sequence[Statistics], block: int) -> dict[str, Fisher]:
    metrics = [each.read_fisher(block) for each in folders]
    return {name: reduce(operator.add, (each[name] for each in metrics)) for name in metrics[0]}
