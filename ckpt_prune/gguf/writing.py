"""Writing a GGUF file, one tensor in memory at a time."""

import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.common.progress import track
from ckpt_prune.gguf.layout import Layout
from ckpt_prune.job.model_card import source_card

_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
"""llama.cpp's numbers for a file whose matrices mostly have a type."""
_KINDS = {name: Kind[name.upper()] for name in _FILE_TYPES}
_CHUNK = 2**22
"""Elements that are rounded at once."""


@dataclass(frozen=True)
class Written:
    """A file's size, and what to say of it."""

    bytes: int
    notes: tuple[str, ...]


def type_of(dtype: torch.dtype) -> GgufType:
    """The type that holds a checkpoint's weights as they are."""
    return {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype, "f32")  # type: ignore[return-value]


def kinds_of(layout: Layout, chosen: GgufType) -> dict[str, Kind]:
    """The type of every tensor.

    Vectors and norms are float32. Rows that are no multiple of 32 are float16 if the type has blocks of 32. With 4 bits
    the embedding and the head have 8, as llama.cpp's own tool writes them.
    """
    kinds = {}
    for name, weight in layout.tensors.items():
        kind = _KINDS[chosen]
        if len(weight.shape) == 1 or "_norm." in name:
            kind = Kind.F32
        elif kind not in (Kind.F32, Kind.F16, Kind.BF16):
            if name in ("token_embd.weight", "output.weight"):
                kind = Kind.Q8_0
            if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = Kind.F16
        kinds[name] = kind
    return kinds


def write_gguf(path: Path, layout: Layout, chosen: GgufType, tokenizer: Mapping[str, Any], source: Path) -> Written:
    """Write a layout to a path, whatever is there.

    Args:
        path: of the file.
        layout: its tensors and the model's keys.
        chosen: type of the matrices.
        tokenizer: keys of the tokenizer.
        source: folder whose card names the licence.
    """
    kinds = kinds_of(layout, chosen)
    writer = gguf.GGUFWriter(path, layout.architecture.name)
    sizes = {name: _bytes_of(weight.shape, kinds[name]) for name, weight in layout.tensors.items()}
    total = sum(sizes.values())
    with disk_failures(path):
        if shutil.disk_usage(path.parent).free < total:
            raise UserError(f"{path} takes {total:,} bytes, and there is no room for them; choose another place")
    for name, weight in layout.tensors.items():
        writer.add_tensor_info(name, weight.shape, np.dtype(np.float32), sizes[name], raw_dtype=kinds[name])
    _add_general(writer, layout, source, _FILE_TYPES[chosen])
    for key, value in layout.values.items():
        _add(writer, f"{layout.architecture.name}.{key}", value)
    for key, value in tokenizer.items():
        _add(writer, key, value)
    with disk_failures(path):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, weight in track(list(layout.tensors.items()), "writing", unit="tensor"):
                writer.write_tensor_data(_encoded(name, weight.read(), kinds[name]))
        finally:
            writer.close()
    wide = Counter(kinds.values())[Kind.F16] if chosen.startswith("q") else 0
    note = f"{wide} matrices are f16: their rows are no multiple of 32 (prune with multiple_of: 32)"
    return Written(path.stat().st_size, (*layout.notes, *([note] if wide else [])))


def _bytes_of(shape: tuple[int, ...], kind: Kind) -> int:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // elements * size


def _encoded(name: str, tensor: Tensor, kind: Kind) -> "np.ndarray[Any, Any]":
    if not all_finite(tensor):
        raise UserError(f"{name} has NaN or Inf: repair the checkpoint first")
    rows = tensor.reshape(-1, tensor.shape[-1])
    size = max(1, _CHUNK // rows.shape[1])
    parts = []
    for start in range(0, rows.shape[0], size):
        part = rows[start : start + size].float().numpy()
        if kind == Kind.F16 and np.abs(part).max(initial=0) > np.finfo(np.float16).max:
            raise UserError(f"{name} has weights beyond the range of float16: give --type bf16 or f32")
        parts.append(gguf.quantize(np.ascontiguousarray(part), kind))
    return np.concatenate(parts)


def _add_general(writer: gguf.GGUFWriter, layout: Layout, source: Path, file_type: int) -> None:
    writer.add_type("model")
    writer.add_name(source.name)
    parameters = sum(math.prod(weight.shape) for weight in layout.tensors.values())
    writer.add_size_label(gguf.size_label(parameters, 0, 0, 0))
    card = source_card(source)
    if card is not None:
        for add, value in (
            (writer.add_license, card.license),
            (writer.add_license_name, card.license_name),
            (writer.add_license_link, card.license_link),
        ):
            if value:
                add(value)
        if card.language:
            writer.add_languages(card.language)
        if card.pipeline_tag:
            writer.add_tags([card.pipeline_tag])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(file_type)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def check_gguf_place(out: Path, *, overwrite: bool) -> None:
    """Refuse an output that is no new file, unless it replaces a GGUF file."""
    if out.suffix != ".gguf":
        raise UserError(f"{out}: a GGUF file has a name that ends in .gguf")
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_file():
        raise UserError(f"{out} is no file: choose another name")
    if not overwrite:
        raise UserError(f"{out} exists; --overwrite replaces it")
    with out.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{out} is no GGUF file, and is not replaced: choose another name")
