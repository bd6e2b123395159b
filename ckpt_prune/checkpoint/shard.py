"""One safetensors file: its header, the place of each tensor's bytes, reading and writing them.

Files are read with plain reads into the caller's memory and never mapped. Peak memory is then what was asked for, and a
file that shrinks while it is read causes an error message instead of a bus error.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.files import Stamp, open_input, stamp_of
from ckpt_prune.checkpoint.json_files import EncodingError, parse_json_object
from ckpt_prune.common.errors import UserError, refuse_unreadable
from ckpt_prune.common.safe_text import has_no_controls

# In safetensors' own order: files list their tensors by descending position here, which keeps every tensor aligned.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
# 150,000 tensors. The safetensors library takes six times as much, which parsed is 3 GiB of memory.
_LARGEST_HEADER = 2**24
_LARGEST_TENSOR = 2**62
_CHUNK_BYTES = 64 * 2**20
FP4_BLOCK = 32
"""Elements of MXFP4 that share a scale."""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""


@dataclass(frozen=True)
class Stack:
    """How one tensor of a file holds several: one after the other along its first axis, or several in a row.

    Attributes:
        parts: names of the tensors, row by row.
        each: number in a row, one after the other along the second axis.
    """

    parts: tuple[str, ...]
    each: int = 1

    def shape(self, count: int, part: tuple[int, ...]) -> tuple[int, ...]:
        return (count, *part) if self.each == 1 else (count // self.each, self.each * part[0], *part[1:])


@dataclass(frozen=True)
class Scaled:
    """How a tensor is stored whose elements are products of stored elements and scales.

    Attributes:
        dtype: of the stored elements.
        scale: tensor of scales on disk.
        block: rows and columns of the last two axes that share a scale.
        bits: of an element, if several are packed in a word; None if none is.
        endings: what the names of elements and of scales have behind that of the tensor.
        stored_as: type of the scales in their file, if they are read as another one.
        fp4: whether elements are E2M1 numbers, two in a byte, (…, columns, rows / 32, 16) of a matrix of the file.
    """

    dtype: torch.dtype
    scale: "TensorInfo"
    block: tuple[int, int]
    bits: int | None = None
    endings: tuple[str, str] = ("", "")
    stored_as: torch.dtype | None = None
    fp4: bool = False


@dataclass(frozen=True)
class Adapter:
    """Two thin matrices whose product is added to a tensor when it is read.

    Attributes:
        down: A, (rank, inputs).
        up: B, (outputs, rank).
        factor: of the product.
        transposed: whether the file has the tensor as (inputs, outputs).
    """

    down: "TensorInfo"
    up: "TensorInfo"
    factor: float
    transposed: bool = False


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it.

    Attributes:
        name: on disk.
        dtype: of its elements as they are read.
        shape: as it is read and written.
        nbytes: of its data.
        offset: of its data, in bytes from the start of the file.
        transposed: whether the file holds the transpose of this matrix.
        scaled: how it is stored, if its elements are multiplied by scales when they are read.
        adapter: what is added when it is read.
        stamp: of its file when the header was read; None in a file that is still to be written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    nbytes: int
    offset: int
    transposed: bool = False
    scaled: Scaled | None = None
    adapter: Adapter | None = None
    stamp: Stamp | None = field(default=None, compare=False, repr=False)

    @property
    def parts(self) -> tuple["TensorInfo", ...]:
        """The tensors on disk that it is read from: itself, or its stored elements, and their scales or an adapter."""
        added = () if self.adapter is None else (self.adapter.down, self.adapter.up)
        if self.scaled is None:
            return (replace(self, adapter=None), *added) if added else (self,)
        shape, bits = self.stored_shape, self.scaled.bits
        if bits is not None:
            shape = shape[0], -(-shape[1] * bits // 32)
        elif self.scaled.fp4:
            shape = *shape[:-2], shape[-1], shape[-2] // FP4_BLOCK, FP4_BLOCK // 2
        plain = replace(self, dtype=self.scaled.dtype, shape=shape, transposed=False)
        return replace(plain, scaled=None, adapter=None), self.scaled.scale, *added

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in its file."""
        return self.shape[::-1] if self.transposed else self.shape

    def transpose(self) -> "TensorInfo":
        """Return the same data, read and written as the transpose of what the file holds."""
        return self if self.transposed else replace(self, shape=self.shape[::-1], transposed=True)

    def part(self, index: int, name: str, each: int = 1) -> "TensorInfo":
        """Return one of the tensors that it stacks, `each` in a row (`Stack`), under a new name."""
        nbytes = self.nbytes // (self.shape[0] * each)
        shape = self.shape[1:] if each == 1 else (self.shape[1] // each, *self.shape[2:])
        scaled = self.scaled
        if scaled is not None and scaled.scale.numel > 1:
            scaled = replace(scaled, scale=scaled.scale.part(index, scaled.scale.name, each))
        return replace(self, name=name, shape=shape, nbytes=nbytes, offset=self.offset + index * nbytes, scaled=scaled)

    def stack(self, count: int, stack: Stack, name: str) -> "TensorInfo":
        """Return the tensor of a file of which this is the first of `count` parts."""
        scaled = self.scaled
        if scaled is not None and scaled.scale.numel > 1:
            scaled = replace(scaled, scale=scaled.scale.stack(count, stack, scaled.scale.name))
        shape = stack.shape(count, self.stored_shape)
        return replace(self, name=name, shape=shape, nbytes=self.nbytes * count, transposed=False, scaled=scaled)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes in its file, with those of its scales."""
        return self.nbytes + (0 if self.scaled is None else self.scaled.scale.nbytes)


@dataclass(frozen=True)
class Header:
    """Header of a safetensors file: tensors in file order, free-text metadata, length of the whole file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; no tensor data is read."""
    try:
        with open_input(path) as handle:
            of_file = stamp_of(handle.fileno())
            size = of_file[0]
            length = int.from_bytes(handle.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or _LENGTH_BYTES + length > size:
                raise UserError(
                    f"{path} is {size} bytes long, too short for its header: truncated or not safetensors; "
                    "download it again"
                )
            if length > _LARGEST_HEADER:
                raise ValueError(f"a header of {length} bytes, where {_LARGEST_HEADER} are read at most")
            data = handle.read(length)
        header = _parse(path.name, data, of_file)
    except (OSError, ValueError) as error:
        refuse_unreadable(error)
        reason = "its header is not UTF-8" if isinstance(error, EncodingError) else error
        raise UserError(f"{path} is not a valid safetensors file ({reason}); download it again") from error
    if header.file_bytes != size:
        wrong = "truncated" if size < header.file_bytes else "too long"
        raise UserError(
            f"{path} is {size} bytes long but its header says {header.file_bytes}: it is {wrong}; download it again"
        )
    return header


def build_header(
    file: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Return the first bytes of a safetensors file holding `tensors`, and the header with each tensor's place.

    Laid out as the safetensors library does it: by dtype then name, contiguous, the header padded with spaces to a
    multiple of 8.

    Raises:
        ValueError: a dtype safetensors cannot hold.
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in CODES:
            raise ValueError(f"tensor {name!r}: safetensors cannot hold {dtype}")
    rank = {dtype: position for position, dtype in enumerate(CODES)}
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-rank[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, _parse(file, text)


def stack_shapes(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], stacks: Mapping[str, Stack]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtypes and shapes as files have them, with stacks in place of their parts.

    Args:
        tensors: dtype and shape by name.
        stacks: tensor of a file → its parts, of which `tensors` may lack some.
    """
    parts = {part for stack in stacks.values() for part in stack.parts}
    stored = {name: entry for name, entry in tensors.items() if name not in parts}
    for name, stack in stacks.items():
        present = [part for part in stack.parts if part in tensors]
        if present:
            dtype, shape = tensors[present[0]]
            stored[name] = dtype, stack.shape(len(present), shape)
    return stored


def read_tensor(handle: io.FileIO, info: TensorInfo) -> Tensor:
    """Read a tensor (`info.shape`, `info.dtype`, CPU) into memory of its own."""
    tensor = torch.empty(info.stored_shape, dtype=info.dtype)
    _fill(handle, info, 0, tensor)
    return tensor.T.contiguous() if info.transposed else tensor


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the whole numbers that 32-bit words hold, (rows, columns) int32, from -2^(bits-1) on.

    The first of them is in the lowest bits; each is stored as its distance from the least one.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    codes: Tensor = fields.reshape(len(words), -1)[:, :columns] - 2 ** (bits - 1)
    return codes


def apply_scales(info: TensorInfo, stored: Tensor, scale: Tensor) -> Tensor:
    """Multiply stored elements by their scales, which gives the tensor as it is read.

    Args:
        info: with `scaled`.
        stored: elements, in any memory layout.
        scale: with as many axes, or one number.
    """
    assert info.scaled is not None
    if info.scaled.fp4:
        product = _read_fp4(stored, scale, info.dtype)
        return product.T.contiguous() if info.transposed else product
    (rows, columns), (height, width), bits = info.scaled.block, info.stored_shape[-2:], info.scaled.bits
    product = torch.empty(info.stored_shape, dtype=info.dtype)
    wide = scale.float().reshape(1, 1) if scale.numel() == 1 else scale.float()
    wide = wide.repeat_interleave(columns, dim=-1)[..., :width]
    # A run of rows at a time: in float32 the whole would be four times what is stored.
    step = rows * max(1, _CHUNK_BYTES // (4 * width * rows))
    for first in range(0, height, step):
        part = stored[..., first : first + step, :]
        part = part.float() if bits is None else unpack_words(part, bits, width).float()
        tall = wide[..., first // rows : -(-(first + step) // rows), :].repeat_interleave(rows, dim=-2)
        product[..., first : first + step, :] = (part * tall[..., : part.shape[-2], :]).to(info.dtype)
    return product.T.contiguous() if info.transposed else product


def _read_fp4(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return matrices of MXFP4, (…, blocks · 32, columns).

    The OCP's Microscaling formats, section 5.3: an element of four bits (E2M1) times 2^e, one e for 32 of them.

    Args:
        codes: two in a byte, the first in the lower half, (…, columns, blocks, 16) uint8.
        scale: of each block, (…, columns, blocks), powers of two.
        dtype: of the result.
    """
    if codes.ndim > 3:
        return torch.stack([_read_fp4(*each, dtype) for each in zip(codes, scale, strict=True)])
    values = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    matrix = torch.empty(codes.shape[1] * FP4_BLOCK, len(codes), dtype=dtype)
    step = max(1, _CHUNK_BYTES // (8 * len(matrix)))
    for first in range(0, len(codes), step):
        part = codes[first : first + step]
        elements = values[torch.stack([part & 15, part >> 4], -1).int()].flatten(-2)
        elements *= scale[first : first + step, :, None].float()
        matrix[:, first : first + step] = elements.flatten(1).T.to(dtype)
    return matrix


def add_adapter(info: TensorInfo, tensor: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Add factor · B A to a tensor as it is read; computed in float32, some rows at a time.

    Args:
        info: with `adapter`.
        tensor: `info.shape`; it is written over.
        down: A, (rank, inputs).
        up: B, (outputs, rank).
    """
    assert info.adapter is not None
    # Rows of the tensor as it is read are outputs, unless just one of file and view is transposed.
    left, right = (down.T, up.T) if info.adapter.transposed != info.transposed else (up, down)
    left, right = left.float() * info.adapter.factor, right.float()
    step = max(1, _CHUNK_BYTES // (4 * tensor.shape[1]))
    for first in range(0, tensor.shape[0], step):
        rows = slice(first, first + step)
        tensor[rows] = (tensor[rows].float() + left[rows] @ right).to(tensor.dtype)
    return tensor


def read_flat_chunks(handle: io.FileIO, info: TensorInfo) -> Iterator[Tensor]:
    """Yield the tensor's elements in order as 1-D tensors of at most 64 MiB."""
    size = _CHUNK_BYTES // info.dtype.itemsize
    for first in range(0, info.numel, size):
        chunk = torch.empty(min(size, info.numel - first), dtype=info.dtype)
        _fill(handle, info, first * info.dtype.itemsize, chunk)
        yield chunk


def read_bytes(handle: io.FileIO, info: TensorInfo, start: int, count: int) -> bytes:
    data = torch.empty(count, dtype=torch.uint8)
    _fill(handle, info, start, data)
    return data.numpy().tobytes()


def digest_tensor(handle: io.FileIO, info: TensorInfo) -> str:
    """Return the hex SHA-256 of a tensor's bytes in its file."""
    digest = hashlib.sha256()
    for chunk in read_flat_chunks(handle, info):
        digest.update(as_bytes(chunk))
    return digest.hexdigest()


def write_tensor(handle: io.FileIO, info: TensorInfo, tensor: Tensor) -> str:
    """Write `tensor` (`info.shape`, `info.dtype`; any device, any strides) to its place, 64 MiB at a time.

    Returns:
        Hex SHA-256 of the bytes that were written.
    """
    if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
        raise ValueError(
            f"tensor {info.name!r} is {tensor.dtype} {tuple(tensor.shape)}, planned as {info.dtype} {info.shape}"
        )
    digest = hashlib.sha256()
    if info.nbytes == 0:
        return digest.hexdigest()
    handle.seek(info.offset)
    stored = tensor.detach().T if info.transposed else tensor.detach()
    rows = stored.reshape(1) if stored.ndim == 0 else stored
    step = max(1, _CHUNK_BYTES * rows.shape[0] // info.nbytes)
    for first in range(0, rows.shape[0], step):
        data = as_bytes(rows[first : first + step].cpu().contiguous())
        digest.update(data)
        while data:
            data = data[handle.write(data) :]
    return digest.hexdigest()


def _fill(handle: io.FileIO, info: TensorInfo, start: int, tensor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    handle.seek(info.offset + start)
    data = as_bytes(tensor)
    while data:
        count = handle.readinto(data)
        if not count:
            raise UserError(f"{info.file} ended inside tensor {info.name!r} while being read; download it again")
        data = data[count:]
    # Last: what came before a change is of the file that was opened.
    if info.stamp not in (None, stamp_of(handle.fileno())):
        raise UserError(
            f"{info.file} changed since it was opened, tensor {info.name!r} may be of another model; run again"
        )


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's own memory as bytes; numpy has no bfloat16."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _parse(file: str, data: bytes, of_file: Stamp | None = None) -> Header:
    content = parse_json_object(data)
    metadata = content.pop("__metadata__", None)
    if metadata is None:  # also for null, as in the library
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not a map of strings")
    for name in content:
        if not has_no_controls(name):
            raise ValueError(f"tensor {name!a} has control characters in its name")
    data_start = _LENGTH_BYTES + len(data)
    infos = [_parse_tensor(file, data_start, name, entry, of_file) for name, entry in content.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = data_start
    for info in infos:
        if info.offset != end:
            raise ValueError(f"tensor {info.name!r} overlaps another or leaves a hole")
        end += info.nbytes
    return Header({info.name: info for info in infos}, metadata, end)


def _parse_tensor(file: str, data_start: int, name: str, entry: object, of_file: Stamp | None) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name!r} lacks dtype, shape or data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {code!r}, known are {', '.join(DTYPES)}")
    if not _are_naturals(shape) or math.prod(max(size, 1) for size in shape) > _LARGEST_TENSOR:
        raise ValueError(f"tensor {name!r} has no valid shape")
    nbytes = math.prod(shape) * DTYPES[code].itemsize
    if not _are_naturals(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"tensor {name!r} has data_offsets that do not fit its shape")
    start = data_start + offsets[0]
    return TensorInfo(name, DTYPES[code], tuple(shape), file, nbytes, start, stamp=of_file)


def _are_naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
