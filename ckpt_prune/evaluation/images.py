"""Measuring a model of images: a classifier by its classes, a base model by its features."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import BaseImageProcessor, PreTrainedModel

from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.image_classes import class_names, classify, compare_classifiers, is_classifier
from ckpt_prune.evaluation.label_maps import LabelMaps
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.patch_heads import measure_patch_head, read_patch_head
from ckpt_prune.evaluation.probes import Probe, ProbeName, features_of, probe
from ckpt_prune.evaluation.purpose import check_folder, check_same_kind, is_vision, reference_of_base
from ckpt_prune.evaluation.results import AccuracyResult, ComparisonResult, PatchHeadResult, ProbeResult
from ckpt_prune.evaluation.whole_model import first_line, purpose_of_folder, read_config
from ckpt_prune.measure.samples.image_files import (
    ImageFiles,
    choose_images,
    find_classes,
    find_images,
    has_splits,
    take_images,
)
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.model.context import image_tokens
from ckpt_prune.model.skeleton import parse_config
from ckpt_prune.model.supported import declared_family
from ckpt_prune.options.data import EvaluationOptions


def measure_images(pair: Pair, options: EvaluationOptions) -> AccuracyResult | ComparisonResult:
    """Measure a classifier of images by its classes, or compare a base model's features with those of its reference."""
    assert options.images is not None
    folder, reference = pair.folder, pair.reference
    base = None
    if is_vision(folder) and purpose_of_folder(folder) == "feature-extraction":
        base = reference_of_base(folder, reference)
        check_same_kind(folder, base)
    classes = _read_classes(pair) if base is None else None
    processor = _load_shared_processor(pair)
    files = find_images(options.images, labels=options.labels, split="eval", id2label=classes)
    if files.labels is None and reference is None:
        raise UserError(
            f"{options.images}: images without classes say nothing of one model; give --labels FILE, a sub-folder per "
            "class, or --against MODEL2"
        )
    samples = _choose_samples(pair, files, processor, options)
    skipped = tuple(sorted(samples.skipped))
    model = pair.load()
    if reference is None or pair.reference_name is None:
        return AccuracyResult(pair.name, classify(model, samples), skipped=skipped)
    other = pair.load_reference()
    if base is not None:
        with _images_refused():
            return ComparisonResult(
                pair.name, pair.reference_name, compare_features(model, other, samples), skipped=skipped
            )
    both = compare_classifiers(model, other, samples)
    return AccuracyResult(
        pair.name, both.score, pair.reference_name, both.reference_score, both.kl, both.agreement, skipped
    )


def measure_probe(pair: Pair, options: EvaluationOptions, kind: ProbeName) -> ProbeResult:
    """Measure how well classes of images can be told from a model's features, and from those of its reference."""
    assert options.images is not None
    _check_features(pair, "--probe")
    images, labels = options.images, options.labels
    names = find_classes(images, labels)
    if has_splits(images, labels):
        parts = [find_images(images, labels=labels, split=split, id2label=names) for split in ("calib", "eval")]
        split = "by labels: calib to learn, eval to test"
    else:
        files = find_images(images, labels=labels, split="eval", id2label=names)
        count = len(files.paths)
        shuffled, middle = choose_images(files, samples=count, seed=0), (count + 1) // 2
        parts = [take_images(shuffled, list(range(middle))), take_images(shuffled, list(range(middle, count)))]
        split = "one half at random to learn, the other to test (seed 0)"
    if any(part.labels is None for part in parts):
        raise UserError(f"{images}: images without classes: give --labels FILE, or a sub-folder per class")
    processor = _load_shared_processor(pair)
    train, test = (_choose_samples(pair, part, processor, options) for part in parts)
    if min(len(train), len(test)) < 2:
        raise UserError(f"{images}: too few images to learn from some and test on others")
    train_classes, test_classes = train.labels, test.labels
    assert train_classes is not None
    assert test_classes is not None

    def measure(model: PreTrainedModel) -> Probe:
        with _images_refused():
            features = [features_of(model, samples) for samples in (train, test)]
        return probe(kind, features[0], train_classes, features[1], test_classes)

    score, reference, agreement = measure(pair.load()), None, None
    if pair.reference is not None:
        reference = measure(pair.load_reference())
        same = sum(a == b for a, b in zip(score.picked, reference.picked, strict=True))
        agreement = same / len(score.picked)
    return ProbeResult(
        model=pair.name,
        score=score,
        against=pair.reference_name,
        reference=reference,
        agreement=agreement,
        probe=kind,
        train=len(train),
        test=len(test),
        split=split,
    )


def measure_patches(pair: Pair, options: EvaluationOptions, head: Path, maps: Path) -> PatchHeadResult:
    """Compare what a linear head (`read_patch_head`) makes of every patch of images with `LabelMaps`, for both."""
    assert options.images is not None
    _check_features(pair, "--patch-head")
    patch_head = read_patch_head(head)
    files = find_images(options.images, labels=options.labels, split="eval")
    processor = _load_shared_processor(pair)
    samples = _choose_samples(pair, files, processor, options)
    height, width = samples.size[1:]
    truth = LabelMaps(maps, samples.paths, processor, (height, width), classes=len(patch_head.weight))
    models = [pair.load()] if pair.reference is None else [pair.load(), pair.load_reference()]
    with _images_refused():
        scores, agreement = measure_patch_head(models, patch_head, samples, truth)
    return PatchHeadResult(
        model=pair.name,
        score=scores[0],
        against=pair.reference_name,
        reference=scores[1] if len(models) > 1 else None,
        agreement=agreement,
        patch_head=str(head),
        images=len(samples),
        size=(height, width),
        skipped=tuple(sorted(samples.skipped)),
    )


@contextmanager
def _images_refused() -> Iterator[None]:
    """Turn what transformers' vision models raise for images of another size into a line."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"the model does not take the images: {first_line(error)}") from error


def _check_features(pair: Pair, option: str) -> None:
    """Refuse what gives no features of images."""
    for folder in pair.folders:
        check_folder(folder)
        if not is_vision(folder):
            raise UserError(f"{folder} is no vision model: {option} is of features of images")
    if pair.graph is not None or pair.reference_graph is not None:
        raise UserError(f"{option} is of features before the head, which graphs do not give")


def _choose_samples(
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


def _load_shared_processor(pair: Pair) -> BaseImageProcessor:
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
            raise UserError(
                f"{folder} is no image classifier ({', '.join(what) if isinstance(what, list) else what}): "
                "--images does not go with it; measure a language model with --text"
            )
        classes.append(class_names(config))
    if len({len(names) for names in classes}) > 1:
        raise UserError(
            f"{pair.folder} and {pair.reference} have {len(classes[0])} and {len(classes[1])} classes: "
            "their figures cannot be compared"
        )
    return classes[0]
