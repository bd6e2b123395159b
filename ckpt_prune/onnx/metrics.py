"""A task's own metric in onnxruntime and in PyTorch, by the functions that `evaluate` measures checkpoints with."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.common.formatting import plural
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.heads import compare_heads
from ckpt_prune.evaluation.image_classes import compare_classifiers
from ckpt_prune.evaluation.masked import choose_masked, fill_in
from ckpt_prune.evaluation.perplexity import TokenComparison, compare
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.measure.streams.readout import as_two_classes
from ckpt_prune.onnx.reference import Reference
from ckpt_prune.onnx.session import OnnxModel
from ckpt_prune.options.graphs import TaskName

MEAN_SHARE = 0.1
"""Means are held to so much of the tolerance: errors of single elements are rounding, of random sign, and a mean that
moves as far as they do is a bias."""


@dataclass(frozen=True)
class Allowance:
    """How far a graph may be from its model.

    Attributes:
        tolerance: of single outputs, in units of the largest; of a graph that computes what the model does.
        max_loss: what a graph that is rounded may lose of the task's metric; None of others.
    """

    tolerance: float
    max_loss: float | None = None

    @property
    def rounded(self) -> bool:
        """Whether the metric alone counts."""
        return self.max_loss is not None


class Metric(BaseModel):
    """One figure in both runtimes."""

    name: str
    """perplexity, masked perplexity, top-1, agreement or cosine."""
    onnxruntime: float | None
    """None where it overflows."""
    against: str | None = None
    """What other model PyTorch's figure is of: a dense one. None of the graph's own."""
    pytorch: float | None
    """None also of agreement and cosine, which are of both at once."""
    of: str
    """What it was measured on."""
    difference: float | None
    """What is held to the tolerance; None where it overflows.

    Perplexities: of the mean negative log-likelihoods, in nats per token. Top-1 and agreement: share of the images, or
    of a text's predictions, that the two put into different classes. Cosine: relative error of the features. Of a graph
    that is rounded what is lost: of a perplexity the share it grows by, of top-1 what it falls by, of agreement and
    cosine what is missing to 1.
    """
    kl: float | None = None
    """Mean KL(PyTorch ‖ onnxruntime) in nats of each prediction; None where there are no classes."""
    same: float | None = None
    """Share of the predictions where both put the same class or token first."""
    tolerance: float | None
    """The most that passes; None where it is only measured. Top-1 and agreement: share of the images that the two put
    into different classes which PyTorch itself has nearer than two errors that pass, so that either may come first."""
    passed: bool


def text_metric(
    graph: OnnxModel, reference: Reference, task: TaskName, windows: Tensor, folder: Path, allowance: Allowance
) -> Metric | str:
    """The metric of a model of text, or why there is none.

    Args:
        graph: open.
        reference: PyTorch.
        task: of the graph.
        windows: int64 (N, T), real text.
        folder: with the tokenizer, which knows the token that masks others.
        allowance: how far it may be from PyTorch.

    Raises:
        UserError: a model's outputs are not numbers.
    """
    ours, theirs = _models(graph, reference)
    of = f"{plural(len(windows), 'window')} of {plural(windows.shape[1], 'token')}"
    if task == "text-generation":
        causal = compare(ours, theirs, windows, what="perplexity")
        a, b = causal.score, causal.reference_score
        pair = a.perplexity, b.perplexity
        return _perplexity("perplexity", pair, a.nll - b.nll, of, allowance, (causal.kl, causal.top1_agreement))
    if task == "fill-mask":
        tokenizer = load_tokenizer(folder)
        if tokenizer.mask_token_id is None:
            return "its tokenizer has no mask token, so nothing can be masked"
        masked = choose_masked(windows, set(tokenizer.all_special_ids))
        found = fill_in(ours, windows, masked, tokenizer.mask_token_id, theirs)
        assert isinstance(found, TokenComparison)
        of = f"{plural(int(masked.sum()), 'masked token')} in {of}"
        pair = found.score.perplexity, found.reference_score.perplexity
        apart = math.log(pair[0]) - math.log(pair[1]) if all(map(math.isfinite, pair)) else math.inf
        return _perplexity("masked perplexity", pair, apart, of, allowance, (found.kl, found.top1_agreement))
    if task == "feature-extraction":
        return _cosine(ours, reference, TokenWindows(windows), of, allowance)
    return _agreement(ours, theirs, windows, task, of, allowance)


def _agreement(
    ours: PreTrainedModel, theirs: PreTrainedModel, windows: Tensor, task: TaskName, of: str, allowance: Allowance
) -> Metric | str:
    """Of classes of texts or tokens, or of ends of answers."""
    if task == "text-classification" and theirs.config.num_labels == 1:
        return f"{task} by single numbers has none"
    per_token = task == "token-classification"
    given, expected = (_Noted(each, per_token=per_token) for each in (ours, theirs))
    found = compare_heads(cast(PreTrainedModel, given), cast(PreTrainedModel, expected), windows, per_token=per_token)
    apart, close = _flips(torch.cat(given.logits), torch.cat(expected.logits), 2 * allowance.tolerance)
    close = close if allowance.max_loss is None else allowance.max_loss
    return Metric(
        name="agreement",
        onnxruntime=found.agreement,
        pytorch=None,
        of=f"{plural(found.predictions, 'prediction')} in {of}",
        difference=apart,
        kl=found.kl,
        same=found.agreement,
        tolerance=close,
        passed=apart <= close,
    )


def image_metric(
    graph: OnnxModel, reference: Reference, task: TaskName, images: ImageSamples, allowance: Allowance
) -> Metric | str:
    """The metric of a model of images, or why there is none.

    Arguments are those of `text_metric`.

    Raises:
        UserError: a model's outputs are not numbers.
    """
    ours, theirs = _models(graph, reference)
    of = plural(len(images), "image")
    if task == "feature-extraction":
        return _cosine(ours, reference, images, of, allowance)
    if task != "image-classification":
        return f"{task} of images has none"
    given, expected = _Noted(ours), _Noted(theirs)
    found = compare_classifiers(cast(PreTrainedModel, given), cast(PreTrainedModel, expected), images, what="top-1")
    apart, close = _flips(torch.cat(given.logits), torch.cat(expected.logits), 2 * allowance.tolerance)
    a, b = found.score.top1, found.reference_score.top1
    if allowance.max_loss is not None:
        # Where there are labels, an image that was wrong before and is wrong otherwise now loses nothing.
        close = allowance.max_loss
        apart = apart if a is None or b is None else b - a
    if a is None:
        a, b = found.agreement, None
    return Metric(
        name="agreement" if b is None else "top-1",
        onnxruntime=a,
        pytorch=b,
        of=of,
        difference=apart,
        kl=found.kl,
        same=found.agreement,
        tolerance=close,
        passed=apart <= close,
    )


def _models(graph: OnnxModel, reference: Reference) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Both as what `evaluation` takes: it calls them, and asks for their config, device and type."""
    return cast(PreTrainedModel, graph), reference.model


