"""Depth and segmentation: what a model tells of every pixel, read out by its own image processor, against maps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.batches import check_finite
from ckpt_prune.evaluation.image_classes import BATCH_PIXELS
from ckpt_prune.evaluation.images import choose_image_samples, load_shared_processor
from ckpt_prune.evaluation.label_maps import ClassTally, DepthScores, DepthTally, LabelMaps, Segmentation, Tally
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_folder
from ckpt_prune.evaluation.results import ScoredResult
from ckpt_prune.evaluation.whole_model import auto_class, config_of, read_config
from ckpt_prune.measure.samples.image_files import find_images
from ckpt_prune.measure.samples.samples import move_batch
from ckpt_prune.options.commands import EvaluateOptions

_READERS = {"depth": "post_process_depth_estimation", "segmentation": "post_process_semantic_segmentation"}
"""Methods of image processors that draw what a model tells out to the size of the image."""
_CLASSES = {"depth": "AutoModelForDepthEstimation", "segmentation": "AutoModelForSemanticSegmentation"}


def measure_maps(pair: Pair, options: EvaluateOptions) -> ScoredResult[Segmentation | DepthScores]:
    """Measure a depth or segmentation model on images with a map each, at the size of the images.

    Its maps are read out by the image processor's own method, as its users do. Relative depth has no unit, and so no
    error: such models are refused, as are processors that cut a part out of images.
    """
    kind = "depth" if options.depth is not None else "segmentation"
    folder = options.depth or options.segmentation
    assert folder is not None
    assert options.images is not None
    for path in pair.folders:
        check_folder(path)
        _check_kind(path, kind)
    processor = load_shared_processor(pair)
    if getattr(processor, "do_center_crop", False):
        raise UserError(
            f"{pair.folder}: its image processor cuts the middle out of images, of which there are no maps: set "
            "do_center_crop to false, and a size, in preprocessor_config.json"
        )
    reader = getattr(processor, _READERS[kind], None)
    if reader is None:
        raise UserError(f"{pair.folder}: its image processor has no {_READERS[kind]}, which reads a model's {kind} out")
    samples = choose_image_samples(pair, find_images(options.images, split="eval"), processor, options)
    configs = [config_of(path, trust=pair.trust) for path in pair.folders]
    classes = None if kind == "depth" else int(configs[0].num_labels)
    if classes is not None and len({config.num_labels for config in configs}) > 1:
        raise UserError(f"{pair.folder} and {pair.reference} have other numbers of classes: they cannot be compared")
    maps = LabelMaps(
        folder, samples.paths, classes=classes, reduced=bool(getattr(processor, "do_reduce_labels", False))
    )
    models = [pair.load()] if pair.reference is None else [pair.load(), pair.load_reference()]
    tallies: list[Tally] = [DepthTally(options.depth_scale) if classes is None else ClassTally(classes) for _ in models]
    agreeing = pixels = 0
    size = max(1, BATCH_PIXELS // (samples.size[1] * samples.size[2]))
    for start in track(range(0, len(samples), size), "reading maps", unit="batch"):
        batch = samples.batch(slice(start, start + size))
        truths = [maps.read(start + row) for row in range(len(batch["pixel_values"]))]
        predictions = [_tell(model, batch, reader, [tuple(truth.shape) for truth in truths]) for model in models]
        for row, truth in enumerate(truths):
            labelled = truth >= 0
            planes = [each[row][labelled] for each in predictions]
            for tally, plane in zip(tallies, planes, strict=True):
                tally.add(plane, truth[labelled])
            agreeing += int((planes[0] == planes[-1]).sum())
            pixels += int(labelled.sum())
    scores = [tally.score() for tally in tallies]
    skipped = tuple(sorted(samples.skipped))
    if pair.reference is None:
        return ScoredResult(pair.name, scores[0], skipped=skipped)
    agreement = None if classes is None else agreeing / pixels
    return ScoredResult(pair.name, scores[0], pair.reference_name, scores[1], None, agreement, skipped)


def _check_kind(folder: Any, kind: str) -> None:
    config = read_config(folder)
    if auto_class(config) != _CLASSES[kind]:
        named = ", ".join(config.get("architectures") or [str(config.get("model_type"))])
        raise UserError(f"{folder} ({named}) is no model of {kind}: --{kind} does not go with it")
    if kind == "depth" and config.get("depth_estimation_type") == "relative":
        raise UserError(f"{folder} tells relative depths, which have no unit: an error of them says nothing")


@torch.inference_mode()
def _tell(
    model: PreTrainedModel, batch: dict[str, Tensor], reader: Callable[..., Any], sizes: list[tuple[int, ...]]
) -> list[Tensor]:
    """Return a class, or a depth, of every pixel of each image, (height, width), on the CPU."""
    try:
        outputs = reader(model(**move_batch(batch, model.device, model.dtype)), target_sizes=sizes)
    except (TypeError, ValueError) as error:  # of sizes that do not fit, and of processors that ask for more
        raise UserError(f"the model's output cannot be read for these images: {one_line(error)}") from error
    planes = [each["predicted_depth"] if isinstance(each, dict) else each for each in outputs]
    check_finite("model's depths", *(plane for plane in planes if plane.is_floating_point()))
    return [plane.cpu() for plane in planes]
