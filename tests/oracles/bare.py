"""DC-ViT from its description: how many blocks lose their attention, what their MLPs keep, and the plain training."""

import copy
import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn


def replaced_blocks(saved: Fraction, attention: Fraction, mlp: Fraction) -> tuple[int, Fraction]:
    """Blocks that lose their attention, n = ⌈Δ / (attention + MLP)⌉, and the share that each keeps of its MLP."""
    n = math.ceil(saved / (attention + mlp))
    return n, min(Fraction(1), 1 - (saved - n * attention) / (n * mlp))


class Nothing(nn.Module):
    """In the place of an attention."""

    def forward(self, states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return states * 0, None


def without(model: Any, block: int, columns: list[int]) -> Any:
    """A stock ViT of which one block has no attention and some columns of its MLP."""
    model = copy.deepcopy(model)
    layer = model.vit.layers[block]
    layer.attention, layer.layernorm_before = Nothing(), nn.Identity()
    fc1, fc2 = layer.mlp.fc1, layer.mlp.fc2
    fc1.weight, fc1.bias = nn.Parameter(fc1.weight[columns].detach()), nn.Parameter(fc1.bias[columns].detach())
    fc2.weight = nn.Parameter(fc2.weight[:, columns].detach())
    return model


def features(model: Any, images: Tensor) -> Tensor:
    """What the head of a stock ViT reads: the first token behind the last norm."""
    return model.vit(pixel_values=images).last_hidden_state[:, 0]


def train(model: Any, blocks: int, images: Tensor, targets: Tensor, *, lr: float, decay: float, steps: int) -> None:
    """AdamW on the mean squared error of the features, all images in every step, along a cosine."""
    parameters = [each for block in range(blocks) for each in model.vit.layers[block].parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=decay)
    for step in range(steps):
        optimizer.zero_grad()
        ((features(model, images) - targets) ** 2).mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.step()
