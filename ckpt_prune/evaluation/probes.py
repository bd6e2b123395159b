"""How well classes can be told from frozen features: nearest neighbours and a linear probe (README.md, section 6)."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.evaluation.batches import check_finite, iterate_samples
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.measure.samples.samples import Samples, move_batch

ProbeName = Literal["knn", "linear"]

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""DINO's k and T (Caron et al. 2021, section 4.2)."""
STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 3))
"""Ridge strengths that a linear probe chooses among, relative to the mean eigenvalue."""


@dataclass(frozen=True)
class Probe(Figures):
    """How often a probe of a model's features is right.

    Attributes:
        top1: share of the test images, 0 to 1.
        picked: class of each test image.
        strength: that a linear probe chose; None for neighbours.
    """

    columns = (("top-1", "top1", ".2%"), ("strength", "strength", "g"), ("features", "features", ","))
    hidden = ("picked",)
    top1: float
    picked: tuple[int, ...] = field(repr=False)
    features: int
    strength: float | None = None


@torch.inference_mode()
def features_of(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Return the class token of the last hidden states of images, or their mean if there is none: (N, d) float64."""
    base: Any = model.base_model
    base.eval()
    features = []
    for _, batch in iterate_samples(samples, "features"):
        states = base(**move_batch(batch, model.device, model.dtype)).last_hidden_state.double().cpu()
        rows, columns = patch_grid(model.config, batch)
        # If there are more tokens than patches, the first is that of the class in every family.
        features.append(states[:, 0] if states.shape[1] > rows * columns else states.mean(1))
    check_finite("model's features", *features)
    return torch.cat(features)


def patch_grid(config: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return rows and columns of the patches that every image of a batch is cut into."""
    patch = config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    rows, columns = batch["pixel_values"].shape[-2:]
    return rows // height, columns // width


def probe(kind: ProbeName, train: Tensor, classes: Tensor, test: Tensor, expected: Tensor) -> Probe:
    """Fit a probe on features of some images, (N, d) float64, and try it on those of others.

    Classes are int64 from 0, (N,).
    """
    strength = None
    if kind == "knn":
        votes = neighbours(train, classes, test)
    else:
        votes, strength = linear(train, classes, test)
    picked = votes.argmax(1)
    top1 = float((picked == expected).double().mean())
    return Probe(top1, tuple(picked.tolist()), train.shape[1], strength)


def neighbours(
    train: Tensor, classes: Tensor, test: Tensor, *, count: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """Return weighted votes, (M, classes), of the nearest training images by cosine.

    Each weighs exp(similarity / T) (Wu et al. 2018; DINO).
    """
    similar = functional.normalize(test, dim=1) @ functional.normalize(train, dim=1).T
    nearest = similar.topk(min(count, len(train)), 1)
    # Less the largest, which changes no order and overflows nowhere.
    weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()
    votes = test.new_zeros(len(test), int(classes.max()) + 1)
    return votes.scatter_add_(1, classes[nearest.indices], weights)


def linear(train: Tensor, classes: Tensor, test: Tensor) -> tuple[Tensor, float]:
    """Predict classes by ridge regression, one column each, on the features, with a free constant.

    The strength is that of `STRENGTHS` with the least squared error when every image is left out in turn, in closed
    form: residuals over one less their leverage.

    Returns:
        What is predicted, (M, classes), and the strength.
    """
    targets = functional.one_hot(classes).to(train.dtype)
    mean, target_mean = train.mean(0), targets.mean(0)
    centred = targets - target_mean
    left, values, right = torch.linalg.svd(train - mean, full_matrices=False)
    scale = float(values.square().mean()) or 1.0
    projected = left.T @ centred
    least, best_strength, best_weights = float("inf"), 0.0, projected
    for strength in STRENGTHS:
        denominators = values.square() + strength * scale
        shrunk = values.square() / denominators
        residuals = centred - left @ (shrunk[:, None] * projected)
        leverage = (left.square() @ shrunk) + 1 / len(train)
        error = float((residuals / (1 - leverage).clamp_min(1e-9)[:, None]).square().sum())
        if error < least:
            weights = right.T @ ((values / denominators)[:, None] * projected)
            least, best_strength, best_weights = error, strength, weights
    return target_mean + (test - mean) @ best_weights, best_strength
