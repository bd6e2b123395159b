"""How good an output is, beside the model that it was made from, on data that it was not made on.

`prune` and `quantize` measure every output so. It costs little: an eighth as many windows as the model was calibrated
on, each read once by either model, where calibrating reads each of its own twice or more.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.evaluation.image_classes import class_names, is_classifier
from ckpt_prune.evaluation.images import measure_images
from ckpt_prune.evaluation.pair import Pair, lack_of_room
from ckpt_prune.evaluation.results import ComparisonResult, ScoredResult, TextsResult
from ckpt_prune.evaluation.texts import measure_rows, measure_texts
from ckpt_prune.measure.samples.choose import choose_fresh_samples
from ckpt_prune.measure.samples.image_files import find_all_images
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.samples import Samples, ScoredWindows, TokenWindows
from ckpt_prune.model.model import Model
from ckpt_prune.options.data import EvaluationOptions, SampleOptions

SHARE = 8
"""One sample is measured on for so many that the model was calibrated on."""
WINDOWS, IMAGES = (2, 8), (16, 64)
"""The least and the most that are measured on."""


@dataclass(frozen=True)
class HeldOut:
    """Data to measure an output on, and in words what it is."""

    samples: TokenWindows | ImageSamples
    words: str


def choose_held_out(
    model: Model,
    options: SampleOptions,
    used: Samples | Sequence[tuple[int, str]] | None,
    count: int,
    *,
    trust: bool,
) -> HeldOut:
    """Choose windows or images of the data at hand that a model was not calibrated on.

    If the data has no others, some that it was calibrated on are taken, and the words say so.

    Args:
        model: that was pruned or rounded.
        options: the data, and how the model's own samples were chosen of it.
        used: those samples, or their numbers and fingerprints; None if they are not known.
        count: how many to take.
        trust: run the image processor's own code.

    Raises:
        UserError: the model reads something else, or data that is not measured on (audio).
    """
    is_text = model.family.modality == "text"
    if model.family.modality == "audio":
        raise UserError("outputs are not measured on audio alone; evaluate --data FILE measures audio with its text")
    sampling = options.model_copy(update={"samples": count})
    fresh = choose_fresh_samples(model, sampling, used, trust=trust, say=lambda _line: None)
    samples = fresh.samples
    assert isinstance(samples, TokenWindows | ImageSamples)
    config = model.checkpoint.config
    if isinstance(samples, ImageSamples) and options.images and is_classifier(config):
        with suppress(UserError):  # images without classes are compared by what both models say
            classes, labels = class_names(config), options.labels
            samples.take_classes(find_all_images(options.images, labels=labels, split="calib", id2label=classes))
    places = [*options.text, *options.images, *filter(None, [options.talks])]
    names = ", ".join(path.name for path in places)
    noun = "pair" if model.family.modality == "pairs" else "image"
    what = f"{len(samples)} windows of {samples.tokens} tokens" if is_text else plural(len(samples), noun)
    words = f"{what} of {names}"
    if fresh.seen is None:
        return HeldOut(samples, f"{words}, of which some may be among those that it was calibrated on")
    if fresh.seen:
        reason = f"{names} has no others: what is lost elsewhere is more"
        return HeldOut(samples, f"{words} that it was calibrated on, because {reason}")
    return HeldOut(samples, f"{words} that it was not calibrated on")


def count_default(used: Samples | Sequence[tuple[int, str]] | None, *, is_text: bool) -> int:
    """Return how many windows, images or pairs are measured on by default, by how many a model was calibrated on."""
    calibrated = 0 if used is None else len(used) if not isinstance(used, Sequence) else sum(each for each, _ in used)
    least, most = WINDOWS if is_text else IMAGES
    return max(least, min(most, calibrated // SHARE))


def measure_held_out(pair: Pair, held_out: HeldOut) -> ScoredResult[Any] | ComparisonResult:
    """Measure a model beside its reference on these samples: block by block, or both loaded WHOLE.

    Raises UserError if these do not fit in memory, or cannot be measured.
    """
    samples = held_out.samples
    lacking = lack_of_room((folder for folder in pair.folders if folder not in pair.streamed), pair.device)
    if lacking is not None:
        raise UserError(lacking)
    if isinstance(samples, ScoredWindows):
        return replace(measure_rows(pair, EvaluationOptions(), samples), on=held_out.words)
    if isinstance(samples, ImageSamples):
        return replace(measure_images(pair, EvaluationOptions(), samples), on=held_out.words)
    result = measure_texts(pair, EvaluationOptions(window=samples.tokens), samples.windows)
    assert not isinstance(result, TextsResult)
    return replace(result, on=held_out.words)
