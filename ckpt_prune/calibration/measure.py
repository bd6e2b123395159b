"""Measuring statistics: the dense model's blocks run over the calibration windows, moments written block by block."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from ckpt_prune.architectures.family import ColumnSpace, Family, LogitSpace
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.kinds import Collect
from ckpt_prune.calibration.logits import LogitMoments, packed_width, smaller_form
from ckpt_prune.calibration.moments import Moments
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import (
    INDEX,
    Statistics,
    StatisticsIndex,
    add_block,
    add_index,
    block_file,
    check_addable,
    write_block,
)
from ckpt_prune.calibration.streams import HiddenStream, fold_slices
from ckpt_prune.checkpoint.digests import processor_fingerprint, tokenizer_fingerprint
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.writing import check_room
from ckpt_prune.errors import UserError
from ckpt_prune.progress import track

_INPUT = "/input"


def checkpoint_dtype(checkpoint: Checkpoint) -> str:
    """The dtype most of a checkpoint's bytes are in, as torch names it: bfloat16, float16, float32."""
    sizes: dict[torch.dtype, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def block_names(checkpoint: Checkpoint, family: Family, block: int) -> list[str]:
    """On-disk names of a block's tensors."""
    prefix = family.block.format(block=block)
    return [name for name in checkpoint.tensors if name.startswith(prefix)]


@contextmanager
def _staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that takes its final name only when everything in it is written."""
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists: choose another name or say --overwrite")
    if out.exists() and not (out / INDEX).is_file():
        raise UserError(f"{out} exists and is not a statistics folder: it is not overwritten")
    target = Path(os.path.abspath(out))  # noqa: PTH100 - resolve() would follow a link that is not ours to replace
    if not target.parent.is_dir():
        raise UserError(f"{target.parent} does not exist")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        partial = Path(scratch) / "statistics"
        partial.mkdir()
        yield partial
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)


def consumer_widths(family: Family, config: PreTrainedConfig) -> dict[str, int]:
    """Consumer's on-disk weight, with `{block}` for the block → its width, the same in every block of a dense model."""
    return {
        f"{family.block}{description.consumer}.weight": family.units(config, space) * family.unit_columns(config, space)
        for space, description in family.columns.items()
    }


def linear_widths(family: Family, config: PreTrainedConfig) -> dict[str, int]:
    """The same of the linears that are no consumer, by `moments_name`: the first of those that read one input."""
    hidden = family.dimension(config, "hidden")
    return {f"{family.block}{first}.weight{_INPUT}": hidden for first in family.producer_inputs}


def query_heads(family: Family, config: PreTrainedConfig) -> dict[str, tuple[int, int]]:
    """Query's on-disk weight, with `{block}` for the block → heads and their width.

    Of families whose q and k can be pruned.
    """
    if family.logits is None:
        return {}
    dimensions = family.dimension(config, "query_heads"), family.dimension(config, "head_dim")
    return {f"{family.block}{family.logits.query}.weight": dimensions}


def reader_fingerprint(checkpoint: Checkpoint, family: Family) -> str | None:
    """Fingerprint of what turns data into the model's input: the tokenizer, or the image processor."""
    read = processor_fingerprint if family.modality == "image" else tokenizer_fingerprint
    return read(checkpoint.path)


def everything(family: Family) -> tuple[Collect, ...]:
    """All that can be collected for a family."""
    kinds: tuple[Collect, ...] = ("moments", "gram", "logits", "linears")
    return tuple(kind for kind in kinds if kind != "logits" or family.logits is not None)


def statistics_bytes(
    family: Family, checkpoint: Checkpoint, *, collect: Sequence[Collect], folds: int, samples: int
) -> int:
    """Bytes a statistics folder will take."""
    config = parse_config(checkpoint.config)
    per_block = 0
    widths = [*consumer_widths(family, config).values()]
    if "linears" in collect:
        widths += linear_widths(family, config).values()
    for width in widths:
        per_block += folds * (4 * 8 * width + (2 * width * (width + 1) if "gram" in collect else 0))
    if "logits" in collect:
        for heads, head_dim in query_heads(family, config).values():
            packed = packed_width(head_dim)
            for run in fold_slices(samples, folds):
                count = run.stop - run.start
                per_sample = smaller_form(count, head_dim) == "per-sample"
                per_block += 4 * heads * (2 * count * packed if per_sample else packed**2)
    return per_block * family.dimension(config, "layers")


def measure(
    checkpoint: Checkpoint,
    family: Family,
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
    allocate: Allocate = in_memory,
) -> Statistics:
    """Measure the dense model's moments over samples and write them to a folder.

    One block and its moments are in memory at a time.

    Args:
        checkpoint: the dense model.
        family: its description.
        samples: what to run it on.
        out: the folder to write.
        seed: of the choice of samples, for the record.
        folds: contiguous runs of samples whose moments are kept apart.
        collect: which moments.
        device: where blocks run.
        compute_dtype: in which they run.
        overwrite: replace an existing statistics folder.
        announce: told, once everything is checked, how many bytes the folder will take.
        allocate: makes the tensor that holds hidden states.

    Raises:
        UserError: the folder exists, or the disk has no room.
    """
    if folds > len(samples):
        raise UserError(f"{folds} folds of {len(samples)} samples: every fold needs at least one")
    needed = statistics_bytes(family, checkpoint, collect=collect, folds=folds, samples=len(samples))
    with _staged(out, overwrite) as partial:
        check_room(out.absolute().parent, needed)
        if announce is not None:
            announce(needed)
        config = parse_config(checkpoint.config)
        factory = BlockFactory(family, config, device=device, dtype=compute_dtype)
        stream = HiddenStream(factory, checkpoint.tensors, checkpoint.read, samples, folds=folds, allocate=allocate)
        blocks = family.dimension(config, "layers")
        wanted: dict[str, bool] = dict.fromkeys(family.columns, "gram" in collect)
        if "logits" in collect:
            wanted["qk"] = True
        if "linears" in collect:
            wanted |= dict.fromkeys(family.producer_inputs, "gram" in collect)
        files: dict[str, str] = {}
        for block in track(range(blocks), "calibrating", total=blocks):
            tensors = checkpoint.read(block_names(checkpoint, family, block))
            found = stream.observe(block, tensors, wanted, advance=True)
            named = {moments_name(family, block, key): moments for key, moments in found.items()}
            for name, moments in named.items():
                if not all(_finite(each) for each in moments):
                    raise UserError(f"what reaches {name} is not finite: the model overflows in {compute_dtype}")
            files[block_file(block)] = write_block(partial, block, named)
        index = StatisticsIndex(
            model=checkpoint.fingerprint,
            tokenizer=reader_fingerprint(checkpoint, family),
            dtype=checkpoint_dtype(checkpoint),
            modality=family.modality,
            data=[samples.fingerprint],
            seed=seed,
            samples=len(samples),
            window=samples.tokens,
            tokens=len(samples) * samples.tokens,
            folds=folds,
            collect=list(collect),
            compute_dtype=str(compute_dtype).removeprefix("torch."),
            blocks=blocks,
            consumers=consumer_widths(family, config),
            queries=query_heads(family, config),
            linears=linear_widths(family, config) if "linears" in collect else {},
            files=files,
        )
        (partial / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return Statistics(out)


def moments_name(family: Family, block: int, key: str) -> str:
    """On-disk weight that statistics file moments under.

    Of a space: its consumer, or the query projection; of a linear module: the consumer, where it is one, else itself
    with a suffix, since the moments of queries stand under the bare name.
    """
    for space, description in family.spaces.items():
        own = description.query if isinstance(description, LogitSpace) else description.consumer
        if key == space or (key == own and isinstance(description, ColumnSpace)):
            return family.tensor(block, own)
    return family.tensor(block, key) + _INPUT


def _finite(moments: Moments | LogitMoments) -> bool:
    if isinstance(moments, Moments):
        return bool(torch.isfinite(moments.square).all())
    return all(bool(torch.isfinite(t).all()) for t in (moments.queries, moments.keys, moments.fourth) if t is not None)


def add(a: Statistics, b: Statistics, out: Path, *, overwrite: bool = False) -> Statistics:
    """Write the sum of two statistics folders.

    Raises:
        UserError: they do not belong together, or the folder exists.
    """
    check_addable(a, b)
    with _staged(out, overwrite) as partial:
        files = {}
        for block in track(range(a.index.blocks), "adding", total=a.index.blocks):
            files[block_file(block)] = write_block(partial, block, add_block(a, b, block))
        index = add_index(a.index, b.index, files)
        (partial / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return Statistics(out)
