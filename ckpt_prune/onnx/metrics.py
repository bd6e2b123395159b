"""A task's own metric in onnxruntime and in PyTorch, by the functions that `evaluate` measures checkpoints with."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.checkpoint.sentence_modules import find_sentence_use
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.heads import compare_heads
from ckpt_prune.evaluation.image_classes import compare_classifiers
from ckpt_prune.evaluation.masked import choose_masked, fill_in
from ckpt_prune.evaluation.perplexity import TokenComparison, compare
from ckpt_prune.evaluation.sentences import compare_sentences, cut_texts, open_embedder
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.pairs import PairWindows
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.samples.text import load_tokenizer
from ckpt_prune.measure.streams.readout import as_two_classes
from ckpt_prune.onnx.pairs import OnnxPair
from ckpt_prune.onnx.records import Metric
from ckpt_prune.onnx.reference import GraphReference
from ckpt_prune.onnx.session import OnnxModel
from ckpt_prune.options.graphs import TaskName

MEAN_SHARE = 0.1
"""Means are held to so much of the tolerance: errors of single elements have random signs, and a mean that moves as far
as they do is a bias."""


@dataclass(frozen=True)
class Allowance:
    """How far a graph may be from its model.

    Attributes:
        tolerance: of single outputs, in units of the largest.
        max_loss: what a graph that is rounded may lose of the task's metric; None of others.
    """

    tolerance: float
    max_loss: float | None = None

    @property
    def rounded(self) -> bool:
        return self.max_loss is not None


def is_of_sentences(task: TaskName, folder: Path) -> bool:
    """Whether what a folder makes of short texts is measured: of windows, one would be one long text."""
    return task == "feature-extraction" and find_sentence_use(folder) == "sentence-similarity"


def measure_text_metric(
    graph: OnnxModel, reference: GraphReference, task: TaskName, windows: Tensor, folder: Path, allowance: Allowance
) -> Metric | str:
    """Return the metric of a model of text, or why there is none.

    Args:
        windows: int64 (N, T), real text.
        folder: with the tokenizer, which knows the mask token.
        allowance: how far it may be from PyTorch.
    """
    ours, theirs = cast(PreTrainedModel, graph), reference.model
    of = f"{plural(len(windows), 'window')} of {plural(windows.shape[1], 'token')}"
    if task == "text-generation":
        causal = compare(ours, theirs, windows, what="perplexity")
        a, b = causal.score, causal.reference_score
        pair = a.perplexity, b.perplexity
        return _compare_perplexities("perplexity", pair, a.nll - b.nll, of, allowance, causal)
    if task == "fill-mask":
        tokenizer = load_tokenizer(folder)
        if tokenizer.mask_token_id is None:
            return "its tokenizer has no mask token, so nothing can be masked"
        masked = choose_masked(windows, set(tokenizer.all_special_ids))
        filled = fill_in(ours, windows, masked, tokenizer.mask_token_id, theirs)
        assert isinstance(filled, TokenComparison)
        of = f"{plural(int(masked.sum()), 'masked token')} in {of}"
        pair = filled.score.perplexity, filled.reference_score.perplexity
        difference = math.log(pair[0]) - math.log(pair[1]) if all(map(math.isfinite, pair)) else math.inf
        return _compare_perplexities("masked perplexity", pair, difference, of, allowance, filled)
    if is_of_sentences(task, folder):
        return _compare_embeddings(ours, reference, windows, folder, allowance)
    if task == "feature-extraction":
        return _compare_cosine(ours, reference, TokenWindows(windows), of, allowance)
    if task == "text-classification" and theirs.config.num_labels == 1:
        return f"{task} by single numbers has none"
    per_token = task == "token-classification"
    actual, expected = (_LogitsRecorder(each, per_token=per_token) for each in (ours, theirs))
    heads = compare_heads(cast(PreTrainedModel, actual), cast(PreTrainedModel, expected), windows, per_token=per_token)
    flipped, near = _count_flips(actual, expected, 2 * allowance.tolerance)
    of = f"{plural(heads.predictions, 'prediction')} in {of}"
    return _agreement(
        heads.agreement, None, of, heads, flipped, near if allowance.max_loss is None else allowance.max_loss
    )


def measure_pair_metric(
    graph: OnnxPair, reference: GraphReference, pairs: PairWindows, allowance: Allowance
) -> Metric | str:
    """Return the perplexity of targets behind their sources; arguments as of `measure_text_metric`."""
    causal = compare(cast(PreTrainedModel, graph), reference.model, pairs, what="perplexity")
    a, b = causal.score, causal.reference_score
    of = f"targets of {plural(len(pairs), 'pair')}"
    return _compare_perplexities("perplexity", (a.perplexity, b.perplexity), a.nll - b.nll, of, allowance, causal)


def measure_image_metric(
    graph: OnnxModel, reference: GraphReference, task: TaskName, images: ImageSamples, allowance: Allowance
) -> Metric | str:
    """Return the metric of a model of images, or why there is none; arguments as of `measure_text_metric`."""
    ours, theirs = cast(PreTrainedModel, graph), reference.model
    of = plural(len(images), "image")
    if task == "feature-extraction":
        return _compare_cosine(ours, reference, images, of, allowance)
    if task != "image-classification":
        return f"{task} of images has none"
    actual, expected = _LogitsRecorder(ours), _LogitsRecorder(theirs)
    classes = compare_classifiers(cast(PreTrainedModel, actual), cast(PreTrainedModel, expected), images, what="top-1")
    difference, most = _count_flips(actual, expected, 2 * allowance.tolerance)
    a, b = classes.score.top1, classes.reference_score.top1
    if allowance.max_loss is not None:
        # With labels, an image that was wrong before and is wrong in another way now loses nothing.
        most = allowance.max_loss
        difference = difference if a is None or b is None else b - a
    if a is None:
        a, b = classes.agreement, None
    return _agreement(a, b, of, classes, difference, most)


def _agreement(
    ours: float | None, theirs: float | None, of: str, comparison: Any, difference: float, most: float
) -> Metric:
    return Metric(
        name="agreement" if theirs is None else "top-1",
        onnxruntime=ours,
        pytorch=theirs,
        of=of,
        difference=difference,
        kl=comparison.kl,
        same=comparison.agreement,
        tolerance=most,
        passed=difference <= most,
    )


def _compare_perplexities(
    name: str, pair: tuple[float, float], log_ratio: float, of: str, allowance: Allowance, comparison: Any
) -> Metric:
    ours, theirs = (value if math.isfinite(value) else None for value in pair)
    if allowance.max_loss is None:
        difference, most = abs(log_ratio), allowance.tolerance * MEAN_SHARE
    else:
        difference, most = (math.expm1(log_ratio) if log_ratio < 700 else math.inf), allowance.max_loss
    return Metric(
        name=name,
        onnxruntime=ours,
        pytorch=theirs,
        of=of,
        difference=difference if math.isfinite(difference) else None,
        kl=comparison.kl if math.isfinite(comparison.kl) else None,
        same=comparison.top1_agreement,
        tolerance=most,
        passed=difference <= most,
    )


def _compare_cosine(
    ours: PreTrainedModel, reference: GraphReference, samples: Samples, of: str, allowance: Allowance
) -> Metric:
    features = compare_features(ours, cast(PreTrainedModel, reference.module), samples)
    return _cosine(features.cosine, 1 - features.cosine, math.sqrt(features.relative_error), of, allowance)


def _compare_embeddings(
    ours: PreTrainedModel, reference: GraphReference, windows: Tensor, folder: Path, allowance: Allowance
) -> Metric | str:
    """Compare what a sentence-transformers folder makes of the hidden states: pooled, and normalised if it says so."""
    theirs = cast(PreTrainedModel, reference.module)
    tokenizer = load_tokenizer(folder)
    texts = cut_texts(windows, tokenizer)
    try:
        model, other = (open_embedder(each, folder, tokenizer) for each in (ours, theirs))
        cosine = compare_sentences(model, other, texts, windows.shape[1]).cosine
    except UserError as error:
        return str(error)
    lost = max(0.0, 1 - cosine)
    # Of vectors of one length, the relative error is the root of twice what the cosine loses.
    return _cosine(cosine, lost, math.sqrt(2 * lost), f"embeddings of {plural(len(texts), 'text')}", allowance)


def _cosine(cosine: float, lost: float, error: float, of: str, allowance: Allowance) -> Metric:
    """Return the metric of vectors. Those of a graph that is rounded may lose of the cosine; others are held to it all.

    Args:
        error: of the vectors, relative.
    """
    difference, most = (error, allowance.tolerance) if allowance.max_loss is None else (lost, allowance.max_loss)
    passed = difference <= most
    return Metric(
        name="cosine", onnxruntime=cosine, pytorch=None, of=of, difference=difference, tolerance=most, passed=passed
    )


class _LogitsRecorder:
    """A classifier whose logits are kept, (predictions, classes) of each output of each batch."""

    def __init__(self, model: PreTrainedModel, *, per_token: bool = False) -> None:
        self._model, self._per_token = model, per_token
        self.device, self.dtype, self.config = model.device, model.dtype, model.config
        self.logits: list[Tensor] = []

    def eval(self) -> "_LogitsRecorder":
        self._model.eval()
        return self

    def __call__(self, **inputs: Any) -> Any:
        output = self._model(**inputs)
        for name, value in output.items():
            if name.endswith("logits"):
                # ELECTRA's discriminator has no axis of classes.
                single = value.dim() == 2 and self._per_token
                self.logits.append((as_two_classes(value) if single else value).flatten(0, -2))
        return output


def _count_flips(ours: _LogitsRecorder, theirs: _LogitsRecorder, share: float) -> tuple[float, float]:
    """Return the share of predictions that are put into another class, and the share that may be.

    A prediction may be if PyTorch has the two classes nearer than `share` of its largest logit.
    """
    actual, values = torch.cat(ours.logits).double(), torch.cat(theirs.logits).double()
    a, b = actual.argmax(1, keepdim=True), values.argmax(1, keepdim=True)
    margin = values.gather(1, b) - values.gather(1, a)
    flipped = a != b
    near = flipped & (margin <= share * values.abs().max())
    return flipped.sum().item() / len(actual), near.sum().item() / len(actual)
