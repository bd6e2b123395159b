"""Types of a file's matrices: one for all, or a mixture that gives more bits to some, as llama.cpp mixes them."""

import math
import re
from collections import Counter
from collections.abc import Container, Mapping
from typing import Any, get_args

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_ROWS, GgufType, OtherTypes, TensorType
from ckpt_prune.gguf.contents import Layout
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.mixtures import FALLBACKS, LEAST, MIXTURES, MatrixPlace, Mixture
from ckpt_prune.gguf.reading import GgufFile

OUTER = ("token_embd.weight", "output.weight")
"""The embedding, and the head if it has weights of its own."""
_FLOAT32 = (
    "_norm.",
    ".attn_rel_b.",
    ".ffn_gate_inp",
    ".ssm_conv1d",
    ".shortconv.conv.",
    "position_embd.",
    "token_types.",
)
"""Parts of names of what llama.cpp keeps in float32."""
_SMALL = ("altup_", ".laurel_", "per_layer_model_proj.")
"""Parts of names of matrices that llama.cpp does not round: they are floats, of 16 bits where others have fewer."""
NO_OTHERS = OtherTypes()


def head_of(names: Container[str]) -> str:
    """Return the name of the matrix that makes the logits, which may be the embedding."""
    embedding, head = OUTER
    return head if head in names else embedding


def type_of(dtype: torch.dtype) -> GgufType:
    """The type that holds a checkpoint's weights as they are."""
    return {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype, "f32")  # type: ignore[return-value]


def default_type(checkpoint: Checkpoint) -> GgufType:
    """The type of a checkpoint's file if none is asked for: that of its weights, also of those that have 4 bits."""
    scaled = [info.scaled for info in checkpoint.tensors.values() if info.scaled is not None]
    if any(each.fp4 for each in scaled):
        return "mxfp4"
    return "q4_0" if {each.bits for each in scaled} == {4} else type_of(checkpoint.dtype)


def file_type(chosen: GgufType) -> int:
    """Return llama.cpp's number for a file whose matrices mostly have a type."""
    names = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
    return int(gguf.LlamaFileType[names.get(chosen, f"MOSTLY_{chosen.upper()}")])


def type_of_file(file: GgufFile) -> str:
    """The type of a file: what it says of rounded weights, else the type of most bytes of the matrices in its blocks.

    A mixture whose rows do not divide has mostly other types. It is the one whose limit a proof holds the file to.
    """
    stated = file.values.get("general.file_type")
    kind: str | None = next((each for each in GGUF_ROWS if file_type(each) == stated), None)
    if kind is not None:
        return kind
    sizes: dict[str, int] = {}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) > 1 and "blk." in name:
            sizes[tensor.kind.name.lower()] = sizes.get(tensor.kind.name.lower(), 0) + tensor.bytes
    if not sizes:
        raise UserError(f"{file.path} has no matrices in blocks")
    return max(sizes, key=lambda kind: sizes[kind])


def kinds_of(
    layout: Layout, chosen: GgufType, others: OtherTypes = NO_OTHERS, *, weighted: bool = False
) -> tuple[dict[str, Kind], tuple[str, ...]]:
    """Return the type of every tensor, and lines that say which have another one than was asked for.

    Vectors and norms are float32. Rows that do not divide into blocks get the types that llama.cpp's own tool gives
    them.

    Args:
        layout: of the file.
        chosen: type that the file says it has.
        others: types that are asked for of single matrices.
        weighted: the importance of inputs is known.

    Raises:
        UserError: rows of the embedding do not divide into blocks of the type that is asked for, an expression decides
            nothing, or so few bits want the importance of inputs.
    """
    asked_kinds = _asked_kinds(layout, others)
    if MIXTURES[chosen].needs_importance and not weighted:
        raise _few_bits(chosen)
    if MIXTURES[chosen].experts and not layout.architecture.experts:
        raise UserError(f"{chosen} is a type of experts, and this model has none: take another, such as q4_0")
    kinds: dict[str, Kind] = {}
    changed: Counter[tuple[str, str]] = Counter()
    rows: set[int] = set()
    block = 1
    for name, weight in layout.tensors.items():
        if not is_matrix(name, weight):
            is_small = len(weight.shape) > 1 and any(each in name for each in _SMALL)
            kinds[name] = Kind[{"f32": "F32", "bf16": "BF16"}.get(chosen, "F16")] if is_small else Kind.F32
            continue
        chosen_kind = kind = asked_kinds.get(name) or _choose_kind(layout, name, chosen, weighted=weighted)
        for other in (FALLBACKS.get(chosen_kind, chosen_kind), Kind.F16):
            if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = other
        kinds[name] = kind
        if kind in LEAST and name in asked_kinds and name not in OUTER and not weighted:
            raise _few_bits(f"--tensor-type {kind.name.lower()}")
        if kind != chosen_kind:
            changed[kind.name.lower(), chosen_kind.name.lower()] += 1
            rows.add(weight.shape[-1])
            block = max(block, gguf.GGML_QUANT_SIZES[chosen_kind][0])
    if not changed:
        return kinds, ()
    counts = ", ".join(f"{count} matrices are {now} and not {then}" for (now, then), count in changed.items())
    pruned = rows - {layout.values["embedding_length"]}
    hint = f" (prune with --for llama.cpp:{chosen})" if pruned and chosen in GGUF_ROWS else ""
    sizes = ", ".join(map(str, sorted(rows)[:4])) + (", …" if len(rows) > 4 else "")
    return kinds, (f"rows of {sizes} are no multiple of {block}: {counts}{hint}",)


