"""Files that are almost right: bytes changed at random, values of JSON replaced by what its readers hardly expect."""

import copy
import json
import math
import random
import re
import struct
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
        kind: "json", "safetensors" (whose header is JSON), "gguf", "gguf keys", "yaml", "npy" or "bytes".
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
        elif kind == "gguf keys":
            data = in_gguf_keys(data, rng)
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


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NAMES = (
    *("attention.causal", "attention.clamp_kqv", "attention.scale", "attention.sliding_window", "attention.key_length"),
    *("attention.sliding_window_pattern", "attention.value_length", "attn_logit_softcapping", "expert_count"),
    *("final_logit_softcapping", "logit_scale", "nextn_predict_layers", "residual_scale", "rope.dimension_count"),
    *(
        "rope.dimension_sections",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
    ),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type", "vocab_size", "made_up"),
)
_TOKENIZER_NAMES = (
    *("add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "eom_token_id", "eos_token_id"),
    *("eot_token_id", "mask_token_id", "model", "padding_token_id", "pre", "scores", "suppress_tokens", "token_type"),
    *("tokens", "merges", "unknown_token_id", "made_up"),
)
_TENSOR_NAMES = (
    *("blk.00.attn_q.weight", "blk.\u0660.attn_q.weight", "blk.+0.attn_q.weight", "blk. 0.attn_q.weight"),
    *("blk.9.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_qkv.weight", "output.weight", "rope_freqs.weight"),
    *("token_embd.weight", "blk.-1.attn_q.weight", "blk.1_0.attn_q.weight", "\u202e", "../x.weight"),
)


def in_gguf_keys(data: bytes, rng: random.Random) -> bytes:
    """Give a GGUF file's key another value, or another name, leave it out, double it, or change what a tensor is."""
    try:
        keys, tensors, start = _gguf_parts(data)
    except (IndexError, KeyError, struct.error):
        return _in_bytes(data, rng)
    how, at = rng.random(), rng.randrange(len(keys))
    if how < 0.5:
        name, _ = keys[at]
        keys[at] = (name, gguf_value(rng))
    elif how < 0.7:
        start_of = next((key[0] for key in keys if key[0].endswith(b".block_count")), b"x.").split(b".")[0].decode()
        names = [f"{start_of}.{name}" for name in _NAMES] + [f"tokenizer.ggml.{name}" for name in _TOKENIZER_NAMES]
        names += [
            "tokenizer.chat_template",
            "tokenizer.chat_template.x",
            "tokenizer.chat_template./etc/x",
            "general.name",
        ]
        name = rng.choice(names)
        keys = [key for key in keys if key[0] != name.encode()] + [(name.encode(), gguf_value(rng))]
    elif how < 0.8:
        keys.insert(at, keys[at]) if rng.random() < 0.3 else keys.pop(at)
    else:
        at = rng.randrange(len(tensors))
        tensors[at] = _other_tensor(tensors[at], tensors, rng)
    body = b"".join(_gguf_text(name) + value for name, value in keys)
    body += b"".join(_gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
                     for name, shape, kind, offset in tensors)  # fmt: skip
    head = data[:8] + struct.pack("<QQ", len(tensors), len(keys)) + body
    return head + bytes(-len(head) % 32) + data[start:]


def _other_tensor(tensor: Any, tensors: list[Any], rng: random.Random) -> Any:
    name, shape, kind, offset = tensor
    return rng.choice(
        [
            (rng.choice(_TENSOR_NAMES).encode(), shape, kind, offset),
            (rng.choice(tensors)[0], shape, kind, offset),
            (name, shape[::-1], kind, offset),
            (name, (*shape, 1), kind, offset),
            (name, [rng.choice([0, 1, 2**31, 2**63, each]) for each in shape], kind, offset),
            (name, shape, rng.choice([*range(32), 34, 35, 39, 40, 255, 2**31]), offset),
            (name, shape, kind, rng.choice(tensors)[3]),
        ]
    )


def gguf_value(rng: random.Random) -> bytes:
    """A type and a value: numbers that cannot be, texts, and lists of them."""
    numbers = [0, 1, 2, 3, 5, 7, 11, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    floats = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, math.nan, math.inf, -math.inf]
    texts = [
        "",
        "llama",
        "gpt2",
        "bert",
        "\u0663",
        "yarn",
        "linear",
        "none",
        "\x1b[31m",
        "a\nb",
        "{{ 1/0 }}",
        "x" * 9999,
    ]
    scalars: list[Callable[[], bytes]] = [
        lambda: struct.pack("<IB", 7, rng.choice([0, 1, 2])),
        lambda: struct.pack("<II", 4, rng.choice(numbers)),
        lambda: struct.pack("<Ii", 5, rng.choice([-1, -(2**31), *numbers[:10]])),
        lambda: struct.pack("<If", 6, rng.choice(floats)),
        lambda: struct.pack("<IQ", 10, rng.choice([2**63, 2**64 - 1, *numbers])),
        lambda: struct.pack("<Id", 12, rng.choice([1e300, *floats])),
        lambda: struct.pack("<I", 8) + _gguf_text(rng.choice(texts).encode()),
    ]
    if rng.random() < 0.75:
        return rng.choice(scalars)()
    element, count = rng.choice(scalars), rng.choice([0, 1, 2, 3, 2048])
    values = [element() for _ in range(count)] or [element()]
    return (
        struct.pack("<I", 9) + values[0][:4] + struct.pack("<Q", count) + b"".join(each[4:] for each in values[:count])
    )


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _gguf_parts(data: bytes) -> tuple[list[tuple[bytes, bytes]], list[Any], int]:
    """Return name and bytes of type and value of keys; name, shape, type and place of tensors; where data starts."""
    at = 24

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return values

    def text() -> bytes:
        (length,) = take("Q")
        return take(f"{length}s")[0]

    def skip(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = take("IQ")
            for _ in range(count):
                skip(inner)
        else:
            take(f"{_SIZES[kind]}s")

    tensors, keys = struct.unpack_from("<QQ", data, 8)
    found = []
    for _ in range(keys):
        name, begin = text(), at
        skip(take("I")[0])
        found.append((name, data[begin:at]))
    infos = []
    for _ in range(tensors):
        name, (count,) = text(), take("I")
        infos.append((name, take(f"{count}Q"), *take("IQ")))
    return found, infos, at + -at % 32


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
