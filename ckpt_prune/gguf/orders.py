"""Tensors of a checkpoint whose rows or columns stand elsewhere in a file, said once for both directions.

Gates and ups of a fused matrix become two tensors, one half behind the other or in turns. Heads of gated delta nets,
the linear attention of Qwen3-Next and Qwen3.5, have an order of their own: several heads of values share one of queries
and keys. Qwen3-Next stores queries, keys, values and gates of such a group one behind the other; Qwen3.5 stores all
queries, then all keys, then values group by group.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt_prune.gguf.architectures import Architecture
from ckpt_prune.gguf.gguf_weight import GgufWeight

_FUSED = "linear_attn.in_proj_qkvz.weight"
_QKV, _GATE = "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"


class Order(NamedTuple):
    """The places in a file of the rows or columns of one tensor of a block.

    Attributes:
        stored: the tensor in the checkpoint.
        parts: the tensors that they are in a file, by the names that the architecture maps.
        axis: of both; below 0 counted from the last.
        places: units of the axis → the units that each part has, in their order. Each unit is in one of them.
    """

    stored: str
    parts: tuple[str, ...]
    axis: int
    places: Callable[[int], Sequence[Tensor]]


class DeltaHeads(NamedTuple):
    """Heads of keys and of values of a block, and rows of each."""

    keys: int
    values: int
    rows: int

    @property
    def group(self) -> int:
        """Heads of values that share one of keys."""
        return self.values // self.keys


def as_in_file(block: Mapping[str, GgufWeight], orders: Iterable[Order]) -> dict[str, GgufWeight]:
    """Return the tensors of a block as they stand in a file."""
    changed = dict(block)
    for order in orders:
        if (weight := changed.get(order.stored)) is not None:
            axis = order.axis % len(weight.shape)
            places = order.places(weight.shape[axis])
            if order.stored not in order.parts:
                del changed[order.stored]
            changed |= {part: weight.take(axis, own) for part, own in zip(order.parts, places, strict=True)}
    return changed


def as_in_checkpoint(block: Mapping[str, GgufWeight], orders: Iterable[Order]) -> dict[str, GgufWeight]:
    """Return the tensors of a file's block as they stand in a checkpoint: what `as_in_file` does, undone.

    Raises:
        ValueError: the parts of a tensor do not fit together; it says the name of the first.
    """
    changed = dict(block)
    for order in orders:
        if any(part not in changed for part in order.parts):
            continue
        parts = [changed.pop(part) for part in order.parts]
        axis = order.axis % len(parts[0].shape)
        others = {(*part.shape[:axis], 0, *part.shape[axis + 1 :]) for part in parts}
        places = order.places(sum(part.shape[axis] for part in parts)) if len(others) == 1 else []
        if [len(each) for each in places] != [part.shape[axis] for part in parts]:
            raise ValueError(order.parts[0])
        changed[order.stored] = GgufWeight.join(parts, axis).take(axis, torch.cat([*places]).argsort())
    return changed


_LATENT, _OF_KEYS, _OF_VALUES = (f"self_attn.{name}_proj.weight" for name in ("kv_b", "k_b", "v_b"))


def split_latent(block: Mapping[str, GgufWeight], heads: int, rows: int) -> dict[str, GgufWeight]:
    """Return the tensors of a block with what makes keys and values of a latent vector as two of three axes.

    llama.cpp multiplies queries by what makes keys, so that it is transposed.

    Args:
        rows: of the values of a head.
    """
    split = dict(block)
    if (fused := split.pop(_LATENT, None)) is not None:
        rank = fused.shape[1]
        of_keys = fused.shape[0] // heads - rows
        by_head = fused.apply(lambda tensor: tensor.reshape(heads, -1, rank), (heads, of_keys + rows, rank))
        split[_OF_KEYS] = by_head.take(1, torch.arange(of_keys)).transpose()
        split[_OF_VALUES] = by_head.take(1, torch.arange(of_keys, of_keys + rows))
    return split


def join_latent(block: Mapping[str, GgufWeight]) -> dict[str, GgufWeight]:
    """Return the tensors of a file's block as they stand in a checkpoint: what `split_latent` does, undone.

    Raises:
        ValueError: the two tensors do not fit together; it says the name of the first.
    """
    joined = dict(block)
    of_keys, of_values = joined.pop(_OF_KEYS, None), joined.pop(_OF_VALUES, None)
    if of_keys is not None and of_values is not None:
        shapes = of_keys.shape, of_values.shape
        if {len(shape) for shape in shapes} != {3} or (shapes[0][0], shapes[0][1]) != (shapes[1][0], shapes[1][2]):
            raise ValueError(_OF_KEYS)
        fused = GgufWeight.join([of_keys.transpose(), of_values], 1)
        shape = fused.shape[0] * fused.shape[1], fused.shape[2]
        joined[_LATENT] = fused.apply(lambda tensor: tensor.reshape(shape), shape)
    return joined


def rows_of_fused(heads: int, kv_heads: int, rows: int, *, grouped: bool) -> Sequence[Tensor]:
    """Return the rows of queries, of keys and of values in the module that makes them at once.

    Args:
        heads: of queries, a multiple of `kv_heads`.
        kv_heads: of keys and values.
        rows: of each head.
        grouped: each head of keys and that of values stand behind the queries that share them.
    """
    units = torch.arange((heads + 2 * kv_heads) * rows)
    if not grouped:
        return torch.split(units, [heads * rows, kv_heads * rows, kv_heads * rows])
    by_group = torch.split(units.reshape(kv_heads, -1, rows), [heads // kv_heads, 1, 1], 1)
    return [part.flatten() for part in by_group]


def order_of_halves(architecture: Architecture) -> list[Order]:
    """Return the order of tensors that hold rows of gate and of up."""

    def places(rows: int) -> Sequence[Tensor]:
        units = torch.arange(rows)
        return (units[::2], units[1::2]) if architecture.alternating else units.chunk(2)

    return [
        Order(name, parts, -2 if name.endswith(".weight") else -1, places)
        for name, parts in architecture.halves.items()
    ]


def order_of_heads(architecture: Architecture, heads: DeltaHeads) -> list[Order]:
    """Return the order of the heads of linear attention.

    In files of Qwen3.5 values of the first head of each group come first, then those of the second.
    """
    if _FUSED.removesuffix(".weight") in architecture.block:
        units = torch.arange(heads.keys * (2 + 2 * heads.group) * heads.rows).reshape(heads.keys, -1, heads.rows)
        queries, keys, values, gates = torch.split(units, [1, 1, heads.group, heads.group], 1)
        fused = torch.cat([each.flatten() for each in (queries, keys, values)]), gates.flatten()
        return [Order(_FUSED, (_QKV, _GATE), 0, lambda _: fused)]
    places = torch.arange(heads.values).reshape(heads.keys, heads.group).T.flatten()
    wide = (places[:, None] * heads.rows + torch.arange(heads.rows)).flatten()
    first = 2 * heads.keys * heads.rows
    behind = torch.cat([torch.arange(first), first + wide])
    orders = {
        **dict.fromkeys((_QKV, "linear_attn.conv1d.weight"), (0, behind)),
        **{_GATE: (0, wide), "linear_attn.out_proj.weight": (1, wide)},
        **dict.fromkeys(("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"), (0, places)),
        **dict.fromkeys(("linear_attn.A_log", "linear_attn.dt_bias"), (0, places)),
    }
    return [Order(name, (name,), axis, partial(_always, own)) for name, (axis, own) in orders.items()]


def _always(places: Tensor, _: int) -> Sequence[Tensor]:
    return (places,)