def is_matrix(name: str, weight: GgufWeight) -> bool:
    """Return whether a tensor of a file may have few bits: no vector, no norm or convolution, and no router."""
    return len(weight.shape) > 1 and name.endswith(".weight") and not any(each in name for each in (*_FLOAT32, *_SMALL))


def _asked_kinds(layout: Layout, others: OtherTypes) -> dict[str, Kind]:
    """Return the types of the matrices that one was asked for: options of the embedding and the head come first."""
    embedding, head = OUTER
    tied = head not in layout.tensors
    if others.output is not None and tied:
        raise UserError(
            f"--output-type {others.output} is of a head with weights of its own, and this one is the embedding: give "
            f"--embedding-type {others.output}"
        )
    kinds: dict[str, Kind] = {}
    for name, option, kind in (
        (head, "--output-type", others.output),
        (embedding, "--embedding-type", others.embedding),
        (head, "--embedding-type", others.embedding),
    ):
        if kind is not None and name in layout.tensors and name not in kinds:
            _check_rows(option, kind, int(layout.tensors[name].shape[-1]))
            kinds[name] = Kind[kind.upper()]
    for pattern, kind in others.matrices.items():
        names = [name for name, weight in layout.tensors.items() if is_matrix(name, weight)]
        matching = [name for name in names if re.search(pattern, name)]
        if not matching:
            near = ", ".join(name for name in names if name.startswith("blk.0."))
            raise UserError(f"--tensor-type {pattern}={kind} matches no matrix of the file: names are {near}, …")
        if not set(matching) - kinds.keys():
            raise UserError(
                f"--tensor-type {pattern}={kind} decides nothing: what it matches follows options before it"
            )
        kinds |= dict.fromkeys([name for name in matching if name not in kinds], Kind[kind.upper()])
    return kinds


def _few_bits(what: str) -> UserError:
    return UserError(
        f"{what} has so few bits that llama.cpp wants to know how much each input matters: give --statistics "
        "STATS (ckpt-prune calibrate MODEL --text FILE -o STATS) or --imatrix FILE"
    )


def _check_rows(option: str, chosen: TensorType, width: int) -> None:
    """Refuse a type whose blocks do not divide rows."""
    block = gguf.GGML_QUANT_SIZES[Kind[chosen.upper()]][0]
    if width % block:
        fitting = [each for each in get_args(TensorType) if not width % gguf.GGML_QUANT_SIZES[Kind[each.upper()]][0]]
        raise UserError(
            f"{option} {chosen} has blocks of {block} columns, and the embedding has {width}: take {', '.join(fitting)}"
        )


def describe_type(chosen: str, kinds: Mapping[str, Kind]) -> str:
    """Return the type of a file in words, with coarser matrices: the limit of `chosen` says nothing of these."""
    mixture = MIXTURES.get(chosen) or Mixture(Kind[chosen.upper()])
    usual = {mixture.base, *(kind for rules in mixture.more.values() for _, kind in rules), mixture.head}
    usual |= {mixture.experts} if mixture.experts else set()
    least = min(map(bits_of, usual | ({mixture.embedding} if mixture.embedding else set())))
    coarser = {name: kind for name, kind in kinds.items() if bits_of(kind) < least}
    if not coarser:
        return chosen
    what = "an embedding" if set(coarser) <= set(OUTER) else "matrices"
    return f"{chosen} with {what} of {min(coarser.values(), key=bits_of).name.lower()}"


def bits_of(kind: Kind) -> float:
    """Return the bits that a weight of a type takes, its share of scales with it."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
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
    mixture = MIXTURES.get(chosen) or Mixture(Kind[chosen.upper()])
    if name == head_of(layout.tensors):
        divides = layout.tensors[name].shape[-1] % gguf.GGML_QUANT_SIZES[mixture.base][0] == 0
        return mixture.head if divides else Kind.Q8_0
    _, inside, place_in = name.removesuffix(".weight").rpartition("blk.")
    if not inside:
        return (mixture.embedding if name.endswith("token_embd.weight") else None) or mixture.base
    number, _, matrix = place_in.partition(".")
    matrix = {"attn_o": "attn_output"}.get(matrix.removeprefix("cross_"), matrix.removeprefix("cross_"))
    heads, kv_heads = (_first(layout.values[f"attention.head_count{which}"]) for which in ("", "_kv"))
    shared = heads / kv_heads if kv_heads else 0  # llama.cpp asks the first block, which may have no attention
    place = MatrixPlace(int(number), int(layout.values["block_count"]), shared, weighted)
    kind = mixture.kind_of(matrix, place)
    if matrix == "attn_v" and place.blocks == 80 and shared > 1 and kind in (Kind.Q3_K, Kind.Q4_K):
        return Kind.Q5_K  # models of 70B have small ones
    return kind


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)
