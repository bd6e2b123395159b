"""What frozen features of images tell of classes: neighbours and a linear probe (evaluation/README.md, section 7)."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.calibration.samples import Samples, as_input
from ckpt_prune.common.finite import all_finite
from ckpt_prune.evaluation.batches import check_features, sample_batches

ProbeName = Literal["knn", "linear"]

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""DINO's k and T (Caron et al. 2021, section 4.2)."""
STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 3))
"""Ridge strengths that a linear probe chooses among, relative to the mean eigenvalue."""


@dataclass(frozen=True)
class Probe:
    """How often a probe of a model's features is right.

    Attributes:
        top1: share of the test images, 0 to 1.
        picked: class of each test image.
        features: of an image.
        strength: that a linear probe chose; None of neighbours.
    """

    top1: float
    picked: tuple[int, ...] = field(repr=False)
    features: int
    strength: float | None = None


@torch.inference_mode()
def features_of(model: PreTrainedModel, samples: Samples) -> Tensor:
    """What a model makes of images before any head: the class token of the last hidden states, or their mean without.

    Returns:
        (N, d) float64 on CPU.

    Raises:
        UserError: a feature is not a number.
    """
    base: Any = model.base_model
    base.eval()
    found = []
    for _, batch in sample_batches(samples, "features"):
        states = base(**as_input(batch, model.device, model.dtype)).last_hidden_state.double().cpu()
        found.append(states[:, 0] if _has_class_token(model.config, batch, states.shape[1]) else states.mean(1))
    features = torch.cat(found)
    check_features(finite=all_finite(features))
    return features


def patch_grid(config: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Rows and columns of the patches that every image of a batch is cut into."""
    patch = config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    rows, columns = batch["pixel_values"].shape[-2:]
    return rows // height, columns // width


def _has_class_token(config: Any, batch: dict[str, Tensor], tokens: int) -> bool:
    """Whether there are more tokens than patches: the first is that of the class in every family that has one."""
    rows, columns = patch_grid(config, batch)
    return tokens > rows * columns


def probe(kind: ProbeName, train: Tensor, classes: Tensor, test: Tensor, expected: Tensor) -> Probe:
    """Fit on features of some images, and try on those of others.

    Args:
        kind: which probe.
        train: (N, d) float64.
        classes: of these, (N,) int64 from 0.
        test: (M, d) float64.
        expected: of these, (M,).
    """
    strength = None
    if kind == "knn":
        votes = neighbours(train, classes, test)
    else:
        votes, strength = linear(train, classes, test)
    picked = votes.argmax(1)
    right = float((picked == expected).double().mean())
    return Probe(right, tuple(picked.tolist()), train.shape[1], strength)


def neighbours(
    train: Tensor, classes: Tensor, test: Tensor, *, count: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """Weighted votes of the nearest training images by cosine: exp(similarity / T) each (Wu et al. 2018; DINO).

    Returns:
        Votes of every class, (M, classes).
    """
    similar = functional.normalize(test, dim=1) @ functional.normalize(train, dim=1).T
    nearest = similar.topk(min(count, len(train)), 1)
    # Less the largest, which changes no order and overflows nowhere.
    weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()
    votes = test.new_zeros(len(test), int(classes.max()) + 1)
    return votes.scatter_add_(1, classes[nearest.indices], weights)


def linear(train: Tensor, classes: Tensor, test: Tensor) -> tuple[Tensor, float]:
    """Ridge regression of the classes, one column each, on the features, with a free constant.

    The strength is that of `STRENGTHS` with the least squared error when every image is left out in turn, in closed
    form: residuals over one less their leverage.

    Returns:
        What is predicted, (M, classes), and the strength.
    """
    wanted = functional.one_hot(classes).to(train.dtype)
    mean, middle = train.mean(0), wanted.mean(0)
    left, values, right = torch.linalg.svd(train - mean, full_matrices=False)
    scale = float(values.square().mean()) or 1.0
    targets = left.T @ (wanted - middle)
    best = (float("inf"), 0.0, targets)
    for strength in STRENGTHS:
        shrunk = values.square() / (values.square() + strength * scale)
        residuals = wanted - middle - left @ (shrunk[:, None] * targets)
        leverage = (left.square() @ shrunk) + 1 / len(train)
        error = float((residuals / (1 - leverage).clamp_min(1e-9)[:, None]).square().sum())
        weights = right.T @ ((values / (values.square() + strength * scale))[:, None] * targets)
        if error < best[0]:
            best = (error, strength, weights)
    return middle + (test - mean) @ best[2], best[1]
