"""Measuring a model of images: a classifier by its classes, a base model by its features."""

from collections.abc import Callable
from pathlib import Path

from transformers import BaseImageProcessor, PreTrainedModel

from ckpt_prune.architectures.model import image_tokens
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.architectures.supported import family_of
from ckpt_prune.calibration.image_files import choose_images, classes_of, find_images, has_splits, take
from ckpt_prune.calibration.image_processor import load_processor
from ckpt_prune.calibration.images import ImageSamples
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.features import compare_features
from ckpt_prune.evaluation.image_classes import class_names, classify, compare_classifiers, is_classifier
from ckpt_prune.evaluation.label_maps import LabelMaps
from ckpt_prune.evaluation.patch_heads import measure_patch_head, read_patch_head
from ckpt_prune.evaluation.probes import Probe, ProbeName, features_of, probe
from ckpt_prune.evaluation.purpose import check_folder, check_same_kind, is_vision, reference_of_base
from ckpt_prune.evaluation.results import AccuracyResult, FeaturesResult, PatchHeadResult, ProbeResult
from ckpt_prune.evaluation.texts import Pair
from ckpt_prune.evaluation.whole_model import purpose_of_folder, read_config
from ckpt_prune.options import EvaluationOptions


def measure_images(pair: Pair, options: EvaluationOptions) -> AccuracyResult | FeaturesResult:
    """Measure a model of images.

    Raises:
        UserError: it reads no images, the two cannot be compared, or the images say nothing of the model.
    """
    assert options.images is not None
    folder, reference = pair.folder, pair.reference
    base = None
    if is_vision(folder) and purpose_of_folder(folder) == "feature-extraction":
        base = reference_of_base(folder, reference)
        check_same_kind(folder, base)
    classes = _shared_classes(folder, reference) if base is None else None
    processor = _shared_processor(folder, reference, pair.trust)
    files = find_images(options.images, labels=options.labels, split="eval", id2label=classes)
    if files.labels is None and reference is None:
        raise UserError(
            f"{options.images}: images without classes say nothing of one model; give --labels FILE, a sub-folder per "
            "class, or --against MODEL2"
        )
    if options.samples is not None:
        files = choose_images(files, samples=min(options.samples, len(files.paths)), seed=0)
    samples = ImageSamples(files, processor, tokens=_tokens_of(folder), max_corrupt=options.max_corrupt)
    if base is not None:
        return _features(pair, base, samples)
    return _classification(pair, samples)


def measure_probe(pair: Pair, options: EvaluationOptions, kind: ProbeName) -> ProbeResult:
    """Measure what a model's features tell of the classes of images, and a reference's where there is one.

    Raises:
        UserError: it reads no images, or there are no classes, or too few images to learn from.
    """
    assert options.images is not None
    _check_features(pair, "--probe")
    names = classes_of(options.images, options.labels)
    if has_splits(options.images, options.labels):
        parts = [find_images(options.images, labels=options.labels, split=s, id2label=names) for s in ("calib", "eval")]
        split = "by labels: calib to learn, eval to test"
    else:
        files = find_images(options.images, labels=options.labels, split="eval", id2label=names)
        half = choose_images(files, samples=len(files.paths), seed=0)
        middle, count = (len(half.paths) + 1) // 2, len(half.paths)
        parts = [take(half, list(range(middle))), take(half, list(range(middle, count)))]
        split = "one half at random to learn, the other to test (seed 0)"
    if any(part.labels is None for part in parts):
        raise UserError(f"{options.images}: images without classes: give --labels FILE, or a sub-folder per class")
    if options.samples is not None:
        parts = [choose_images(part, samples=min(options.samples, len(part.paths)), seed=0) for part in parts]
    if min(len(part.paths) for part in parts) < 2:
        raise UserError(f"{options.images}: too few images to learn from some and test on others")
    processor = _shared_processor(pair.folder, pair.reference, pair.trust)
    train, test = (
        ImageSamples(part, processor, tokens=_tokens_of(pair.folder), max_corrupt=options.max_corrupt) for part in parts
    )
    assert train.labels is not None
    assert test.labels is not None
    own, expected = train.labels, test.labels

    def found(model: PreTrainedModel) -> Probe:
        try:
            features = [features_of(model, samples) for samples in (train, test)]
        except ValueError as error:  # what transformers' vision models raise for images of another size
            reason = " ".join(str(error).split())
            raise UserError(f"the model does not take the images: {reason[:300]}") from error
        return probe(kind, features[0], own, features[1], expected)

    score = found(pair.load())
    other = None if pair.reference is None else found(pair.load_reference())
    return ProbeResult(pair.name, kind, score, len(train), len(test), split, pair.reference_name, other)


