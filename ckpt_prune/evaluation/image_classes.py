"""Accuracy of an image classifier, and its divergence from a reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.formatting import format_share
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import check_finite
from ckpt_prune.evaluation.display import Figures
from ckpt_prune.evaluation.whole_model import auto_class
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.model.descriptions import family_for_config, has_description
from ckpt_prune.show.section import MISSING

BATCH_PIXELS = 32 * 224 * 224
"""A batch has no more pixels than this; one image may still exceed it."""


@dataclass(frozen=True)
class Classification(Figures):
    """How often a model's classes are right.

    Attributes:
        top1: share of images whose class comes first, 0 to 1; None if the images have no classes.
        top5: share whose class is among the first five; None also if the model has fewer than five classes.
    """

    columns = (("top-1", "top1", ".2%"), ("top-5", "top5", ".2%"), ("images", "images", ","))
    hidden = ("classes",)
    top1: float | None
    top5: float | None
    images: int
    classes: int

    def cells(self) -> list[str]:
        """Format the figures; shares of the images have their standard errors."""
        shares = [
            MISSING if share is None else format_share(share, ".2%", self.images) for share in (self.top1, self.top5)
        ]
        return [*shares, f"{self.images:,}"]


@dataclass(frozen=True)
class ClassifierComparison:
    """A classifier and a reference on the same images.

    Attributes:
        agreement: share of the images for which both put the same class first, 0 to 1.
        kl: mean over the images of KL(reference ‖ model) of the class distributions, nats.
    """

    score: Classification
    reference_score: Classification
    agreement: float
    kl: float


def is_vision(config: dict[str, Any]) -> bool:
    """Return whether a config.json is of a model that reads images alone; in doubt it is not."""
    if has_description(config):
        return family_for_config(config).modality == "image"
    architectures = _architectures(config)
    if any("ImageClassification" in name for name in architectures):
        return True
    if any(name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")) for name in architectures):
        return False
    return config.get("model_type") in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def is_classifier(config: dict[str, Any]) -> bool:
    """Return whether a config.json is of an image classifier: by its class, or its model type if it names no class."""
    if has_description(config):
        return auto_class(config) == "AutoModelForImageClassification"
    architectures = _architectures(config)
    return any("ImageClassification" in name for name in architectures) or (not architectures and is_vision(config))


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def class_names(config: dict[str, Any]) -> dict[int, str]:
    """Return the classes that a config.json gives a model, as transformers reads them: index → name."""
    keys = {key: config[key] for key in ("id2label", "num_labels") if config.get(key) is not None}
    try:
        names: dict[int, str] = PreTrainedConfig.from_dict(keys).id2label
        return {int(index): str(name) for index, name in names.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"config.json's id2label and num_labels cannot be read: {error}") from error


def classify(model: PreTrainedModel, samples: ImageSamples) -> Classification:
    """Measure top-1 and top-5 accuracy of any image classifier on images with classes.

    If classes have equal logits, the one of lower index comes first.
    """
    if samples.labels is None:
        raise UserError("the images have no classes to measure accuracy with; give their labels, or a reference model")
    return _measure([model], samples, "classifying")[0][0]


def compare_classifiers(
    model: PreTrainedModel, reference: PreTrainedModel, samples: ImageSamples, *, what: str = "comparing"
) -> ClassifierComparison:
    """Measure both accuracies, KL(reference ‖ model) and agreement in one pass over the images.

    The images need no classes, and the two models may be on different devices.
    """
    scores, agreeing, divergence = _measure([model, reference], samples, what)
    images = len(samples)
    return ClassifierComparison(scores[0], scores[1], agreeing / images, divergence / images)


@torch.inference_mode()
def _measure(
    models: Sequence[PreTrainedModel], samples: ImageSamples, what: str
) -> tuple[list[Classification], int, float]:
    """Return scores, and for two models how many images both put in one class, and the sum of KL."""
    for model in models:
        model.eval()
    ranks: list[list[Tensor]] = [[] for _ in models]
    classes, agreeing, divergence = [0, 0], 0, 0.0
    _, height, width = samples.size
    size = max(1, BATCH_PIXELS // (height * width))
    for start in track(range(0, len(samples), size), what, unit="batch"):
        rows = slice(start, start + size)
        batch = samples.batch(rows)
        logits = [_run(model, batch, name) for model, name in zip(models, ("model", "reference"), strict=False)]
        classes = [each.shape[1] for each in logits]
        if len(set(classes)) > 1:
            raise UserError(
                f"the models have {classes[0]} and {classes[1]} classes: they cannot be compared; "
                "compare a model with the one it was made from"
            )
        if samples.labels is not None:
            for model_ranks, each in zip(ranks, logits, strict=True):
                model_ranks.append(_rank(each, samples.labels[rows]))
        if len(models) == 2:
            ours, theirs = (each.log_softmax(-1) for each in logits)
            agreeing += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
            divergence += functional.kl_div(ours, theirs, reduction="sum", log_target=True).item()
    return [_score(model_ranks, len(samples), classes[0]) for model_ranks in ranks], agreeing, divergence


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the place of each label, (B,), among the classes by their logits, (B, classes)."""
    classes = logits.shape[1]
    strange = labels[(labels < 0) | (labels >= classes)]
    if len(strange):
        raise UserError(
            f"class {int(strange[0])} is none of the model's {classes} classes: the labels are another model's"
        )
    label_logits = logits.gather(1, labels[:, None])
    earlier = torch.arange(classes) < labels[:, None]
    return ((logits > label_logits) | ((logits == label_logits) & earlier)).sum(1)


def _score(ranks: list[Tensor], images: int, classes: int) -> Classification:
    if not ranks:
        return Classification(None, None, images, classes)
    places = torch.cat(ranks)
    top5 = int((places < 5).sum()) / images if classes >= 5 else None
    return Classification(int((places == 0).sum()) / images, top5, images, classes)


def _run(model: PreTrainedModel, batch: dict[str, Tensor], name: str) -> Tensor:
    """Return a classifier's logits (B, classes), float64 on CPU: they are few."""
    inputs = {key: values.to(model.device, model.dtype) for key, values in batch.items()}
    try:
        logits = getattr(model(**inputs), "logits", None)
    except ValueError as error:  # what transformers' vision models raise for images of another size
        shape = " x ".join(str(n) for n in batch["pixel_values"].shape[1:])
        raise UserError(f"the {name} does not take images of {shape}: {one_line(error)}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UserError(f"the {name} gives no class logits: it is no image classifier")
    check_finite(f"{name}'s logits", logits)
    return logits.cpu().double()
