"""Writes a checkpoint as the stock class that computes the same."""

import hashlib
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from transformers import ViTConfig

from ckpt_prune.checkpoint.checkpoint import CONFIG, SINGLE, Checkpoint
from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.checkpoint.folder_kinds import FolderKind
from ckpt_prune.checkpoint.staging import Staging
from ckpt_prune.checkpoint.writer import CheckpointWriter
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import CONVERSION_RECORD
from ckpt_prune.common.progress import track
from ckpt_prune.conversion.plain import PlainCheckpoint, copy_tensor
from ckpt_prune.conversion.timm import vit_of_timm
from ckpt_prune.model.containers.checking import check_shapes
from ckpt_prune.model.containers.side_files import carried_files, top_names
from ckpt_prune.model.skeleton import stock_names
from ckpt_prune.model.supported import is_timm

CONVERSION = FolderKind(CONVERSION_RECORD, "what `convert` wrote", unfinished="dropped")


@dataclass(frozen=True)
class Conversion:
    """What was written: the folder, the stock class that it loads with, and lines for the user."""

    output: Path
    model_type: str
    architecture: str
    parameters: int
    notes: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self) | {"output": str(self.output), "notes": list(self.notes)}


def convert_checkpoint(checkpoint: Checkpoint, out: Path, *, overwrite: bool = False) -> Conversion:
    """Write a checkpoint as the stock class that computes the same, one tensor at a time, in its own dtype.

    UserError if no stock class is known to compute the same, or OUT may not be written.
    """
    plain = _plain_checkpoint(checkpoint)
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
            sources = checkpoint.read(made.sources)
            writer.write(name, made.make(*(sources[source] for source in made.sources)).contiguous())
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


def _plain_checkpoint(checkpoint: Checkpoint) -> PlainCheckpoint:
    if is_timm(checkpoint.config):
        return vit_of_timm(checkpoint)
    model_type = checkpoint.config.get("model_type")
    if model_type == "vit_mae":
        return _vit_of_mae(checkpoint)
    raise UserError(f"{checkpoint.path} is a {model_type}: only folders of timm and vit_mae are converted")


_ENCODER = ("embeddings.", "encoder.", "layernorm.")


def _vit_of_mae(checkpoint: Checkpoint) -> PlainCheckpoint:
    """The encoder of a masked autoencoder, with a decoder or without, as a ViT that reads every patch.

    The autoencoder orders patches differently, which makes no difference to a transformer without a mask.
    """
    known = set(ViTConfig().to_dict()) - {"transformers_version", "architectures", "model_type"}
    config: dict[str, Any] = {key: value for key, value in checkpoint.config.items() if key in known}
    config |= {"model_type": "vit", "architectures": ["ViTModel"]}
    tensors, left_out = {}, 0
    for name, info in checkpoint.tensors.items():
        vit_name = name.removeprefix("vit.")
        if vit_name.startswith(_ENCODER):
            tensors[vit_name] = copy_tensor(name, info.stored_shape)
        elif name.startswith("decoder."):
            left_out += 1
        else:
            raise UserError(f"{checkpoint.path} has tensor {name}, which is none of a masked autoencoder's")
    notes = ["its encoder, which here reads every patch"]
    if left_out:
        notes.append(f"{left_out} tensors of the decoder are left out")
    return PlainCheckpoint(config, tensors, notes=tuple(notes))


def _check(plain: PlainCheckpoint, architecture: str, checkpoint: Checkpoint) -> None:
    """Refuse tensors that the stock class has no place for, or lacks, before anything is written."""
    bad = [name for name in plain.tensors if checkpoint.tensors[plain.tensors[name].sources[0]].dtype.itemsize == 1]
    if bad:
        raise UserError(f"{checkpoint.path} holds {bad[0]} in one byte a number; give the checkpoint it was made from")
    shapes = {name: made.shape for name, made in plain.tensors.items()}
    check_shapes(shapes, stock_names(plain.config, architecture), f"{checkpoint.path} as {architecture}")
