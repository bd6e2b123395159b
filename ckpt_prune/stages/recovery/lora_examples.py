"""Examples to train adapters on: windows of tokens, each the target of those before it, or images with classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.image_files import find_images
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.samples import Samples
from ckpt_prune.model.model import Model
from ckpt_prune.options import ImageOptions


@dataclass(frozen=True)
class LoraExamples:
    """Samples with a loss.

    Attributes:
        inputs: what the model is called with, all samples at once: `input_ids` (N, T) or `pixel_values` (N, C, H, W).
        classes: of images, (N,) int64; None for text.
    """

    inputs: dict[str, Tensor]
    classes: Tensor | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(next(iter(self.inputs.values())))

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        """Return the mean cross entropy of these samples, in nats."""
        batch = {name: values[rows].to(model.device) for name, values in self.inputs.items()}
        if self.classes is not None:
            return cross_entropy(model(**batch).logits.float(), self.classes[rows].to(model.device))
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def make_examples(model: Model, samples: Samples, images: ImageOptions) -> LoraExamples:
    """Add a loss to samples, which `choose_samples` gives without classes; `images` says where images are from.

    Refuses a model that is neither a causal language model nor an image classifier, and images without classes.
    """
    purpose, folder = model.family.purpose, model.checkpoint.path
    if purpose not in ("text-generation", "image-classification"):
        raise UserError(
            f"--method lora trains on the next token or an image's class, which {folder} ({purpose}) does not predict: "
            "recover it with --method laco"
        )
    if not isinstance(samples, ImageSamples):
        return LoraExamples(samples.batch(slice(None)))
    assert images.images is not None
    names = {int(index): str(name) for index, name in (getattr(model.config, "id2label", None) or {}).items()}
    files = find_images(images.images, labels=images.labels, split="calib", id2label=names)
    if files.labels is None:
        raise UserError("--method lora needs the images' classes: give --labels FILE or a sub-folder per class")
    class_of = dict(zip(files.paths, files.labels, strict=True))
    return LoraExamples(samples.batch(slice(None)), torch.tensor([class_of[path] for path in samples.paths]))
