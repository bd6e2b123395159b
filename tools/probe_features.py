"""How well classes can be told from the features of vision models, without their heads.

    python tools/probe_features.py classes BASE --images DIR --probe knn|linear [--against DENSE] [--labels FILE]
    python tools/probe_features.py patches BASE --images DIR --head FILE --label-maps DIR [--against DENSE]

`classes` reads the class token of the last hidden states behind their norm. A model without one gives the mean over its
patches.
knn: the 20 nearest training images by cosine vote, each with exp(cos / 0.07) (DINO, Caron et al. 2021). linear: ridge
regression of the classes with a free constant, in closed form. Its strength is the one of nine (1e-6 to 100 times the
mean eigenvalue) of least leave-one-out error. A labels.csv with splits says which images are learned from (calib) and
tested on (eval); else one half is chosen at random (seed 0).

`patches` applies a linear head (patch_heads.py) to every patch, as DINOv2's linear segmentation heads are, and compares
what it says with label maps, as `evaluate --segmentation` and `--depth` compare what models with heads of their own
say. Its answers are interpolated (bilinear) to the size of the image, so a processor must not crop.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import click
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.batches import check_finite, iterate_samples
from ckpt_prune.evaluation.images import choose_image_samples, images_refused, load_shared_processor
from ckpt_prune.evaluation.label_maps import LabelMaps
from ckpt_prune.evaluation.pair import Pair
from ckpt_prune.evaluation.purpose import check_folder, is_vision
from ckpt_prune.measure.samples.image_files import LABELS, choose_images, find_images, read_label_rows, take_images
from ckpt_prune.measure.samples.samples import Samples, move_batch
from tools.patch_heads import measure_patch_head, patch_grid, read_patch_head

ProbeName = Literal["knn", "linear"]

NEIGHBOURS, TEMPERATURE = 20, 0.07
"""DINO's k and T (Caron et al. 2021, section 4.2)."""
STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 3))
"""Ridge strengths that a linear probe chooses among, relative to the mean eigenvalue."""


@dataclass(frozen=True)
class Probe:
    """How often a probe of a model's features is right.

    Attributes:
        top1: share of the test images, 0 to 1.
        picked: class of each test image.
        strength: that a linear probe chose; None for neighbours.
    """

    top1: float
    picked: tuple[int, ...]
    features: int
    strength: float | None = None

    def data(self) -> dict[str, Any]:
        return {"top1": self.top1, "strength": self.strength, "features": self.features}


