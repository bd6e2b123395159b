"""Measuring statistics: the dense model's blocks run over the calibration windows, moments written block by block."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ckpt_prune.architectures.family import Family, SpaceName
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.calibration.blocks import BlockFactory
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
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.calibration.text import text_fingerprint
from ckpt_prune.checkpoint.digests import tokenizer_fingerprint
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.writing import check_room
from ckpt_prune.errors import UserError
from ckpt_prune.progress import track

Collect = Literal["moments", "gram"]


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
        for space, description in family.spaces.items()
    }


def statistics_bytes(family: Family, checkpoint: Checkpoint, *, gram: bool, folds: int) -> int:
    """Bytes a statistics folder will take."""
    config = parse_config(checkpoint.config)
    widths = consumer_widths(family, config).values()
    per_block = sum(4 * 8 * width + (2 * width * (width + 1) if gram else 0) for width in widths)
    return folds * per_block * family.dimension(config, "layers")


def measure(
    checkpoint: Checkpoint,
    family: Family,
    windows: Tensor,
    out: Path,
    *,
    seed: int,
    folds: int,
    collect: tuple[Collect, ...],
    device: torch.device,
    compute_dtype: torch.dtype,
    overwrite: bool = False,
) -> Statistics:
    """Measure the dense model's moments over windows (N, T) and write them to a folder.

    One block and its moments are in memory at a time.

    Raises:
        UserError: the folder exists, or the disk has no room.
    """
    gram = "gram" in collect
    if folds > len(windows):
        raise UserError(f"{folds} folds of {len(windows)} windows: every fold needs at least one")
    needed = statistics_bytes(family, checkpoint, gram=gram, folds=folds)
    with _staged(out, overwrite) as partial:
        check_room(out.absolute().parent, needed)
        config = parse_config(checkpoint.config)
        factory = BlockFactory(family, config, device=device, dtype=compute_dtype)
        stream = HiddenStream(factory, checkpoint.read, windows, folds=folds)
        blocks = family.dimension(config, "layers")
        wanted: dict[SpaceName, bool] = dict.fromkeys(family.spaces, gram)
        files: dict[str, str] = {}
        for block in track(range(blocks), "calibrating", total=blocks):
            tensors = checkpoint.read(block_names(checkpoint, family, block))
            found = stream.observe(block, tensors, wanted, advance=True)
            named = {family.tensor(block, family.spaces[space].consumer): m for space, m in found.items()}
            for name, moments in named.items():
                if not torch.isfinite(moments[0].square).all():
                    raise UserError(f"the input of {name} is not finite: the model overflows in {compute_dtype}")
            files[block_file(block)] = write_block(partial, block, named)
        index = StatisticsIndex(
            model=checkpoint.fingerprint,
            tokenizer=tokenizer_fingerprint(checkpoint.path),
            dtype=checkpoint_dtype(checkpoint),
            data=[text_fingerprint(windows)],
            seed=seed,
            samples=windows.shape[0],
            window=windows.shape[1],
            tokens=windows.numel(),
            folds=folds,
            collect=list(collect),
            compute_dtype=str(compute_dtype).removeprefix("torch."),
            blocks=blocks,
            consumers=consumer_widths(family, config),
            files=files,
        )
        (partial / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return Statistics(out)


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
