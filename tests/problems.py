"""Small blocks to rotate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ckpt_prune.recipe.names import Backbone
from ckpt_prune.stages.rotation.importance import Side, Term, sensitivity

BACKBONES: tuple[Backbone, ...] = ("magnitude", "wanda", "sparsegpt")
DAMP = 0.01


@dataclass(frozen=True)
class Block:
    """An attention and MLP block whose heads are not hidden / heads wide: 4 query heads, 2 KV heads of 3 on 10."""

    weights: dict[str, tuple[Tensor, Tensor, Side | None, Side | None]]
    """W, H, left, right."""
    hidden: int = 10
    kv: int = 2
    head_dim: int = 3

    def terms(self, backbone: Backbone) -> list[Term]:
        return [
            Term(name, W, sensitivity(H, backbone, right_side is not None, DAMP), left_side, right_side)
            for name, (W, H, left_side, right_side) in self.weights.items()
        ]


def orthogonal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, generator=g, dtype=torch.float64))[0]


def make_block(seed: int = 0, hidden: int = 10, kv: int = 2, group: int = 2, head_dim: int = 3, mlp: int = 14) -> Block:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def gram(width: int) -> Tensor:
        x = normal(3 * width, width) * torch.linspace(0.2, 3, width, dtype=torch.float64) + normal(width)
        return x.T @ x

    wide = kv * group * head_dim
    stream, attended = gram(hidden), gram(wide)
    return Block(
        {
            "q": (normal(wide, hidden), stream, None, "residual"),
            "v": (normal(kv * head_dim, hidden), stream, "heads", "residual"),
            "o": (normal(hidden, wide), attended, "residual", "heads"),
            "up": (normal(mlp, hidden), gram(hidden), None, "residual"),
            "down": (normal(hidden, mlp), gram(mlp), "residual", None),
        },
        hidden,
        kv,
        head_dim,
    )
