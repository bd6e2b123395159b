"""Encoders with a decoder behind them (T5 and its kin), or such encoders alone, as llama.cpp has them.

Blocks of both stacks have one shape there: as many heads and columns. A stack has names of its own in a file
(`enc.blk.N.`, `dec.blk.N.`), and the decoder no more blocks than the encoder.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.graph_types import GGUF_ROWS, GgufType
from ckpt_prune.gguf.architectures import (
    ARCHITECTURES,
    ENCODER_DECODER,
    SHORT_NAMES,
    TANH_GELU,
    Architecture,
    named_by_gguf,
)
from ckpt_prune.gguf.contents import BLOCK, POOLING_KEY, CannotMapError, Layout, describe_filled
from ckpt_prune.gguf.encoders import CAUSAL_KEY, pooling_of
from ckpt_prune.gguf.gguf_weight import GgufWeight
from ckpt_prune.gguf.keys import MODEL_NEUTRAL, MODEL_WITHOUT_EFFECT, Keys
from ckpt_prune.gguf.reading import GgufFile
from ckpt_prune.model.composites import encoder_decoders, is_encoder_decoder
from ckpt_prune.model.skeleton import is_stored_buffer, parse_config, stock_names
from ckpt_prune.model.ties import apply_ties, ties_on_disk

_EMBEDDING, _HEAD = "shared.weight", "lm_head.weight"
_COPIES = tuple(f"{stack}.embed_tokens.weight" for stack in SHORT_NAMES)
_UNREAD = re.compile(r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")
"""Published files of the first T5 have it, and neither transformers nor llama.cpp reads it."""
_NAME = re.compile(r"(?P<stack>encoder|decoder)\.block\.(?P<block>\d+)\.(?P<module>.+)\.weight")
_IN_FILE = re.compile(r"(?P<stack>enc|dec)\.blk\.(?P<block>0|[1-9][0-9]{0,3})\.(?P<tensor>[a-z_]+)\.weight")
_MODULES = {stack: named_by_gguf(ENCODER_DECODER, stack) for stack in SHORT_NAMES}
_DISTANCE = 128
"""Tokens from which on llama.cpp takes all distances alike."""
_CONTEXT = 512
"""Tokens of a text where config.json does not say it: positions that are distances have no end."""


class _Place(NamedTuple):
    """The axis of a tensor that heads or columns lie on; heads have rows, but for their bias by distance."""

    axis: int
    units: str
    has_rows: bool = False


_PLACES = {
    **{f"{cross}attn_{each}": _Place(0, "heads", True) for cross in ("", "cross_") for each in "qkv"},
    **{f"{cross}attn_o": _Place(1, "heads", True) for cross in ("", "cross_")},
    "attn_rel_b": _Place(1, "heads"),
    **{"ffn_up": _Place(0, "columns"), "ffn_gate": _Place(0, "columns"), "ffn_down": _Place(1, "columns")},
}
_BUCKETS = "attention.relative_buckets_count"
_LAST_NORM = "output_norm"


def is_stacked(model_type: Any) -> bool:
    """Return whether a type is that of an encoder with a decoder behind it, or of such an encoder, in llama.cpp."""
    return any(each.stacked and each.model_type == model_type for each in ARCHITECTURES)


def lay_out_stacks(
    checkpoint: Checkpoint, kind: GgufType | None = None, read: Callable[[str], Tensor] | None = None
) -> Layout:
    """Name everything that the file of a checkpoint holds; arguments are as in `layout.lay_out`.

    Args:
        checkpoint: of the whole, or of an encoder.

    Raises:
        CannotMapError: llama.cpp computes something else; it says what.
    """
    model_type = checkpoint.config.get("model_type")
    named = checkpoint.config.get("architectures") or [encoder_decoders()[str(model_type)]]
    has_decoder = is_encoder_decoder(checkpoint.config)
    if "auto_map" in checkpoint.config:
        raise CannotMapError("it asks for code of its own, and the file would be of transformers' class")
    if not has_decoder and not str(named[0]).endswith("EncoderModel"):
        raise CannotMapError(
            f"{named[0]} answers by a head, and GGUF files of {model_type} are written of an encoder with the decoder "
            "that generates text behind it, or of an encoder for its hidden states"
        )
    (architecture,) = (each for each in ARCHITECTURES if each.model_type == model_type and each.encodes != has_decoder)
    config = parse_config(checkpoint.stored_config)
    _check_config(config)
    checkpoint = apply_ties(checkpoint, ties_on_disk(checkpoint, stock_names(checkpoint.config, named[0])))
    read = read or partial(_read, checkpoint)
    tensors, heads, width, notes = _fill_up(dict(_map_tensors(checkpoint, read)), int(config.d_kv), kind)
    if getattr(config, "scale_decoder_outputs", False) and has_decoder:
        last = f"dec.{_LAST_NORM}.weight"
        tensors[last] = tensors[last].times(int(config.d_model) ** -0.5)
    blocks = [_count_blocks(tensors, short) for short in SHORT_NAMES.values()]
    if blocks[1] > blocks[0]:
        empty = {
            name.removeprefix("enc.blk.0."): weight.shape
            for name, weight in tensors.items()
            if name.startswith("enc.blk.0.") and "attn_rel_b" not in name
        }
        for index in range(blocks[0], blocks[1]):
            for name, shape in empty.items():
                tensors[f"enc.blk.{index}.{name}"] = GgufWeight(shape, partial(torch.zeros, shape), math.prod(shape))
        notes.append(
            f"the encoder gets {blocks[1] - blocks[0]} blocks of zeros, which change nothing: in llama.cpp the decoder "
            "has no more blocks than the encoder"
        )
    values = {
        "block_count": max(blocks),
        "context_length": int(getattr(config, "n_positions", None) or _CONTEXT),
        "embedding_length": int(config.d_model),
        "feed_forward_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.key_length": int(config.d_kv),
        "attention.value_length": int(config.d_kv),
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        _BUCKETS: int(config.relative_attention_num_buckets),
        "vocab_size": tensors["token_embd.weight"].shape[0],
    } | dict(architecture.constants)
    if has_decoder:
        start = getattr(config, "decoder_start_token_id", None)
        start = getattr(config, "pad_token_id", None) if start is None else start
        if not isinstance(start, int):
            raise CannotMapError("config.json does not say how targets begin (decoder_start_token_id)")
        values |= {"decoder_block_count": blocks[1], "decoder_start_token_id": start}
    else:
        number, lines = pooling_of(checkpoint.path)
        values |= {} if number is None else {POOLING_KEY: number}
        notes += lines
    return Layout(architecture, values, tensors, tuple(notes))


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.read([name])[name]


def _check_config(config: Any) -> None:
    """Refuse what its blocks compute otherwise."""
    allowed = TANH_GELU if config.is_gated_act else ("relu",)
    if config.dense_act_fn not in allowed:
        raise CannotMapError(
            f"it computes feed_forward_proj 'relu' or 'gated-gelu', and config.json has {config.feed_forward_proj!r}"
        )
    if config.relative_attention_max_distance != _DISTANCE:
        raise CannotMapError(
            f"it computes relative_attention_max_distance {_DISTANCE}, and config.json has "
            f"{config.relative_attention_max_distance}"
        )


def _map_tensors(checkpoint: Checkpoint, read: Callable[[str], Tensor]) -> Iterator[tuple[str, GgufWeight]]:
    """Yield the tensors of a file, by their names there."""
    for name, info in checkpoint.tensors.items():
        inside = _NAME.fullmatch(name)
        if is_stored_buffer(name) or _UNREAD.fullmatch(name):
            continue
        if name in _COPIES:
            if not checkpoint.equal(name, _EMBEDDING):
                raise CannotMapError(f"both stacks have one embedding, and {name} is another than {_EMBEDDING}")
            continue
        tensor = None
        if inside is not None:
            tensor = _MODULES[inside["stack"]].get(inside["module"])
            tensor = tensor and f"{SHORT_NAMES[inside['stack']]}.blk.{inside['block']}.{tensor}"
        else:
            last = {f"{stack}.final_layer_norm.weight": f"{short}.{_LAST_NORM}" for stack, short in SHORT_NAMES.items()}
            tensor = (last | {_EMBEDDING: "token_embd", _HEAD: "output"}).get(name)
        if tensor is None:
            raise CannotMapError(f"it has no place for {name}")
        yield f"{tensor}.weight", GgufWeight(tuple(info.shape), partial(read, name))


def _fill_up(
    tensors: dict[str, GgufWeight], rows: int, kind: GgufType | None
) -> tuple[dict[str, GgufWeight], int, int, list[str]]:
    """Return the same with as many heads and columns in every block, the number of both, and what to say of it.

    Args:
        rows: of each head.
    """
    sizes: dict[str, set[int]] = {"heads": set(), "columns": set()}
    for name, weight in tensors.items():
        if (place := _PLACES.get(name.split(".")[-2])) is not None:
            sizes[place.units].add(weight.shape[place.axis] // (rows if place.has_rows else 1))
    heads, columns = [max(each) for each in sizes.values()]
    notes = []
    if any(len(each) > 1 for each in sizes.values()):
        notes.append(f"blocks of both stacks have one shape: they are filled up to {heads} heads and {columns} columns")
    if kind in GGUF_ROWS and columns % BLOCK:
        columns = -(-columns // BLOCK) * BLOCK
        notes.append(describe_filled(kind))
    filled = dict(tensors)
    for name, weight in tensors.items():
        if (place := _PLACES.get(name.split(".")[-2])) is not None:
            unit = rows if place.has_rows else 1
            count = heads if place.units == "heads" else columns
            filled[name] = weight.fill(place.axis, (weight.shape[place.axis] // unit, unit), (count, unit))
    return filled, heads, columns, notes


def _count_blocks(tensors: Mapping[str, Any], short: str) -> int:
    return sum(bool(re.fullmatch(rf"{short}\.blk\.\d+\.attn_q\.weight", name)) for name in tensors)


def read_config(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Return config.json of a file: `lay_out_stacks`, undone.

    Raises:
        UserError: the file is damaged, or holds what no class of transformers has.
    """
    keys, tensors = Keys(file.values, file.path, architecture.name), file.tensors
    embedding, blocks = tensors.get("token_embd.weight"), keys.number("block_count")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: there is no token_embd.weight; download it again")
    if keys.flag(CAUSAL_KEY, False):
        raise keys.refuse(CAUSAL_KEY, "and in an encoder all tokens see each other")
    heads, hidden = keys.number("attention.head_count"), keys.number("embedding_length")
    rows = keys.number("attention.key_length", hidden // heads)
    if keys.number("attention.head_count_kv", heads) != heads or keys.number("attention.value_length", rows) != rows:
        raise keys.refuse("attention.head_count_kv", "and each head has keys and values of its own, of as many rows")
    places = [match for name in tensors if (match := _IN_FILE.fullmatch(name))]
    each_block = any(match["tensor"] == "attn_rel_b" and match["block"] != "0" for match in places)
    model_type = "umt5" if each_block else "t5"
    classes = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES if architecture.encodes else encoder_decoders()
    config: dict[str, Any] = {
        "architectures": [classes[model_type]],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "d_kv": rows,
        "d_ff": keys.number("feed_forward_length"),
        "num_layers": blocks,
        "num_heads": heads,
        "n_positions": keys.number("context_length"),
        "relative_attention_num_buckets": keys.number(_BUCKETS),
        "relative_attention_max_distance": _DISTANCE,
        "layer_norm_epsilon": keys.decimal("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if any(match["tensor"] == "ffn_gate" for match in places) else "relu",
    }
    if not architecture.encodes:
        start = keys.number("decoder_start_token_id", 0, least=0)
        config |= {"num_decoder_layers": keys.number("decoder_block_count", blocks), "decoder_start_token_id": start}
        config |= {"is_encoder_decoder": True, "tie_word_embeddings": "output.weight" not in tensors}
    keys.check_others(MODEL_WITHOUT_EFFECT, MODEL_NEUTRAL)
    return config


def read_tensors(file: GgufFile, config: Mapping[str, Any]) -> Iterator[tuple[str, GgufWeight]]:
    """Yield the tensors of a file by their names in a checkpoint with this config.json."""
    gated = config["feed_forward_proj"] != "relu"
    stacks = {short: stack for stack, short in SHORT_NAMES.items()}
    modules = {
        short: {tensor: name for name, tensor in _MODULES[stack].items() if name[-3:] != (".wi" if gated else "i_1")}
        for short, stack in stacks.items()
    }
    outer = {"token_embd": _EMBEDDING, "output": _HEAD}
    outer |= {f"{short}.{_LAST_NORM}": f"{stack}.final_layer_norm.weight" for short, stack in stacks.items()}
    for name, info in file.tensors.items():
        inside = _IN_FILE.fullmatch(name)
        if inside is not None and inside["tensor"] == "cross_attn_rel_b":
            continue  # neither llama.cpp nor transformers reads it
        if inside is None:
            stored = outer.get(name.removesuffix(".weight"))
        elif (module := modules[inside["stack"]].get(inside["tensor"])) is None:
            stored = None
        else:
            stored = f"{stacks[inside['stack']]}.block.{inside['block']}.{module}.weight"
        if stored is None:
            raise UserError(f"{file.path}: transformers' {config['model_type']} has no place for {name}")
        weight = GgufWeight(info.shape, partial(file.read, name))
        # Classes divide what a head that is the embedding reads.
        divided = config.get("tie_word_embeddings") and name == f"dec.{_LAST_NORM}.weight"
        yield stored, weight.times(config["hidden_size"] ** 0.5 if divided else 1)
