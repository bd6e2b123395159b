"""Writing a GGUF file, one tensor in memory at a time."""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.checkpoint.staging import disk_failures
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GgufType
from ckpt_prune.common.progress import track
from ckpt_prune.gguf.contents import Layout
from ckpt_prune.gguf.importance import Importance
from ckpt_prune.gguf.rounding import encode, load_rows
from ckpt_prune.gguf.tokenizer import FileTokenizer
from ckpt_prune.gguf.types import file_type, tensor_bytes
from ckpt_prune.show.model_card import source_card

FITTED = "ckpt_prune.fitted"
"""Key of files whose matrices are rounded by what reaches them: single weights may be farther from the checkpoint's."""


@dataclass(frozen=True)
class _Rows:
    """A tensor for gguf-py, encoded while it is written. Python says that a disk is full; numpy's `tofile` may not."""

    nbytes: int
    parts: Iterator["np.ndarray[Any, Any]"]

    def tofile(self, file: BinaryIO) -> None:
        for part in self.parts:
            file.write(part.data.cast("B"))


def write_gguf(
    path: Path,
    layout: Layout,
    chosen: GgufType,
    kinds: Mapping[str, Kind],
    tokenizer: FileTokenizer,
    source: Path,
    importance: Importance,
    rounded: Mapping[str, Path] | None = None,
) -> None:
    """Write a layout to a path, whatever is there.

    Args:
        path: of the file.
        layout: its tensors and the model's keys.
        chosen: type that the file says it has.
        kinds: type of every tensor.
        tokenizer: GGUF keys of the tokenizer, and the name of the file they are from.
        source: folder whose card names the licence.
        importance: of the inputs of matrices, as far as it is known.
        rounded: matrix → file with its rows, if they are rounded already.
    """
    sizes = tensor_bytes(layout, kinds)
    writer = fill_writer(path, layout, chosen, kinds, tokenizer, source, fitted=bool(rounded))
    total = sum(sizes.values())
    with disk_failures(path):
        if shutil.disk_usage(path.parent).free < total:
            raise UserError(f"{path} takes {total:,} bytes, and there is no room for them; choose another place")
    with disk_failures(path):
        try:
            write_head(writer)
            for name, weight in track(list(layout.tensors.items()), "writing", unit="tensor"):
                file = (rounded or {}).get(name)
                if file is None:
                    parts = encode(name, weight.read(), kinds[name], importance.get(name))
                else:
                    parts = load_rows(file)
                writer.write_tensor_data(_Rows(sizes[name], parts))  # type: ignore[arg-type]
        finally:
            writer.close()


def fill_writer(
    path: Path | None,
    layout: Layout,
    chosen: GgufType,
    kinds: Mapping[str, Kind],
    tokenizer: FileTokenizer,
    source: Path,
    *,
    fitted: bool = False,
) -> gguf.GGUFWriter:
    """Return a writer that knows all that stands before the tensors; nothing is written yet.

    Arguments are as in `write_gguf`; `fitted`: matrices are rounded by what reaches them, and the file says so.
    """
    writer = gguf.GGUFWriter(path, layout.architecture.name)
    sizes = tensor_bytes(layout, kinds)
    for name, weight in layout.tensors.items():
        writer.add_tensor_info(name, weight.shape, np.dtype(np.float32), sizes[name], raw_dtype=kinds[name])
    _add_general(writer, layout, source, tokenizer.name, file_type(chosen))
    for key, value in layout.values.items():
        stands = key in layout.architecture.scalars.values() or key.startswith("tokenizer.")
        prefix = "" if stands else f"{layout.architecture.name}."
        _add(writer, prefix + key, value)
    for key, value in tokenizer.values.items():
        _add(writer, key, value)
    if fitted:
        _add(writer, FITTED, True)
    return writer


def write_head(writer: gguf.GGUFWriter) -> None:
    """Write what stands before the tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _add_general(writer: gguf.GGUFWriter, layout: Layout, source: Path, name: str, file_type: int) -> None:
    writer.add_type("model")
    writer.add_name(name)
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
