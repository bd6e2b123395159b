"""Writing a checkpoint as the stock class that computes the same."""

import hashlib
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint
from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.checkpoint.folder_kinds import FolderKind
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import CONVERSION_RECORD
from ckpt_prune.common.progress import track
from ckpt_prune.conversion.mae import plain_of_mae
from ckpt_prune.conversion.plain import Plain
from ckpt_prune.conversion.timm import plain_of_timm
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.containers.side_files import carried_files, top_names
from ckpt_prune.model.skeleton import stock_names
from ckpt_prune.model.supported import is_timm

CONVERSION = FolderKind(CONVERSION_RECORD, "what `convert` wrote", unfinished="dropped")


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        output: the folder.
        model_type: of its config.
        architecture: the stock class it loads with.
        parameters: of it.
        notes: what else there is to say, a line each.
    """

    output: Path
    model_type: str
    architecture: str
    parameters: int
    notes: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self) | {"output": str(self.output), "notes": list(self.notes)}


def convert_checkpoint(checkpoint: Checkpoint, out: Path, *, overwrite: bool = False) -> Conversion:
    """Write a checkpoint as the stock class that computes the same, one tensor at a time, in its own dtype.

    Raises:
        UserError: no stock class is known to compute the same, or OUT may not be written.
    """
    plain = _plain(checkpoint)
    architecture = plain.config["architectures"][0]
    _check(plain, architecture, checkpoint)
    dtypes = {name: checkpoint.tensors[made.sources[0]].dtype for name, made in plain.tensors.items()}
    layout = {SINGLE: {name: (dtypes[name], made.shape) for name, made in plain.tensors.items()}}
    replaced = set() if plain.processor is None else {PROCESSOR}
    kept = {name: path for name, path in carried_files(checkpoint).items() if name not in replaced}
    names = {SINGLE, CONFIG, CONVERSION_RECORD} | ({PROCESSOR} if plain.processor else set())
    wants = top_names(kept) | dict.fromkeys(names)
    with Staging(out, job="", overwrite=overwrite, kind=CONVERSION, wants=wants) as staging:
        writer = CheckpointWriter(staging, layout, sharded=False)
        for name, made in track(list(plain.tensors.items()), "converting", unit="tensor"):
            found = checkpoint.read(made.sources)
            writer.write(name, made.make(*(found[source] for source in made.sources)).contiguous())
        writer.commit("tensors")
        writer.write_json(CONFIG, plain.config)
        if plain.processor is not None:
            writer.write_json(PROCESSOR, plain.processor)
        for name, path in kept.items():
            writer.copy(path, name)
        carried_files(checkpoint)  # raises where one changed while it was copied
        with (writer.folder / SINGLE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = {"source": checkpoint.name, "files": {SINGLE: digest}, "notes": list(plain.notes)}
        writer.write_json(CONVERSION_RECORD, record | {"side_files": sorted(writer.side_names | {CONVERSION_RECORD})})
        writer.finish()
    parameters = sum(prod(made.shape) for made in plain.tensors.values())
    return Conversion(out, plain.config["model_type"], architecture, parameters, plain.notes)


def _plain(checkpoint: Checkpoint) -> Plain:
    if is_timm(checkpoint.config):
        return plain_of_timm(checkpoint)
    model_type = checkpoint.config.get("model_type")
    if model_type == "vit_mae":
        return plain_of_mae(checkpoint)
    raise UserError(f"{checkpoint.path} is a {model_type}: only folders of timm and vit_mae are converted")


def _check(plain: Plain, architecture: str, checkpoint: Checkpoint) -> None:
    """Refuse what the stock class has no place for, or lacks, before anything is written."""
    bad = [name for name in plain.tensors if checkpoint.tensors[plain.tensors[name].sources[0]].dtype.itemsize == 1]
    if bad:
        raise UserError(f"{checkpoint.path} holds {bad[0]} in one byte a number; give the checkpoint it was made from")
    known = stock_names(plain.config, architecture)
    shapes = {name: made.shape for name, made in plain.tensors.items()}
    check_shapes(shapes, known, f"{checkpoint.path} as {architecture}")
