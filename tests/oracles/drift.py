"""The drift-correcting target from residual streams as norms see them, on whole float64 models.

See compensation/README.md, section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.measure.samples.samples import Samples

from .masked_model import Model

Array = NDArray[np.float64]
Point = tuple[Literal["in", "out"], str]
"""Input or output of a module of a block; the block itself is ""."""


@dataclass(frozen=True)
class Site:
    """A consumer and where the residual stream can be seen before and after it.

    Attributes:
        consumer: its path within a block of the stock model.
        before: the residual stream that its output is added to.
        after: the sum, before any norm of it.
        scale: the parameter that multiplies its output.
    """

    consumer: str
    before: Point
    after: Point
    scale: str | None = None


def _pre_norm(
    first: str, second: str, heads: str, mlp: str, scales: tuple[str | None, str | None] = (None, None)
) -> dict[str, Site]:
    return {
        "heads": Site(heads, ("in", first), ("in", second), scales[0]),
        "mlp": Site(mlp, ("in", second), ("out", ""), scales[1]),
    }


def _post_norm(first: str, second: str, heads: str, mlp: str) -> dict[str, Site]:
    return {
        "heads": Site(heads, ("in", ""), ("in", first)),
        "mlp": Site(mlp, ("out", first), ("in", second)),
    }


_SCALES = ("layer_scale1.lambda1", "layer_scale2.lambda1")
_OPT = ("self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj", "fc2")
SITES: dict[str, dict[str, Site]] = {
    "llama": _pre_norm("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"),
    "opt": _pre_norm(*_OPT),
    "opt-350m-like": _post_norm(*_OPT),
    "bert": _post_norm("attention.output.LayerNorm", "output.LayerNorm", "attention.output.dense", "output.dense"),
    "vit": _pre_norm("layernorm_before", "layernorm_after", "attention.o_proj", "mlp.fc2"),
    "dinov2": _pre_norm("norm1", "norm2", "attention.o_proj", "mlp.fc2", _SCALES),
    "dinov2-swiglu": _pre_norm("norm1", "norm2", "attention.o_proj", "mlp.down_proj", _SCALES),
}


@torch.no_grad()
def record_points(model: Model, block: int, points: list[Point], data: Samples) -> dict[Point, Array]:
    """Return what passes points of a block as the whole model runs, sample by sample: (samples, tokens, width)."""
    rows: dict[Point, list[Tensor]] = {point: [] for point in points}
    layer: Any = model.model.get_submodule(f"{model.layers}.{block}")
    handles = []
    for point in rows:
        side, path = point

        def enter(_module: nn.Module, args: tuple[Tensor, ...], point: Point = point) -> None:
            rows[point].append(args[0])

        def leave(_module: nn.Module, _args: Any, out: Any, point: Point = point) -> None:
            rows[point].append(out[0] if isinstance(out, tuple) else out)

        module = layer.get_submodule(path)
        handles.append(module.register_forward_pre_hook(enter) if side == "in" else module.register_forward_hook(leave))
    for index in range(len(data)):
        model.model(**data.batch(slice(index, index + 1)))
    for handle in handles:
        handle.remove()
    return {p: torch.stack([row.reshape(-1, row.shape[-1]) for row in samples]).numpy() for p, samples in rows.items()}


@dataclass(frozen=True)
class Tokens:
    """A consumer's tokens, (samples, tokens, width) each.

    Attributes:
        inputs: X, what it reads in the pruned model.
        targets: Y, what W x should be for the residual stream to be the dense one after it; its bias is taken off.
        outputs: X Wᵀ, what it is.
    """

    inputs: Array
    targets: Array
    outputs: Array


def target(dense: Model, pruned: Model, block: int, site: Site, data: Samples) -> Tokens:
    """y* of a consumer that is still whole in the pruned model.

    Elements whose layer scale is zero have no target: they are not a number.
    """
    after = record_points(dense, block, [site.after], data)[site.after]
    point: Point = ("in", site.consumer)
    points = record_points(pruned, block, [site.before, point], data)
    Y = after - points[site.before]
    layer: Any = pruned.model.get_submodule(f"{pruned.layers}.{block}")
    if site.scale is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = layer.get_parameter(site.scale).detach().numpy()
            Y = np.where(scale == 0, np.nan, Y / scale)
    consumer = layer.get_submodule(site.consumer)
    if consumer.bias is not None:
        Y = Y - consumer.bias.detach().numpy()
    X = points[point]
    return Tokens(X, Y, X @ consumer.weight.detach().numpy().T)


def assert_measured(folds: Sequence[Moments], expected: Tokens, rtol: float = 1e-9) -> None:
    """Every fold has the sums of its samples: of x, and of δ = y* − W x. Second moments are kept in float32.

    `rtol` is for blocks that compute in float32 in between.
    """
    edges = [len(expected.inputs) * f // len(folds) for f in range(len(folds) + 1)]
    for moments, start, stop in zip(folds, edges, edges[1:], strict=False):
        X, Y, WX = (
            tokens[start:stop].reshape(-1, tokens.shape[2])
            for tokens in (expected.inputs, expected.targets, expected.outputs)
        )
        D = Y - WX
        assert np.abs(D).max() > 1e-3, "the oracle drifts nowhere: this says nothing"
        assert moments.gram is not None
        assert moments.drift is not None
        assert moments.count == len(X)
        np.testing.assert_allclose(moments.sum, X.sum(0), rtol=rtol, atol=rtol * max(1, np.abs(X).sum(0).max()))
        np.testing.assert_allclose(moments.gram, X.T @ X, rtol=1e-5, atol=1e-5 * np.abs(X.T @ X).max())
        np.testing.assert_allclose(moments.drift.sum, D.sum(0), rtol=rtol, atol=rtol * np.abs(Y).sum(0).max())
        np.testing.assert_allclose(moments.drift.energy, (D**2).sum(), rtol=rtol)
        cross = D.T @ X
        atol = max(1e-5, 10 * rtol) * np.abs(cross).max()
        np.testing.assert_allclose(moments.drift.cross, cross, rtol=1e-5, atol=atol)
