"""Steps of `tools/gpu.py` on blocks as large as a 7B and a 70B model's: the mathematics of each stage, on made-up data.

Tokens are correlated, and sizes of their entries differ, as those of an MLP do (`tools/bench_obs.py`). The weight is
standard normal. Inputs are made once for a shape and device, and stay: `gpu_held` counts them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.zero_patterns import GroupPattern
from ckpt_prune.compensation.choice import choose_form
from ckpt_prune.compensation.fit import blend_from_moments, squared_error
from ckpt_prune.compensation.methods import METHODS, absolute_strength
from ckpt_prune.measure.moments.inputs import Moments
from ckpt_prune.scoring.obs import remove_greedily
from ckpt_prune.sparsity import masks, sparsegpt

KEPT, STRENGTH, GRID = 0.8, 0.01, (1e-3, 1e-2, 0.1)
CANDIDATES = ("none", "bias", "rotation", "ridge")
TWO_OF_FOUR = GroupPattern(2, 4)
FOLDS, CHUNK, TOKENS = 2, 2048, 2


@dataclass(frozen=True)
class Layer:
    """An output projection: W (outputs, inputs) float32, moments of its input on two folds, and units kept."""

    weight: Tensor
    folds: tuple[Moments, ...]
    kept: Tensor

    @property
    def moments(self) -> Moments:
        """Moments of all tokens."""
        return self.folds[0] + self.folds[1]


@lru_cache(maxsize=1)
def layer(outputs: int, inputs: int, device: str) -> Layer:
    """The layer of these sizes: twice as many tokens as inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    shared = max(1, inputs // 8)
    sizes, loadings = normal(inputs).exp(), normal(inputs, shared) / shared**0.5
    folds = []
    for _ in range(FOLDS):
        sums = Moments.zeros(inputs, gram=True, device=device)
        for start in range(0, TOKENS * inputs // FOLDS, CHUNK):
            count = min(CHUNK, TOKENS * inputs // FOLDS - start)
            sums = sums.accumulate((normal(count, inputs) + normal(count, shared) @ loadings.T) * sizes)
        folds.append(sums)
    kept = torch.randperm(inputs, generator=generator, device=device)[: round(KEPT * inputs)].sort().values
    return Layer(normal(outputs, inputs), tuple(folds), kept)


def moments(outputs: int, inputs: int, device: str) -> dict[str, Any]:
    """Make the layer, and accumulate the moments of some tokens more."""
    here = layer(outputs, inputs, device)
    tokens = torch.randn(CHUNK, inputs, device=device)
    other = Moments.zeros(inputs, gram=True, device=device)
    seconds = _seconds(lambda: other.accumulate(tokens), device)
    return {"tokens": here.moments.count, "tokens_per_second": CHUNK / seconds}


def obs(outputs: int, inputs: int, device: str, per_unit: int = 1) -> dict[str, Any]:
    """Order all units by optimal brain surgeon."""
    here = layer(outputs, inputs, device)
    removal = remove_greedily(here.weight, here.moments.gram, per_unit)
    return {"rising": bool((removal.costs.diff() >= 0).all()), "damping": removal.strength}


def refit(outputs: int, inputs: int, device: str, method: str) -> dict[str, Any]:
    """Fit a projection to its kept inputs by one method, and say what it makes up for, on its own tokens."""
    here = layer(outputs, inputs, device)
    weight = here.weight[:, here.kept].double()
    fit = blend_from_moments(here.weight, here.moments, here.kept).fit
    solution = METHODS[method].fit(weight, fit, absolute_strength(STRENGTH, "relative", fit))
    energy = fit.second_moments()[2]
    bare = METHODS["none"].fit(weight, fit, 0.0)
    return {"error": squared_error(solution, fit) / energy, "uncompensated": squared_error(bare, fit) / energy}


def choice(outputs: int, inputs: int, device: str) -> dict[str, Any]:
    """Choose a method and its strength on folds."""
    here = layer(outputs, inputs, device)
    folds = [blend_from_moments(here.weight, fold, here.kept) for fold in here.folds]
    result = choose_form(here.weight[:, here.kept].double(), folds, CANDIDATES, GRID)
    return {"chosen": result.best.method, "strength": result.best.strength, "error": result.best.error}


def mask(outputs: int, inputs: int, device: str, method: str) -> dict[str, Any]:
    """Zero two of four weights."""
    here = layer(outputs, inputs, device)
    if method == "wanda":
        keep = masks.keep_groups(masks.wanda(here.weight, here.moments), TWO_OF_FOUR)
    else:
        keep = sparsegpt.prune_weight(here.weight, here.moments.gram, pattern=TWO_OF_FOUR, ratio=0.5).keep
    return {"kept": float(keep.double().mean())}


def semi_structured(outputs: int, inputs: int, tokens: int, repeats: int, device: str = "cuda") -> dict[str, Any]:
    """A 2:4 mask as PyTorch's semi-structured sparse tensor: the product beside the dense one, and the time of both.

    Raises:
        AssertionError: the products differ by more than rounding in float16 may.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, device=device)
    keep = masks.keep_groups(masks.magnitude(weight), TWO_OF_FOUR)
    half = (weight * keep / inputs**0.5).half()
    x = torch.randn(tokens, inputs, generator=generator, device=device).half()
    sparse = torch.sparse.to_sparse_semi_structured(half)
    dense, ours = torch.nn.functional.linear(x, half), torch.nn.functional.linear(x, sparse)
    relative = float((dense.double() - ours.double()).abs().max() / dense.double().abs().max())
    if not relative <= 2e-3:
        raise AssertionError(f"the sparse product differs from the dense one by {relative:.1e}")
    slow, fast = (
        _seconds(lambda: torch.nn.functional.linear(x, matrix), device, repeats)  # noqa: B023
        for matrix in (half, sparse)
    )
    return {"relative": relative, "dense_ms": 1000 * slow, "sparse_ms": 1000 * fast, "speed_up": slow / fast}


def _seconds(action: Callable[[], Any], device: str, repeats: int = 3) -> float:
    """The mean of some runs, after one that loads kernels."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    action()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    wait()
    return (time.perf_counter() - start) / repeats
