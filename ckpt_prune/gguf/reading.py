"""Reading a GGUF file that may be hostile or cut: its keys at once, its tensors one at a time."""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from ckpt_prune.checkpoint.files import Stamp, open_input, stamp_of
from ckpt_prune.common.errors import UserError

_MOST_KEYS = _MOST_TENSORS = 100_000
_MOST_ELEMENTS = 2**24
_LONGEST = 2**24
"""Bytes of a string: chat templates have some ten thousand."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor in its file. The shape is in PyTorch's order, with the fastest dimension last."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file's keys and tensors.

    Attributes:
        stamp: of the file when it was opened.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    stamp: Stamp

    def read(self, name: str, place: int | None = None) -> Tensor:
        """Return a tensor in float32, or what stands at a place of its first axis."""
        info = self.tensors[name]
        if place is not None:
            size = info.bytes // info.shape[0]
            info = replace(info, shape=info.shape[1:], offset=info.offset + place * size, bytes=size)
        with open_input(self.path) as handle:
            handle.seek(info.offset)
            data = np.fromfile(handle, np.uint8, info.bytes)
            if stamp_of(handle.fileno()) != self.stamp:
                raise UserError(f"{self.path} changed since it was opened; run again")
        if data.size < info.bytes:
            raise UserError(f"{self.path} ends inside {name}; download it again")
        rows = data.reshape(math.prod(info.shape[:-1]), -1)
        if info.kind in (Kind.F32, Kind.F16):
            decoded = rows.view(np.float32 if info.kind == Kind.F32 else np.float16).astype(np.float32)
        else:
            decoded = gguf.dequantize(rows, info.kind)
        return torch.from_numpy(decoded).reshape(info.shape)


def open_gguf(path: Path) -> GgufFile:
    """Read a file's keys and where its tensors are.

    Raises:
        UserError: it is no GGUF file, is cut, or holds counts, names or places that cannot be.
    """
    try:
        with open_input(path) as raw:
            stamp = stamp_of(raw.fileno())
            size = os.fstat(raw.fileno()).st_size
            with BufferedReader(raw) as handle:
                return _Parser(path, handle, size).parse(stamp)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error})") from error


@cache
def _is_decoded(kind: Kind) -> bool:
    """Whether gguf-py makes floats of a type."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Parser:
    def __init__(self, path: Path, handle: BinaryIO, size: int) -> None:
        self._path, self._handle, self._size = path, handle, size

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self._path}: {what}; download it again, or write it anew")

    def parse(self, stamp: Stamp) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise UserError(f"{self._path} is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise UserError(f"{self._path}: GGUF version {version} is not read (2 and 3 are, in little-endian order)")
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._fault(f"it says that it has {tensors} tensors and {keys} keys")
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in values:
                raise self._fault(f"it has the key {key[:60]!r} twice")
            values[key] = self._value(self._number("I"))
        if (parts := values.get("split.count", 1)) != 1:
            raise UserError(f"{self._path} is one of {parts} parts: join them first (llama-gguf-split --merge)")
        infos = [self._tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment!r}")
        start = -(-self._handle.tell() // alignment) * alignment
        return GgufFile(self._path, values, self._place_tensors(infos, start, alignment), stamp)

    def _place_tensors(self, infos: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for info in sorted(infos, key=lambda info: info.offset):
            if info.name in tensors:
                raise self._fault(f"it has the tensor {info.name!r} twice")
            if info.offset % alignment or info.offset < end or start + info.offset + info.bytes > self._size:
                raise self._fault(f"tensor {info.name!r} lies outside the file, on another one, or out of step")
            end = info.offset + info.bytes
            tensors[info.name] = GgufTensor(info.name, info.shape, info.kind, start + info.offset, info.bytes)
        return tensors

    def _tensor(self) -> GgufTensor:
        name = self._string()
        count = self._number("I")
        if not 1 <= count <= 4 or not name or len(name) > 64 or not name.isprintable():
            raise self._fault(f"a tensor has the name {name[:70]!r} and {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        number = self._number("I")
        if min(shape) < 1 or math.prod(shape) > 2**48:
            raise self._fault(f"tensor {name!r} has the shape {shape}")
        if number not in iter(Kind) or not _is_decoded(kind := Kind(number)):
            raise self._fault(f"tensor {name!r} has a type that is not read ({number})")
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % elements:
            raise self._fault(f"tensor {name!r} has rows of {shape[-1]}, which is no multiple of {elements}")
        return GgufTensor(name, shape, kind, self._number("Q"), math.prod(shape) // elements * size)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._fault(f"a key has a value of unknown type ({kind})")
        inner, count = self._number("I"), self._number("Q")
        if count > _MOST_ELEMENTS:
            raise self._fault(f"an array says that it has {count} elements")
        if inner == _STRING:
            return [self._string() for _ in range(count)]
        if inner not in _SCALARS:
            raise self._fault(f"an array has elements of unknown type ({inner})")
        form = f"<{count}{_SCALARS[inner]}"
        return list(struct.unpack(form, self._take(struct.calcsize(form))))

    def _string(self) -> str:
        length = self._number("Q")
        if length > _LONGEST:
            raise self._fault(f"a text says that it has {length} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fault("a text is not UTF-8") from error

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _take(self, count: int) -> bytes:
        if self._handle.tell() + count > self._size:
            raise self._fault("it is cut")
        return self._handle.read(count)
