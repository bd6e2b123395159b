"""Reading a graph without its weights, which are most of its file."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx

from ckpt_prune.onnx.writing import GRAPH, INITIALIZER, RAW_DATA, start_field

SMALL = 1024
"""Bytes of the largest constants that are read: shapes of outputs follow from some of them."""
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""How a field may be stored, and how many bytes it takes if they are always as many."""
_ELSEWHERE = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL).SerializeToString()


def read_structure(path: Path) -> onnx.ModelProto:
    """Read a graph as if weights of more than `SMALL` bytes lay in a file of their own: name, type and shape remain.

    Raises:
        ValueError, or protobuf's DecodeError: the file is damaged.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            return onnx.ModelProto()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return onnx.ModelProto.FromString(_shorten_model(data))


def _shorten_model(data: mmap.mmap) -> bytes:
    return _replace_fields(data, 0, len(data), GRAPH, _shorten_graph)


def _shorten_graph(data: mmap.mmap, begin: int, stop: int) -> bytes:
    return _replace_fields(data, begin, stop, INITIALIZER, _shorten_weight)


def _shorten_weight(data: mmap.mmap, begin: int, stop: int) -> bytes:
    if stop - begin <= SMALL:
        return data[begin:stop]
    fields = list(_find_fields(data, begin, stop))
    kept = [data[start:end] for number, start, _, end in fields if number != RAW_DATA]
    return b"".join(kept if len(kept) == len(fields) else [*kept, _ELSEWHERE])


def _replace_fields(
    data: mmap.mmap, begin: int, stop: int, field: int, replace: Callable[[mmap.mmap, int, int], bytes]
) -> bytes:
    """Return a message whose messages in one of its fields are replaced."""
    parts = []
    for number, start, inner, end in _find_fields(data, begin, stop):
        if number == field and inner is not None:
            message = replace(data, inner, end)
            parts.append(start_field(field, len(message)) + message)
        else:
            parts.append(data[start:end])
    return b"".join(parts)


def _find_fields(data: mmap.mmap, begin: int, stop: int) -> Iterator[tuple[int, int, int | None, int]]:
    """Yield (number, start, start of its bytes or None, end) of each field of a message; numbers have no bytes."""
    place = begin
    while place < stop:
        key, after = _read_varint(data, place, stop)
        inner = None
        if key & 7 == _VARINT:
            _, end = _read_varint(data, after, stop)
        elif key & 7 == _BYTES:
            size, inner = _read_varint(data, after, stop)
            end = inner + size
        elif key & 7 in _FIXED:
            end = after + _FIXED[key & 7]
        else:
            raise ValueError(f"byte {place} starts no field of a graph")
        if end > stop:
            raise ValueError(f"the file ends before the field at byte {place} does")
        yield key >> 3, place, inner, end
        place = end


def _read_varint(data: mmap.mmap, place: int, stop: int) -> tuple[int, int]:
    """Return an integer, and where what follows it starts."""
    value = shift = 0
    while place < stop and shift < 64:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
    raise ValueError(f"there is no number at byte {place}")
