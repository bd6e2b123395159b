"""Accuracy of an image classifier, and its divergence from a reference (both in one pass over the images)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from ckpt_prune.architectures.descriptions import described, is_known
from ckpt_prune.calibration.images import ImageSamples
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.whole_model import auto_class

BATCH_PIXELS = 32 * 224 * 224
"""A default batch has no more pixels than this; one image may still exceed it."""


@dataclass(frozen=True)
class Classification:
    """How often a model's classes are right."""

    top1: float | None
    """Share of images whose class comes first, 0 to 1; None where the images have no classes."""
    top5: float | None
    """Share whose class is among the first five; None also where the model has fewer than five classes."""
    images: int
    """Images classified."""
    classes: int
    """Classes the model tells apart."""


@dataclass(frozen=True)
class ClassifierComparison:
    """A classifier beside a reference on the same images."""

    score: Classification
    reference_score: Classification
    agreement: float
    """Share of the images where both put the same class first, 0 to 1."""
    kl: float
    """Mean over the images of KL(reference ‖ model) of the class distributions, nats."""


def is_vision(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a model that reads images alone: by its family, or by transformers; in doubt not."""
    if is_known(config):
        return described(config).modality == "image"
    architectures = _architectures(config)
    if any("ImageClassification" in name for name in architectures):
        return True
    if any(name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel")) for name in architectures):
        return False
    return config.get("model_type") in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES


def is_classifier(config: dict[str, Any]) -> bool:
    """Whether a config.json is of an image classifier: by the class it names, or its model type where it names none."""
    if is_known(config):
        return auto_class(config) == "AutoModelForImageClassification"
    architectures = _architectures(config)
    return any("ImageClassification" in name for name in architectures) or (not architectures and is_vision(config))


def class_names(config: dict[str, Any]) -> dict[int, str]:
    """The classes a config.json gives a model, as transformers reads them: index → name.

    Raises:
        UserError: `id2label` or `num_labels` are not what they should be.
    """
    given = {key: config[key] for key in ("id2label", "num_labels") if config.get(key) is not None}
    try:
        found: dict[int, str] = PreTrainedConfig.from_dict(given).id2label
        return {int(index): str(name) for index, name in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"config.json's id2label and num_labels cannot be read: {error}") from error


@torch.inference_mode()
def classify(
    model: PreTrainedModel, samples: ImageSamples, *, batch_size: int | None = None, what: str = "classifying"
) -> Classification:
    """Measure top-1 and top-5 accuracy.

    The model is put in evaluation mode. Where classes have equal logits, the one of lower index comes first.

    Args:
        model: Any image classifier.
        samples: Images with their classes.
        batch_size: Images in one forward pass; None takes as many as fit `BATCH_PIXELS`.
        what: Said on the progress bar.

    Raises:
        UserError: The images have no classes or ones the model has not, do not fit the model, or a logit is not finite.
    """
    if samples.labels is None:
        raise UserError("the images have no classes to measure accuracy with; give their labels, or a reference model")
    model.eval()
    tally = _Tally()
    for rows, batch in _batches(samples, batch_size, what):
        tally.add(_logits(model, batch, "model"), samples.labels[rows])
    return tally.result()


@torch.inference_mode()
def compare_classifiers(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    samples: ImageSamples,
    *,
    batch_size: int | None = None,
    what: str = "comparing",
) -> ClassifierComparison:
    """Measure both accuracies, KL(reference ‖ model) and agreement in one pass over the images.

    Arguments are those of `classify`; the images need no classes, and the two models may be on different devices.

    Raises:
        UserError: As `classify`, or the models have different numbers of classes.
    """
    for each in (model, reference):
        each.eval()
    tally, reference_tally = _Tally(), _Tally()
    agreeing, divergence = 0, 0.0
    for rows, batch in _batches(samples, batch_size, what):
        given, expected = _logits(model, batch, "model"), _logits(reference, batch, "reference")
        if given.shape != expected.shape:
            raise UserError(
                f"the models have {given.shape[1]} and {expected.shape[1]} classes: they cannot be compared; "
                "compare a model with the one it was made from"
            )
        labels = None if samples.labels is None else samples.labels[rows]
        tally.add(given, labels)
        reference_tally.add(expected, labels)
        agreeing += int((given.argmax(-1) == expected.argmax(-1)).sum())
        divergence += functional.kl_div(
            given.log_softmax(-1), expected.log_softmax(-1), reduction="sum", log_target=True
        ).item()
    score = tally.result()
    return ClassifierComparison(score, reference_tally.result(), agreeing / score.images, divergence / score.images)


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


class _Tally:
    """Counts of images whose class comes first, and among the first five."""

    def __init__(self) -> None:
        self.images = self.classes = self.first = self.first_five = 0
        self.labelled = False

    def add(self, logits: Tensor, labels: Tensor | None) -> None:
        """Count a batch: logits (B, classes), labels (B,) or None."""
        self.images += len(logits)
        self.classes = logits.shape[1]
        if labels is None:
            return
        self.labelled = True
        strange = labels[(labels < 0) | (labels >= self.classes)]
        if len(strange):
            raise UserError(
                f"class {int(strange[0])} is none of the model's {self.classes} classes: the labels are another model's"
            )
        own = logits.gather(1, labels[:, None])
        earlier = torch.arange(self.classes) < labels[:, None]
        rank = ((logits > own) | ((logits == own) & earlier)).sum(1)
        self.first += int((rank == 0).sum())
        self.first_five += int((rank < 5).sum())

    def result(self) -> Classification:
        """The shares."""
        top1 = self.first / self.images if self.labelled else None
        top5 = self.first_five / self.images if self.labelled and self.classes >= 5 else None
        return Classification(top1, top5, self.images, self.classes)


def _batches(samples: ImageSamples, batch_size: int | None, what: str) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    _, height, width = samples.size
    size = batch_size or max(1, BATCH_PIXELS // (height * width))
    for start in track(range(0, len(samples), size), what, unit="batch"):
        rows = slice(start, start + size)
        yield rows, samples.batch(rows)


def _logits(model: PreTrainedModel, batch: dict[str, Tensor], which: str) -> Tensor:
    """Run a classifier on a batch: logits (B, classes), float64 on CPU, where they are few."""
    inputs = {name: values.to(model.device, model.dtype) for name, values in batch.items()}
    try:
        values = getattr(model(**inputs), "logits", None)
    except ValueError as error:  # what transformers' vision models raise for images of another size
        shape = " x ".join(str(n) for n in batch["pixel_values"].shape[1:])
        reason = " ".join(str(error).split())
        raise UserError(f"the {which} does not take images of {shape}: {reason[:300]}") from error
    if not isinstance(values, Tensor) or values.dim() != 2:
        raise UserError(f"the {which} gives no class logits: it is no image classifier")
    if not all_finite(values):
        raise UserError(
            f"the {which}'s logits are not finite numbers: its weights are damaged or overflow in this dtype"
        )
    return values.cpu().double()