def measure_patches(pair: Pair, options: EvaluationOptions, head: Path, maps: Path) -> PatchHeadResult:
    """Measure what a linear head makes of every patch of images, and of a reference's patches where there is one.

    Args:
        pair: models of images.
        options: whose images are measured.
        head: safetensors file (`read_patch_head`).
        maps: folder of label maps (`LabelMaps`).

    Raises:
        UserError: a model reads no images, or the head, the maps and the models do not fit each other.
    """
    assert options.images is not None
    _check_features(pair, "--patch-head")
    read = read_patch_head(head)
    files = find_images(options.images, labels=options.labels, split="eval")
    if options.samples is not None:
        files = choose_images(files, samples=min(options.samples, len(files.paths)), seed=0)
    processor = _shared_processor(pair.folder, pair.reference, pair.trust)
    samples = ImageSamples(files, processor, tokens=_tokens_of(pair.folder), max_corrupt=options.max_corrupt)
    height, width = samples.size[1:]
    truth = LabelMaps(maps, samples.paths, processor, (height, width), classes=read.outputs)
    models = [pair.load()] if pair.reference is None else [pair.load(), pair.load_reference()]
    try:
        found = measure_patch_head(models, read, samples, truth)
    except ValueError as error:  # what transformers' vision models raise for images of another size
        reason = " ".join(str(error).split())
        raise UserError(f"the model does not take the images: {reason[:300]}") from error
    score, reference = found.scores[0], found.scores[1] if len(models) > 1 else None
    skipped = tuple(sorted(samples.skipped))
    return PatchHeadResult(
        pair.name,
        head,
        score,
        len(samples),
        (height, width),
        skipped,
        pair.reference_name,
        reference,
        found.agreement,
    )


def _check_features(pair: Pair, option: str) -> None:
    """Refuse what gives no features of images."""
    for folder in (pair.folder, pair.reference):
        if folder is not None:
            check_folder(folder)
            if not is_vision(folder):
                raise UserError(f"{folder} is no vision model: {option} is of features of images")
    if pair.graph is not None or pair.reference_graph is not None:
        raise UserError(f"{option} is of features before the head, which graphs do not give")


def _features(pair: Pair, base: Path, samples: ImageSamples) -> FeaturesResult:
    models = [pair.load(), pair.load_reference()]
    try:
        found = compare_features(models[0], models[1], samples)
    except ValueError as error:  # what transformers' vision models raise for images of another size
        reason = " ".join(str(error).split())
        raise UserError(f"the models do not take what they are to be compared on: {reason[:300]}") from error
    return FeaturesResult(pair.name, pair.reference_name or base, found, tuple(sorted(samples.skipped)))


def _classification(pair: Pair, samples: ImageSamples) -> AccuracyResult:
    skipped = tuple(sorted(samples.skipped))
    model = pair.load()
    if pair.reference is None:
        return AccuracyResult(pair.name, classify(model, samples), skipped)
    found = compare_classifiers(model, pair.load_reference(), samples)
    return AccuracyResult(
        pair.name, found.score, skipped, pair.reference_name, found.reference_score, found.kl, found.agreement
    )


def _tokens_of(folder: Path) -> Callable[[tuple[int, int]], int]:
    """Tokens of an image of a size; asked only of base models, whose family is known."""
    config = read_config(folder)
    return lambda size: image_tokens(family_of(config), parse_config(config), size)


def _shared_classes(folder: Path, reference: Path | None) -> dict[int, str]:
    classes = _classes(folder)
    if reference is not None and len(_classes(reference)) != len(classes):
        raise UserError(
            f"{folder} and {reference} have {len(classes)} and {len(_classes(reference))} classes: "
            "their figures cannot be compared"
        )
    return classes


def _shared_processor(folder: Path, reference: Path | None, trust: bool) -> BaseImageProcessor:
    processor = load_processor(folder, trust_remote_code=trust)
    if reference is not None:
        other = load_processor(reference, trust_remote_code=trust)
        if processor.to_json_string() != other.to_json_string():
            raise UserError(
                f"{folder} and {reference} have different image processors: their figures cannot be compared"
            )
    return processor


def _classes(folder: Path) -> dict[int, str]:
    check_folder(folder)
    config = read_json_object(folder / "config.json")
    if not is_classifier(config):
        what = config.get("architectures") or config.get("model_type")
        raise UserError(
            f"{folder} is no image classifier ({', '.join(what) if isinstance(what, list) else what}): "
            "--images does not go with it; measure a language model with --text"
        )
    return class_names(config)