@torch.inference_mode()
def features_of(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Return the class token of the last hidden states of images, or their mean if there is none: (N, d) float64."""
    base: Any = model.base_model
    base.eval()
    features = []
    for _, batch in iterate_samples(samples, "features"):
        states = base(**move_batch(batch, model.device, model.dtype)).last_hidden_state.double().cpu()
        rows, columns = patch_grid(model.config, batch)
        # If there are more tokens than patches, the first is that of the class in every family.
        features.append(states[:, 0] if states.shape[1] > rows * columns else states.mean(1))
    check_finite("model's features", *features)
    return torch.cat(features)


def probe(kind: ProbeName, train: Tensor, classes: Tensor, test: Tensor, expected: Tensor) -> Probe:
    """Fit a probe on features of some images, (N, d) float64, and try it on those of others.

    Classes are int64 from 0, (N,).
    """
    strength = None
    if kind == "knn":
        votes = neighbours(train, classes, test)
    else:
        votes, strength = linear(train, classes, test)
    picked = votes.argmax(1)
    top1 = float((picked == expected).double().mean())
    return Probe(top1, tuple(picked.tolist()), train.shape[1], strength)


def neighbours(
    train: Tensor, classes: Tensor, test: Tensor, *, count: int = NEIGHBOURS, temperature: float = TEMPERATURE
) -> Tensor:
    """Return weighted votes, (M, classes), of the nearest training images by cosine.

    Each weighs exp(similarity / T) (Wu et al. 2018; DINO).
    """
    similar = functional.normalize(test, dim=1) @ functional.normalize(train, dim=1).T
    nearest = similar.topk(min(count, len(train)), 1)
    # Less the largest, which changes no order and overflows nowhere.
    weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()
    votes = test.new_zeros(len(test), int(classes.max()) + 1)
    return votes.scatter_add_(1, classes[nearest.indices], weights)


def linear(train: Tensor, classes: Tensor, test: Tensor) -> tuple[Tensor, float]:
    """Predict classes by ridge regression, one column each, on the features, with a free constant.

    The strength is that of `STRENGTHS` with the least squared error when every image is left out in turn, in closed
    form: residuals over one less their leverage.

    Returns:
        What is predicted, (M, classes), and the strength.
    """
    targets = functional.one_hot(classes).to(train.dtype)
    mean, target_mean = train.mean(0), targets.mean(0)
    centred = targets - target_mean
    left, values, right = torch.linalg.svd(train - mean, full_matrices=False)
    scale = float(values.square().mean()) or 1.0
    projected = left.T @ centred
    least, best_strength, best_weights = float("inf"), 0.0, projected
    for strength in STRENGTHS:
        denominators = values.square() + strength * scale
        shrunk = values.square() / denominators
        residuals = centred - left @ (shrunk[:, None] * projected)
        leverage = (left.square() @ shrunk) + 1 / len(train)
        error = float((residuals / (1 - leverage).clamp_min(1e-9)[:, None]).square().sum())
        if error < least:
            weights = right.T @ ((values / denominators)[:, None] * projected)
            least, best_strength, best_weights = error, strength, weights
    return target_mean + (test - mean) @ best_weights, best_strength


# ---- the commands ----------------------------------------------------------------------------------------------------


def _open_pair(model: Path, against: Path | None) -> Pair:
    pair = Pair(model, against, torch.device("cpu"), trust=False)
    for folder in pair.folders:
        check_folder(folder)
        if not is_vision(folder):
            raise UserError(f"{folder} is no vision model")
    return pair


@click.group()
def main() -> None:
    """Say how well classes can be told from the features of vision models."""


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(path_type=Path)
_SHARED_OPTIONS = (
    click.argument("model", type=_FOLDER),
    click.option("--against", type=_FOLDER),
    click.option("--images", type=_FOLDER, required=True),
    click.option("--labels", type=_FILE),
    click.option("--samples", type=int),
    click.option("--max-corrupt", default=0),
)


def _add_shared_options(command: Any) -> Any:
    for decorate in reversed(_SHARED_OPTIONS):
        command = decorate(command)
    return command


def find_classes(directory: Path, labels: Path | None) -> tuple[dict[int, str], bool]:
    """Return the classes that a folder of images names, index → label, and whether its labels name splits.

    Labels that are numbers are their own indices; others are counted in order.
    """
    candidates = (labels, directory / LABELS, directory.resolve().parent / LABELS)
    file = next((path for path in candidates if path is not None and path.is_file()), None)
    rows = [] if file is None else read_label_rows(file)
    names = {row.values.get("label", "").strip() for row in rows}
    if file is None and directory.is_dir():
        names = {path.name for path in directory.iterdir() if path.is_dir()}
    are_numbers = all(re.fullmatch(r"[0-9]{1,9}", name) for name in names)
    classes = {int(name): name for name in names} if are_numbers else dict(enumerate(sorted(names)))
    return classes, bool(rows) and "split" in rows[0].values


@main.command()
@_add_shared_options
@click.option("--probe", "kind", type=click.Choice(["knn", "linear"]), required=True)
def classes(
    model: Path, against: Path | None, images: Path, labels: Path | None, kind: ProbeName, **given: Any
) -> None:
    """Probe the features of whole images."""
    pair, (names, has_splits) = _open_pair(model, against), find_classes(images, labels)
    if has_splits:
        parts = [find_images(images, labels=labels, split=split, id2label=names) for split in ("calib", "eval")]
    else:
        files = find_images(images, labels=labels, split="eval", id2label=names)
        count = len(files.paths)
        shuffled, middle = choose_images(files, samples=count, seed=0), (count + 1) // 2
        parts = [take_images(shuffled, list(range(middle))), take_images(shuffled, list(range(middle, count)))]
    if any(part.labels is None for part in parts):
        raise UserError(f"{images}: images without classes: give --labels FILE, or a sub-folder per class")
    processor = load_shared_processor(pair)
    train, test = (choose_image_samples(pair, part, processor, SimpleNamespace(**given)) for part in parts)
    if min(len(train), len(test)) < 2:
        raise UserError(f"{images}: too few images to learn from some and test on others")

    def measure(loaded: PreTrainedModel) -> Probe:
        with images_refused():
            features = [features_of(loaded, samples) for samples in (train, test)]
        return probe(kind, features[0], train.labels, features[1], test.labels)

    result = measure(pair.load())
    output = {"model": str(model), "probe": kind, **result.data(), "train": len(train), "test": len(test)}
    if against is not None:
        other = measure(pair.load_reference())
        same = sum(a == b for a, b in zip(result.picked, other.picked, strict=True)) / len(result.picked)
        output |= {
            "agreement": same,
            "difference": result.top1 - other.top1,
            "against": {"model": str(against), **other.data()},
        }
    click.echo(json.dumps(output, indent=2))


@main.command()
@_add_shared_options
@click.option("--head", type=_FILE, required=True)
@click.option("--label-maps", "maps", type=_FILE, required=True)
def patches(
    model: Path, against: Path | None, images: Path, labels: Path | None, head: Path, maps: Path, **given: Any
) -> None:
    """Read every patch out by a linear head, and compare that with label maps."""
    pair, patch_head = _open_pair(model, against), read_patch_head(head)
    processor, files = load_shared_processor(pair), find_images(images, labels=labels, split="eval")
    samples = choose_image_samples(pair, files, processor, SimpleNamespace(**given))
    outputs = len(patch_head.weight)
    truth = LabelMaps(maps, samples.paths, classes=None if outputs == 1 else outputs)
    models = [pair.load()] if against is None else [pair.load(), pair.load_reference()]
    with images_refused():
        scores, agreement = measure_patch_head(models, patch_head, samples, truth)
    output = {"model": str(model), **vars(scores[0]), "images": len(samples)}
    if against is not None:
        output |= {"agreement": agreement, "against": {"model": str(against), **vars(scores[1])}}
    click.echo(json.dumps(output, indent=2))


if __name__ == "__main__":
    main()
