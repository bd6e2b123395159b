"""Measuring a model of images: a classifier by its classes, a base model by its features."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import BaseImageProcessor

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.image_classes import (
    Classification,
    class_names,
    classify,
    compare_classifiers,
    is_classifier,
)
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_folder, check_same_kind, is_vision, reference_of_base
from ckpt_prune.evaluation.results import ComparisonResult, ScoredResult
from ckpt_prune.evaluation.whole_model import purpose_of_folder, read_config
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.model.composites import SEEING, is_composite, load_composite
from ckpt_prune.model.context import image_tokens
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.model.supported import declared_family
from ckpt_prune.options.data import EvaluationOptions


def measure_images(
    pair: Pair, options: EvaluationOptions, given: ImageSamples | None = None
) -> ScoredResult[Classification] | ComparisonResult:
    """Measure a classifier of images by its classes, or compare a base model's features with those of its reference.

    `given` are images to measure on, in place of those of the options.
    """
    folder, reference = pair.folder, pair.reference
    has_head = not (is_vision(folder) and purpose_of_folder(folder) == "feature-extraction")
    if not has_head:
        check_same_kind(folder, reference_of_base(folder, reference))
    classes = _read_classes(pair) if has_head else None
    samples = given or _read_images(pair, options, classes)
    skipped = tuple(sorted(samples.skipped))
    model = pair.load()
    on = None if samples.split is None else f"images {len(samples):,}, {samples.split}"
    if pair.reference is None or pair.reference_name is None:
        return ScoredResult(pair.name, classify(model, samples), skipped=skipped, on=on)
    other = pair.load_reference()
    if not has_head:
        with images_refused():
            return ComparisonResult(
                pair.name, pair.reference_name, compare_features(model, other, samples), skipped=skipped, on=on
            )
    both = compare_classifiers(model, other, samples)
    return ScoredResult(
        pair.name, both.score, pair.reference_name, both.reference_score, both.kl, both.agreement, skipped, on=on
    )


def _read_images(pair: Pair, options: EvaluationOptions, classes: dict[int, str] | None) -> ImageSamples:
    assert options.images is not None
    processor = load_shared_processor(pair)
    files = find_images(options.images, labels=options.labels, split="eval", id2label=classes)
    if files.labels is None and pair.reference is None:
        raise UserError(
            f"{options.images}: images without classes say nothing of one model; give --labels FILE, a sub-folder per "
            "class, or --against MODEL2"
        )
    return choose_image_samples(pair, files, processor, options)


@contextmanager
def images_refused() -> Iterator[None]:
    """Turn what transformers' vision models raise for images of another size into a line."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"the model does not take the images: {one_line(error)}") from error
    except AttributeError as error:
        if "'NoneType'" not in str(error):
            raise
        # A tower of text stands beside, and asks for what is not there (MetaCLIP 2).
        raise UserError("the model does not take images without text beside them") from error


def choose_image_samples(
    pair: Pair, files: ImageFiles, processor: BaseImageProcessor, options: EvaluationOptions
) -> ImageSamples:
    """Return so many images at random as the options say, or all."""
    if options.samples is not None:
        files = choose_images(files, samples=min(options.samples, len(files.paths)), seed=0)
    config = read_config(pair.folder)

    def count_tokens(size: tuple[int, int]) -> int:
        """Return the tokens of an image; called only for base models, whose family is known."""
        return image_tokens(declared_family(config), parse_config(config), size)

    return ImageSamples(files, processor, tokens=count_tokens, max_corrupt=options.max_corrupt)


def load_shared_processor(pair: Pair) -> BaseImageProcessor:
    processors = [load_processor(folder, trust_remote_code=pair.trust) for folder in pair.folders]
    if len({processor.to_json_string() for processor in processors}) > 1:
        raise UserError(
            f"{pair.folder} and {pair.reference} have different image processors: their figures cannot be compared"
        )
    return processors[0]


def _read_classes(pair: Pair) -> dict[int, str]:
    """Return the classes of a classifier; its reference has as many."""
    classes = []
    for folder in pair.folders:
        check_folder(folder)
        config = read_json_object(folder / "config.json")
        if not is_classifier(config):
            what = config.get("architectures") or config.get("model_type")
            remedy = (
                "measure it with --data FILE of conversations with images"
                if is_composite(config) and load_composite(config).auto in SEEING
                else "`evaluate --segmentation MAPS` or `--depth MAPS` measures one that tells of every pixel"
                if is_vision(folder)
                else "measure a language model with --text"
            )
            raise UserError(
                f"{folder} is no image classifier ({', '.join(what) if isinstance(what, list) else what}): "
                f"--images does not go with it; {remedy}"
            )
        classes.append(class_names(config))
    if len({len(names) for names in classes}) > 1:
        raise UserError(
            f"{pair.folder} and {pair.reference} have {len(classes[0])} and {len(classes[1])} classes: "
            "their figures cannot be compared"
        )
    return classes[0]
