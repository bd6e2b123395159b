"""SentencePiece's .model with fewer pieces: the protocol-buffer file is cut as bytes, without a schema.

By sentencepiece_model.proto, field 1 of the file is a piece (its field 1 the text). Field 2 has the trainer's settings,
with the number of pieces (field 4) and the places of unknown, first, last and padding piece (fields 40 to 43).
"""

from collections.abc import Iterator, Set
from pathlib import Path

from ckpt_prune.common.errors import UserError

_PIECE, _TRAINER, _TEXT, _SIZE, _PLACES = 1, 2, 1, 4, (40, 41, 42, 43)
_DEFAULTS = dict(zip(_PLACES, (0, 1, 2, -1), strict=True))
_VARINT, _BYTES, _WIDTHS = 0, 2, {1: 8, 5: 4}


def filter_model(path: Path, kept: Set[str]) -> bytes:
    """Return a .model with the pieces that are in `kept`; UserError if the file is no SentencePiece model."""
    try:
        return filter_pieces(path.read_bytes(), kept)
    except (ValueError, IndexError, StopIteration) as error:
        raise UserError(f"{path} is not a SentencePiece model; download it again, or take it away") from error


def filter_pieces(data: bytes, kept: Set[str]) -> bytes:
    """Return the bytes of a .model with the pieces that are in `kept`. ValueError or IndexError for other bytes."""
    fields = list(_fields(data))
    pieces = [_text(body) for number, _, body in fields if number == _PIECE]
    places = {old: new for new, old in enumerate(at for at, piece in enumerate(pieces) if piece in kept)}
    written = bytearray()
    at = 0
    for number, kind, body in fields:
        if number == _PIECE:
            if at in places:
                written += _field(number, kind, body)
            at += 1
        elif number == _TRAINER:
            written += _field(number, kind, _renumber(body, places))
        else:
            written += _field(number, kind, body)
    return bytes(written)


def _text(piece: bytes) -> str:
    return next(body for number, _, body in _fields(piece) if number == _TEXT).decode()


def _renumber(trainer: bytes, places: dict[int, int]) -> bytes:
    """Return what the trainer was told, with the new places of pieces."""
    written, stated = bytearray(), set()
    for number, kind, body in _fields(trainer):
        if number == _SIZE:
            body = _varint(len(places))
        elif number in _PLACES:
            stated.add(number)
            body = _varint(places.get(_value(body), _value(body)))
        written += _field(number, kind, body)
    for number, default in _DEFAULTS.items():
        if number not in stated and places.get(default, default) != default:
            written += _field(number, _VARINT, _varint(places[default]))
    return bytes(written)


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, kind and body of each field of a message; of a varint its own bytes."""
    at = 0
    while at < len(data):
        tag, at = _read(data, at)
        number, kind = tag >> 3, tag & 7
        start = at
        if kind == _VARINT:
            _, at = _read(data, at)
        elif kind == _BYTES:
            length, start = _read(data, at)
            at = start + length
        elif kind in _WIDTHS:
            at += _WIDTHS[kind]
        else:
            raise ValueError(f"a field of kind {kind}")
        if at > len(data):
            raise ValueError("the file ends inside a field")
        yield number, kind, data[start:at]


def _field(number: int, kind: int, body: bytes) -> bytes:
    length = _varint(len(body)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + body


def _read(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _value(body: bytes) -> int:
    value, _ = _read(body, 0)
    return value - 2**64 if value >= 2**63 else value  # -1 stands for no piece


def _varint(value: int) -> bytes:
    value %= 2**64
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
