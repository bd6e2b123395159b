"""The order in which llama.cpp has the heads of gated delta nets, the linear attention of Qwen3-Next and Qwen3.5.

Several heads of values share one of queries and keys. Qwen3-Next stores queries, keys, values and gates of such a
group one behind the other; Qwen3.5 stores all queries, then all keys, then values group by group.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ckpt_prune.gguf.gguf_weight import GgufWeight

_FUSED = "linear_attn.in_proj_qkvz.weight"
_QKV, _GATE = "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"


class DeltaHeads(NamedTuple):
    """Heads of keys and of values of a block, and rows of each."""

    keys: int
    values: int
    rows: int

    @property
    def group(self) -> int:
        """Heads of values that share one of keys."""
        return self.values // self.keys


def order_heads(block: Mapping[str, GgufWeight], heads: DeltaHeads) -> dict[str, GgufWeight]:
    """Return the tensors of a block by Qwen3.5's names, with rows and columns in the order that llama.cpp has.

    There values of the first head of each group come first, then those of the second, if they are not fused with keys.
    """
    ordered = dict(block)
    if (fused := ordered.pop(_FUSED, None)) is not None:
        places = torch.arange(fused.shape[0]).reshape(heads.keys, 2 + 2 * heads.group, heads.rows)
        queries, keys, values, gates = torch.split(places, [1, 1, heads.group, heads.group], 1)
        ordered[_QKV] = fused.take(0, torch.cat([each.flatten() for each in (queries, keys, values)]))
        ordered[_GATE] = fused.take(0, gates.flatten())
        return ordered
    places = torch.arange(heads.values).reshape(heads.keys, heads.group).T.flatten()
    wide = (places[:, None] * heads.rows + torch.arange(heads.rows)).flatten()
    first = 2 * heads.keys * heads.rows
    behind = torch.cat([torch.arange(first), first + wide])
    orders: dict[str, tuple[int, Tensor]] = {
        **dict.fromkeys((_QKV, "linear_attn.conv1d.weight"), (0, behind)),
        **{_GATE: (0, wide), "linear_attn.out_proj.weight": (1, wide)},
        **dict.fromkeys(("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"), (0, places)),
        **dict.fromkeys(("linear_attn.A_log", "linear_attn.dt_bias"), (0, places)),
    }
    return {name: weight.take(*orders[name]) if name in orders else weight for name, weight in ordered.items()}
