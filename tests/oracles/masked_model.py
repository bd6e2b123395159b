"""Masks put on a whole model from their definitions: inputs by hooks, weights set in place (sparsity/README.md)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ckpt_prune.measure.samples.samples import Samples
from tests.encoders import watch

from . import masks

Rule = Callable[[Tensor, Tensor], Tensor]
"""W (d_out, d_in) and the tokens X (N, d_in) it reads, both float64 → W with its zeros."""
Target = Literal["dense", "by block", "by input"]


@dataclass(frozen=True)
class Linear:
    """A linear of a block.

    Attributes:
        disk: its path on disk.
        modules: its paths in the stock model, both within the block; several where they stand one below the other in
            one tensor on disk.
    """

    disk: str
    modules: tuple[str, ...]


def _same(*paths: str) -> tuple[Linear, ...]:
    return tuple(Linear(path, (path,)) for path in paths)


_LLAMA = (
    _same("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    _same("self_attn.o_proj"),
    _same("mlp.gate_proj", "mlp.up_proj"),
    _same("mlp.down_proj"),
)
_OPT = (
    _same("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    _same("self_attn.out_proj"),
    _same("fc1"),
    _same("fc2"),
)
_BERT = (
    _same("attention.self.query", "attention.self.key", "attention.self.value"),
    _same("attention.output.dense"),
    _same("intermediate.dense"),
    _same("output.dense"),
)
_IMAGE = (
    tuple(
        Linear(f"attention.attention.{disk}", (f"attention.{module}_proj",))
        for disk, module in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    (Linear("attention.output.dense", ("attention.o_proj",)),),
)
_VIT = (*_IMAGE, (Linear("intermediate.dense", ("mlp.fc1",)),), (Linear("output.dense", ("mlp.fc2",)),))
_DINOV2 = (*_IMAGE, _same("mlp.fc1"), _same("mlp.fc2"))
_SWIGLU = (
    *_IMAGE,
    (Linear("mlp.weights_in", ("mlp.gate_proj", "mlp.up_proj")),),
    (Linear("mlp.weights_out", ("mlp.down_proj",)),),
)
INPUTS: dict[str, tuple[tuple[Linear, ...], ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "seed_oss"), _LLAMA),
    "opt": _OPT,
    "bert": _BERT,
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": _DINOV2,
    "dinov2 swiglu": _SWIGLU,
}
"""Linears that read the same input, in the order of computation."""


@dataclass(frozen=True)
class Model:
    """A stock model, and where its blocks are.

    Attributes:
        model: edited in place.
        inputs: one of `INPUTS`. Blocks may lack some of them.
        layers: path of the list of blocks.
        prefix: of a block's tensors on disk, with `{}` for its index.
    """

    model: nn.Module
    inputs: tuple[tuple[Linear, ...], ...]
    layers: str
    prefix: str

    @property
    def blocks(self) -> range:
        return range(len(self.model.get_submodule(self.layers)))  # type: ignore[arg-type]

    def _linears(self, block: int, linear: Linear) -> list[Any]:
        return [self.model.get_submodule(f"{self.layers}.{block}.{path}") for path in linear.modules]

    def _inputs(self, block: int) -> list[int]:
        """Return which of `inputs` a block has."""
        paths = {path for path, _ in self.model.get_submodule(f"{self.layers}.{block}").named_modules()}
        return [at for at, linears in enumerate(self.inputs) if linears[0].modules[0] in paths]

    def weights(self) -> dict[str, Tensor]:
        """Every linear of every block, by its name on disk."""
        return {
            f"{self.prefix.format(block)}{linear.disk}.weight": torch.cat(
                [module.weight.detach() for module in self._linears(block, linear)]
            )
            for block in self.blocks
            for at in self._inputs(block)
            for linear in self.inputs[at]
        }

    def tokens(self, data: Samples, sites: list[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        """Return what the linears of (block, index in `inputs`) read: (tokens, width) float64."""
        paths = {(block, at): f"{self.layers}.{block}.{self.inputs[at][0].modules[0]}" for block, at in sites}
        seen = watch(self.model, data, inputs=paths.values())
        return {site: torch.from_numpy(seen[path]).flatten(0, 1) for site, path in paths.items()}

    @torch.no_grad()
    def mask(self, data: Samples, rule: Rule, target: Target) -> dict[str, Tensor]:
        """Mask every linear of every block.

        Args:
            data: what inputs are measured on.
            rule: of one weight.
            target: inputs are those of the dense model; or of the model whose earlier blocks are masked; or of the
                model with everything masked that is computed before.

        Returns:
            As `weights`.
        """
        sites = [(block, at) for block in self.blocks for at in self._inputs(block)]
        stages = {
            "dense": [sites],
            "by block": [[site for site in sites if site[0] == block] for block in self.blocks],
            "by input": [[site] for site in sites],
        }
        for stage in stages[target]:
            tokens = self.tokens(data, stage)
            for block, at in stage:
                for linear in self.inputs[at]:
                    modules = self._linears(block, linear)
                    W = torch.cat([module.weight for module in modules]).double()
                    parts = rule(W, tokens[block, at]).split([len(module.weight) for module in modules])
                    for module, part in zip(modules, parts, strict=True):
                        module.weight.copy_(part)
        return self.weights()


# ---- rules -------------------------------------------------------------------------------------------------------


def magnitude(W: Tensor, X: Tensor) -> Tensor:
    """Half of the matrix."""
    return W * masks.drop_in_matrix(masks.magnitude(W), W.numel() // 2)


def magnitude_in_rows(W: Tensor, X: Tensor) -> Tensor:
    return W * masks.drop_in_rows(masks.magnitude(W), W.shape[1] // 2)


def magnitude_in_fours(W: Tensor, X: Tensor) -> Tensor:
    return W * masks.drop_in_groups(masks.magnitude(W), 2, 4)


def _wanda(W: Tensor, X: Tensor) -> Tensor:
    """The same scores as `masks.wanda`, which takes a norm for every weight."""
    return masks.magnitude(W) * X.square().sum(0).sqrt()


def wanda(W: Tensor, X: Tensor) -> Tensor:
    """Half of every row."""
    return W * masks.drop_in_rows(_wanda(W, X), W.shape[1] // 2)


def wanda_in_matrix(W: Tensor, X: Tensor) -> Tensor:
    return W * masks.drop_in_matrix(_wanda(W, X), W.numel() // 2)


def wanda_in_fours(W: Tensor, X: Tensor) -> Tensor:
    return W * masks.drop_in_groups(_wanda(W, X), 2, 4)


def sparsegpt(W: Tensor, X: Tensor) -> Tensor:
    """Half of every eight columns."""
    return _surgeon(W, X, 0.01, 8, lambda scores: masks.drop_in_matrix(scores, scores.numel() // 2))


def sparsegpt_in_fours(W: Tensor, X: Tensor) -> Tensor:
    """Damped by 1.5 times the half of a row that stays over tokens."""
    damp = min(max(0.001, 1.5 * W.shape[1] / 2 / len(X)), 1.0)
    return _surgeon(W, X, damp, 4, lambda scores: masks.drop_in_groups(scores, 2, 4))


def _surgeon(W: Tensor, X: Tensor, damp: float, step: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """`masks.sparsegpt` with all rows at once, the Hessian damped by a share of its mean diagonal over live inputs."""
    W, H = W.clone(), X.T @ X
    dead = H.diagonal() == 0
    W[:, dead] = 0
    H = H + torch.diag(torch.where(dead, 1.0, damp * H.diagonal()[~dead].mean()))
    width = W.shape[1]
    inverses = [torch.linalg.inv(H[q:, q:]) for q in range(width)]
    for start in range(0, width, step):
        columns = range(start, min(start + step, width))
        keep = choose(torch.stack([W[:, q] ** 2 / inverses[q][0, 0] for q in columns], 1))
        for q in columns:
            gone = ~keep[:, q - start]
            W[gone, q:] -= torch.outer(W[gone, q] / inverses[q][0, 0], inverses[q][0])
            W[gone, q] = 0.0
    return W
