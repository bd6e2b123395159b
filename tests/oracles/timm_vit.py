"""A vision transformer as timm computes it, from its files' tensors, in float64."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

EPS = 1e-6


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def features(stored: Mapping[str, Tensor], images: Tensor, heads: int) -> Tensor:
    """Tokens after the last norm, (images, tokens, hidden)."""
    params = {name: tensor.double() for name, tensor in stored.items()}
    kernel = params["patch_embed.proj.weight"]
    hidden, side = kernel.shape[0], kernel.shape[2]
    count, _, height, width = images.shape
    patches = [
        (images[:, :, y : y + side, x : x + side].double().reshape(count, -1) @ kernel.reshape(hidden, -1).T)
        for y in range(0, height, side)
        for x in range(0, width, side)
    ]
    x = torch.stack(patches, 1) + params["patch_embed.proj.bias"]
    first = [params[name].expand(count, 1, hidden) for name in ("cls_token", "dist_token") if name in params]
    if params["pos_embed"].shape[1] == x.shape[1]:
        x = torch.cat([*first, x + params["pos_embed"]], 1)
    else:
        x = torch.cat([*first, x], 1) + params["pos_embed"]
    block = 0
    while f"blocks.{block}.norm1.weight" in params:

        def get(name: str, default: float = 1.0, block: int = block) -> Tensor:
            return params.get(f"blocks.{block}.{name}", torch.tensor(default, dtype=torch.float64))

        h = _norm(x, get("norm1.weight"), get("norm1.bias"))
        qkv = (h @ get("attn.qkv.weight").T + get("attn.qkv.bias", 0.0)).reshape(count, -1, 3, heads, hidden // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(2, 3) / math.sqrt(hidden // heads)).softmax(-1)
        h = (weights @ v).transpose(1, 2).reshape(count, -1, hidden)
        x = x + (h @ get("attn.proj.weight").T + get("attn.proj.bias")) * get("ls1.gamma")
        h = _norm(x, get("norm2.weight"), get("norm2.bias"))
        h = _gelu(h @ get("mlp.fc1.weight").T + get("mlp.fc1.bias"))
        x = x + (h @ get("mlp.fc2.weight").T + get("mlp.fc2.bias")) * get("ls2.gamma")
        block += 1
    return _norm(x, params["norm.weight"], params["norm.bias"])


def logits(stored: Mapping[str, Tensor], images: Tensor, heads: int) -> Tensor:
    """Logits from the class token; with a distillation token, the mean of both heads."""
    tokens = features(stored, images, heads)
    scores = tokens[:, 0] @ stored["head.weight"].double().T + stored["head.bias"]
    if "dist_token" not in stored:
        return scores
    return (scores + tokens[:, 1] @ stored["head_dist.weight"].double().T + stored["head_dist.bias"]) / 2
