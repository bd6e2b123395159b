"""Reading a graph without its weights, which are most of its file."""

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnx

from ckpt_prune.onnx.writing import GRAPH, INITIALIZER, RAW_DATA, start_field

SMALL = 1024
"""Bytes of the largest constants that are read: shapes of outputs follow from some of them."""
MAPPED = 1 << 16
"""Bytes of the largest weights that are worth no map of their own."""
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
"""How a field may be stored, and how many bytes it takes if they are always as many."""


def read_structure(path: Path) -> onnx.ModelProto:
    """Read a graph as if weights of more than `SMALL` bytes lay in a file of their own: name, type and shape remain.

    Raises:
        ValueError, or protobuf's DecodeError: the file is damaged.
    """
    return onnx.ModelProto.FromString(_shorten_model(path, SMALL))


def refer_to_weights(path: Path) -> bytes:
    """Return a graph whose weights of more than `MAPPED` bytes are said to lie where they do: in the graph's own file.

    Raises:
        ValueError: the file is damaged.
    """
    return _shorten_model(path, MAPPED, path.name)


def _shorten_model(path: Path, most: int, name: str | None = None) -> bytes:
    """Return a graph without weights of more bytes; `name` is the file that they are then said to lie in."""

    def shorten_graph(data: mmap.mmap, begin: int, stop: int) -> bytes:
        return _replace_fields(data, begin, stop, INITIALIZER, partial(_shorten_weight, most=most, name=name))

    with path.open("rb") as file:
        if not path.stat().st_size:
            return b""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _replace_fields(data, 0, len(data), GRAPH, shorten_graph)


def _shorten_weight(data: mmap.mmap, begin: int, stop: int, *, most: int, name: str | None) -> bytes:
    if stop - begin <= most:
        return data[begin:stop]
    kept, place = [], None
    for number, start, inner, end in _find_fields(data, begin, stop):
        if number == RAW_DATA and inner is not None:
            place = inner, end - inner
        else:
            kept.append(data[start:end])
    if place is None:
        return b"".join(kept)
    elsewhere = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    if name is not None:
        for key, value in (("location", name), ("offset", str(place[0])), ("length", str(place[1]))):
            elsewhere.external_data.add(key=key, value=value)
    return b"".join([*kept, elsewhere.SerializeToString()])


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