def _perplexity(
    name: str, pair: tuple[float, float], apart: float, of: str, allowance: Allowance, alike: tuple[float, float]
) -> Metric:
    """Of two perplexities whose logarithms are `apart`, and of how alike the predictions are: KL and agreement."""
    ours, theirs = (value if math.isfinite(value) else None for value in pair)
    if allowance.max_loss is None:
        difference, most = abs(apart), allowance.tolerance * MEAN_SHARE
    else:
        difference, most = (math.expm1(apart) if apart < 700 else math.inf), allowance.max_loss
    return Metric(
        name=name,
        onnxruntime=ours,
        pytorch=theirs,
        of=of,
        difference=difference if math.isfinite(difference) else None,
        kl=alike[0] if math.isfinite(alike[0]) else None,
        same=alike[1],
        tolerance=most,
        passed=difference <= most,
    )


def _cosine(ours: PreTrainedModel, reference: Reference, samples: Samples, of: str, allowance: Allowance) -> Metric:
    found = compare_features(ours, cast(PreTrainedModel, reference.module), samples)
    tolerance = allowance.tolerance if allowance.max_loss is None else allowance.max_loss
    apart = math.sqrt(found.relative_error) if allowance.max_loss is None else 1 - found.cosine
    return Metric(
        name="cosine",
        onnxruntime=found.cosine,
        pytorch=None,
        of=of,
        difference=apart,
        tolerance=tolerance,
        passed=apart <= tolerance,
    )


class _Noted:
    """A classifier whose logits are kept, (predictions, classes) of each output of each batch."""

    def __init__(self, model: PreTrainedModel, *, per_token: bool = False) -> None:
        self._model, self._per_token = model, per_token
        self.device, self.dtype, self.config = model.device, model.dtype, model.config
        self.logits: list[Tensor] = []

    def eval(self) -> "_Noted":
        """A classifier to measure is in evaluation mode."""
        self._model.eval()
        return self

    def __call__(self, **inputs: Any) -> Any:
        """Run it."""
        output = self._model(**inputs)
        for name, value in output.items():
            if name.endswith("logits"):
                # ELECTRA's discriminator has no axis of classes.
                single = value.dim() == 2 and self._per_token
                self.logits.append((as_two_classes(value) if single else value).flatten(0, -2))
        return output


def _flips(ours: Tensor, theirs: Tensor, share: float) -> tuple[float, float]:
    """How many images are put into another class, and how many of these may be, each as a share of all.

    An image may be where PyTorch has the two classes nearer than `share` of its largest logit.

    Args:
        ours: logits of onnxruntime, (N, classes).
        theirs: of PyTorch.
        share: see above.
    """
    a, b = ours.double().argmax(1, keepdim=True), theirs.double().argmax(1, keepdim=True)
    values = theirs.double()
    margin = values.gather(1, b) - values.gather(1, a)
    flipped = a != b
    near = flipped & (margin <= share * values.abs().max())
    return flipped.sum().item() / len(ours), near.sum().item() / len(ours)
