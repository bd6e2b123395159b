"""Files that are almost right: bytes changed at random, values of JSON replaced by what its readers hardly expect."""

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

CANARY = "/canary"
"""What no file may make this tool open: names in files lead there."""

SCALARS: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 7, 255, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e30, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", " ", "x" * 300, "x" * 70_000, "\x1b[31mred", "\x00", "\n", "\u202e", "\ud800"),
    *("é" * 99, CANARY, f"..{CANARY}", f"../../../..{CANARY}", f"file://{CANARY}"),
    *[
        "a",
        "true",
        "-1",
        "1e9",
        "{0.__class__}",
        "{:>9999999999}",
        "%s%n",
        "<script>",
        "$(id)",
        "`id`",
        "|",
        "~/x",
        ".",
        "..",
        "/",
        "con",
        "bfloat16",
        "llama",
        "gelu",
    ],
]
CONTAINERS: list[Callable[[], Any]] = [
    list,
    dict,
    lambda: [None],
    lambda: [[[]]],
    lambda: {"": {}},
    lambda: [0] * 10_000,
    lambda: {str(i): i for i in range(5_000)},
    lambda: json.loads("[" * 90 + "]" * 90),
    lambda: json.loads('{"a":' * 90 + "0" + "}" * 90),
]


def mutate_data(data: bytes, kind: str, rng: random.Random) -> bytes:
    """A file's bytes, changed in one to three places.

    Args:
        data: the file.
        kind: "json", "safetensors" (whose header is JSON), "gguf", "yaml", "npy" or "bytes".
        rng: decides.
    """
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if kind == "json" and rng.random() < 0.75:
            data = _in_json(data, rng)
        elif kind == "safetensors" and rng.random() < 0.6:
            data = _in_header(data, rng)
        elif kind == "npy" and rng.random() < 0.7:
            data = _in_text(data[:128], ARRAYS, rng) + data[128:]
        elif kind == "yaml" and rng.random() < 0.7:
            data = _in_text(data, MARKS, rng)
        elif kind == "gguf" and rng.random() < 0.8:
            data = _in_gguf(data, rng)
        else:
            data = _in_bytes(data, rng)
    return data


MARKS = [
    *(
        "!!timestamp ",
        "!!int ",
        "!!float ",
        "!!bool ",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!null ",
        "!!str ",
        "!!merge ",
    ),
    *("!!python/name:os.system ", "!x ", "&a ", "*a ", "<<: *a\n", "? ", ": ", "- ", "[", "]", "{", "}", "|\n", ">-\n"),
    *("#", "%YAML 9.9\n", "---\n", "...\n", "\t", "\n  ", "'", '"', "@", "`", "\x85", "\u2028", "\0", "~", ".inf"),
    *("0x1f", "1_000", "2:4", "2026-01-01", "[" * 40, "{a: " * 40, "- " * 40, "9" * 5000, "1e999", "yes", "=", ","),
]
"""What YAML takes for more than text."""
ARRAYS = [
    *("<f8", "<f2", ">f4", "|O", "<U9", "|S3", "|V4", "<c8", "<M8[s]", "|b1", "<i8", "True", "(", ")", "(3,)", "(-1,)"),
    *("()", "(1, 1, 1, 1)", "(99999999999,)", "(0,)", "[('a', '<f4')]", "{", "}", "'descr'", "'shape'", "\n", "x"),
]
"""What the header of an array may say."""


def _in_text(data: bytes, marks: list[str], rng: random.Random) -> bytes:
    """Put a mark between two words of a text, or in the place of one."""
    words = re.split(rb"(\s+|[\[\]{}(),:'])", data)
    at = rng.randrange(len(words))
    words[at] = rng.choice(marks).encode() + (words[at] if rng.random() < 0.5 else b"")
    return b"".join(words)


def _in_json(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _in_bytes(data, rng)
    return json.dumps(mutate_value(value, rng), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A JSON value, one of the values in it changed, gone, doubled or moved elsewhere."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return _other(value, rng)
    holder, key = rng.choice(places)
    how = rng.random()
    if how < 0.6:
        holder[key] = _other(holder[key], rng)
    elif how < 0.75:
        del holder[key]
    elif how < 0.85:
        other, name = rng.choice(places)
        holder[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other[min(name, len(other) - 1)])
    elif isinstance(holder, dict):
        name = rng.choice([s for s in SCALARS if isinstance(s, str)])
        holder[name] = holder.pop(key) if rng.random() < 0.5 else _other(None, rng)
    else:
        holder.insert(key, _other(holder[key], rng))
    return value


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, float(value), str(value), [value]])
    if isinstance(value, str) and rng.random() < 0.3:
        return rng.choice(
            [value[: len(value) // 2], value * 2, value.upper(), value + "\x1b[2J", [value], {value: value}]
        )
    if isinstance(value, list) and value and rng.random() < 0.5:
        return rng.choice([value * 2, value[:-1], value[::-1], value[0], {str(i): v for i, v in enumerate(value)}])
    return rng.choice(SCALARS) if rng.random() < 0.8 else rng.choice(CONTAINERS)()


def _in_header(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = _in_json(data[8 : 8 + length], rng) if rng.random() < 0.8 else data[8 : 8 + length]
    stated_length = (
        len(header) if rng.random() < 0.85 else rng.choice([0, 1, 7, len(header) + 1, 2**31, 2**63 - 1, 2**64 - 1])
    )
    return stated_length.to_bytes(8, "little") + header + data[8 + length :]


def _in_gguf(data: bytes, rng: random.Random) -> bytes:
    """Change a count, a length, a type, a number or a name near one of the file's keys, or at its start."""
    keys = [match.span() for match in re.finditer(rb"(?:general|tokenizer|llama|blk|token_embd)\.[\w.]+", data)]
    start, end = rng.choice([(4, 4), *keys])
    if rng.random() < 0.2 and end > start:
        other = rng.choice(keys)
        return data[:start] + data[other[0] : other[1]][: end - start].ljust(end - start, b"\xff") + data[end:]
    at = max(4, start - 8 if rng.random() < 0.2 else end + rng.choice([0, 4, 8, 12, 16, 20, 24]))
    size = rng.choice([4, 8])
    number = rng.choice([0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**48, 2**63, 2**64 - 1])
    return data[:at] + (number % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _in_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(rng.randint(1, 40))
    at, size = rng.randrange(len(data)), rng.choice([1, 1, 2, 8, 64, 4096])
    how = rng.randrange(7)
    if how == 0:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == 1:
        return data[:at]
    if how == 2:
        return data[:at] + rng.randbytes(size) + data[at:]
    if how == 3:
        return data[:at] + data[at + size :]
    if how == 4:
        return data[:at] + bytes(size) + data[at + size :]
    if how == 5:
        return data[:at] + data[at : at + size] * rng.choice([2, 100, 1000]) + data[at + size :]
    return rng.choice([b"", b"\xef\xbb\xbf" + data, data + data, b"\xff\xfe" + data, data.replace(b"0", b"9" * 40, 1)])
