"""Types of a file's matrices: one for all, or a mixture that gives more bits to some, as llama.cpp mixes them."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_ROWS, EmbeddingType, GgufType
from ckpt_prune.gguf.layout import Layout
from ckpt_prune.gguf.mixtures import FALLBACKS, MIXTURES, Place, base_kind

OUTER = ("token_embd.weight", "output.weight")
"""The embedding, and the head if it has weights of its own."""


def type_of(dtype: torch.dtype) -> GgufType:
    """The type that holds a checkpoint's weights as they are."""
    return {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype, "f32")  # type: ignore[return-value]


def default_type(checkpoint: Checkpoint) -> GgufType:
    """The type of a checkpoint's file if none is asked for: that of its weights, q4_0 for those that have 4 bits."""
    packed = any(info.scaled is not None and info.scaled.bits == 4 for info in checkpoint.tensors.values())
    return "q4_0" if packed else type_of(checkpoint.dtype)


def file_type(chosen: GgufType) -> int:
    """Return llama.cpp's number for a file whose matrices mostly have a type."""
    return int(gguf.LlamaFileType["ALL_F32" if chosen == "f32" else f"MOSTLY_{chosen.upper()}"])


def kinds_of(
    layout: Layout, chosen: GgufType, embedding: EmbeddingType | None = None, *, weighted: bool = False
) -> tuple[dict[str, Kind], tuple[str, ...]]:
    """Return the type of every tensor, and lines that say which have another one than was asked for.

    Vectors and norms are float32. Rows that do not divide into blocks get the types that llama.cpp's own tool gives
    them.

    Args:
        layout: of the file.
        chosen: type that the file says it has.
        embedding: of the embedding and the head; None: by `chosen`.
        weighted: the importance of inputs is known.

    Raises:
        UserError: rows of the embedding do not divide into blocks of the type that is asked for, or so few bits want
            the importance of inputs.
    """
    if embedding is not None:
        _check_rows(embedding, int(layout.values["embedding_length"]))
    if MIXTURES[chosen].needs_importance and not weighted:
        raise UserError(
            f"{chosen} has so few bits that llama.cpp wants to know how much each input matters: give --statistics "
            "STATS (ckpt-prune calibrate MODEL --text FILE -o STATS) or --imatrix FILE"
        )
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
        chosen_kind = kind = _choose_kind(layout, name, chosen, weighted=weighted)
        for other in (FALLBACKS.get(chosen_kind, chosen_kind), Kind.F16):
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
    elements, size = gguf.GGML_QUANT_SIZES[base_kind(name)]
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


def _choose_kind(layout: Layout, name: str, chosen: GgufType, *, weighted: bool) -> Kind:
    mixture = MIXTURES[chosen]
    if name == ("output.weight" if "output.weight" in layout.tensors else "token_embd.weight"):
        divides = layout.tensors[name].shape[-1] % gguf.GGML_QUANT_SIZES[mixture.base][0] == 0
        return mixture.head if divides else Kind.Q8_0
    if not name.startswith("blk."):
        return (mixture.embedding if name in OUTER else None) or mixture.base
    _, number, matrix, _ = name.split(".")
    heads, kv_heads = (_first(layout.values[f"attention.head_count{which}"]) for which in ("", "_kv"))
    shared = heads / max(1, kv_heads)
    place = Place(int(number), int(layout.values["block_count"]), shared, weighted)
    kind = mixture.kind_of(matrix, place)
    if matrix == "attn_v" and place.blocks == 80 and shared > 1 and kind in (Kind.Q3_K, Kind.Q4_K):
        return Kind.Q5_K  # models of 70B have small ones
    return kind


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)
