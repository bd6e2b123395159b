"""Types of a file's matrices: one for all, or a mixture that gives more bits to some, as llama.cpp mixes them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, get_args

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_ROWS, EmbeddingType, GgufType, MixedGgufType
from ckpt_prune.gguf.layout import Layout

FILE_TYPES: Mapping[GgufType, int] = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32},
    **{name: 10 + place for place, name in enumerate(get_args(MixedGgufType))},
}
"""llama.cpp's numbers for a file whose matrices mostly have a type."""

OUTER = ("token_embd.weight", "output.weight")
"""The embedding, and the head if it has weights of its own."""
_Rule = tuple[Callable[[int, int], bool], Kind]
"""Whether a block, by its index and the number of all, has the type."""


def _any(_index: int, _blocks: int) -> bool:
    return True


def _some(index: int, blocks: int) -> bool:
    """The first and the last eighth, and every third between."""
    return index < blocks // 8 or index >= 7 * blocks // 8 or (index - blocks // 8) % 3 == 2


_MORE: Mapping[str, Mapping[str, tuple[_Rule, ...]]] = {
    "q2_k": dict.fromkeys(("attn_v", "ffn_down", "attn_output"), ((_any, Kind.Q3_K),)),
    "q3_k_m": {
        "attn_v": ((lambda index, _: index < 2, Kind.Q5_K), (_any, Kind.Q4_K)),
        "ffn_down": ((lambda index, blocks: index < blocks // 16, Kind.Q5_K), (_any, Kind.Q4_K)),
        "attn_output": ((_any, Kind.Q4_K),),
    },
    "q3_k_l": dict.fromkeys(("attn_v", "ffn_down", "attn_output"), ((_any, Kind.Q5_K),)),
    "q4_k_s": {
        "attn_v": ((lambda index, _: index < 4, Kind.Q5_K),),
        "ffn_down": ((lambda index, blocks: index < blocks // 8, Kind.Q5_K),),
    },
    "q4_k_m": dict.fromkeys(("attn_v", "ffn_down"), ((_some, Kind.Q6_K),)),
    "q5_k_m": dict.fromkeys(("attn_v", "ffn_down"), ((_some, Kind.Q6_K),)),
}
"""Mixture → matrices with more bits than its name says. The first rule that holds counts."""
_ELSE = {Kind.Q2_K: Kind.Q4_0, Kind.Q3_K: Kind.Q4_0, Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
"""Types for rows that are no multiple of 256."""


def type_of(dtype: torch.dtype) -> GgufType:
    """The type that holds a checkpoint's weights as they are."""
    return {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype, "f32")  # type: ignore[return-value]


def default_type(checkpoint: Checkpoint) -> GgufType:
    """The type of a checkpoint's file if none is asked for: that of its weights, q4_0 for those that have 4 bits."""
    packed = any(info.scaled is not None and info.scaled.bits == 4 for info in checkpoint.tensors.values())
    return "q4_0" if packed else type_of(checkpoint.dtype)


def kinds_of(
    layout: Layout, chosen: GgufType, embedding: EmbeddingType | None = None
) -> tuple[dict[str, Kind], tuple[str, ...]]:
    """Return the type of every tensor, and lines that say which have another one than was asked for.

    Vectors and norms are float32. With 4 bits the embedding and the head have 8, unless a type is given for them. Rows
    that do not divide into blocks get the types that llama.cpp's own tool gives them.

    Raises:
        UserError: rows of the embedding do not divide into blocks of the type that is asked for.
    """
    if embedding is not None:
        _check_rows(embedding, int(layout.values["embedding_length"]))
    kinds: dict[str, Kind] = {}
    changed: Counter[tuple[str, str]] = Counter()
    rows: set[int] = set()
    for name, weight in layout.tensors.items():
        if len(weight.shape) == 1 or "_norm." in name:
            kinds[name] = Kind.F32
            continue
        if embedding is not None and name in OUTER:
            kinds[name] = Kind[embedding.upper()]
            continue
        chosen_kind = kind = _choose_kind(layout, name, chosen)
        for other in (_ELSE.get(chosen_kind, chosen_kind), Kind.F16):
            if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = other
        kinds[name] = kind
        if kind != chosen_kind:
            changed[kind.name.lower(), chosen_kind.name.lower()] += 1
            rows.add(weight.shape[-1])
    if not changed:
        return kinds, ()
    counts = ", ".join(f"{count} matrices are {now} and not {then}" for (now, then), count in changed.items())
    pruned = rows - {layout.values["embedding_length"]}
    hint = f" (prune with --for llama.cpp:{chosen})" if pruned else ""
    sizes = ", ".join(map(str, sorted(rows)[:4])) + (", …" if len(rows) > 4 else "")
    return kinds, (f"rows of {sizes} are no multiple of {GGUF_ROWS[chosen]}: {counts}{hint}",)


def _check_rows(embedding: EmbeddingType, width: int) -> None:
    """Refuse a type whose blocks do not divide rows."""
    block = gguf.GGML_QUANT_SIZES[Kind[embedding.upper()]][0]
    if width % block:
        fitting = [each for each in get_args(EmbeddingType) if not width % gguf.GGML_QUANT_SIZES[Kind[each.upper()]][0]]
        raise UserError(
            f"--embedding-type {embedding} has blocks of {block} columns, and the embedding has {width}: take "
            f"{', '.join(fitting)}"
        )


def describe_type(chosen: str, embedding: str | None) -> str:
    """Return the type of a file in words, with a coarser embedding: the limit of `chosen` says nothing of that."""
    if embedding is None or _bits(embedding) >= _bits(chosen):
        return chosen
    return f"{chosen} with an embedding of {embedding}"


def _bits(name: str) -> float:
    """Return the bits of a weight; of a mixture, what most of its weights have."""
    elements, size = gguf.GGML_QUANT_SIZES[Kind[name.upper().removesuffix("_S").removesuffix("_M").removesuffix("_L")]]
    return 8 * size / elements


def tensor_bytes(layout: Layout, kinds: Mapping[str, Kind]) -> dict[str, int]:
    blocks = {name: gguf.GGML_QUANT_SIZES[kind] for name, kind in kinds.items()}
    return {
        name: math.prod(weight.shape) // blocks[name][0] * blocks[name][1] for name, weight in layout.tensors.items()
    }


def zero_bytes(layout: Layout, kinds: Mapping[str, Kind]) -> int:
    """Return the bytes of what tensors were filled up with."""
    sizes = tensor_bytes(layout, kinds)
    return sum(sizes[name] * weight.zeros // math.prod(weight.shape) for name, weight in layout.tensors.items())


def _choose_kind(layout: Layout, name: str, chosen: GgufType) -> Kind:
    is_head = name == ("output.weight" if "output.weight" in layout.tensors else "token_embd.weight")
    if chosen not in get_args(MixedGgufType):
        return Kind.Q8_0 if name in OUTER and chosen.startswith("q") else Kind[chosen.upper()]
    base = Kind[chosen[:4].upper()]
    if is_head:
        return Kind.Q6_K
    if not name.startswith("blk."):
        return base
    _, number, tensor, _ = name.split(".")
    tensor = "attn_v" if tensor == "attn_qkv" else tensor
    index, blocks = int(number), int(layout.values["block_count"])
    rules = _MORE.get(chosen, {}).get(tensor, ())
    kind = next((kind for holds, kind in rules if holds(index, blocks)), base)
    if tensor == "attn_v":
        shared = _first(layout.values["attention.head_count"]) / _first(layout.values["attention.head_count_kv"])
        if chosen == "q2_k" and shared >= 4:
            kind = Kind.Q4_K
        if blocks == 80 and shared > 1 and kind in (Kind.Q3_K, Kind.Q4_K):  # models of 70B have small ones
            kind = Kind.Q5_K
    return kind


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)
