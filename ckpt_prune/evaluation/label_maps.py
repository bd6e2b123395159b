"""Maps of images: a class or a depth for every pixel, and how well a model tells them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.evaluation.display import Columns, Figures
from ckpt_prune.measure.samples.image_files import describe_error
from ckpt_prune.measure.samples.images import turn_upright

IGNORED = 255
"""The label of a pixel that has none, as in ADE20k's and Cityscapes' training maps."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
_LARGEST = 2**16 - 1
WITHIN = 1.25
"""δ1 counts the pixels whose depth is at most so many times too large or too small (Eigen et al. 2014)."""


class LabelMaps:
    """A PNG for every image, of its size and stem: the number of a class for every pixel, or a depth.

    All are read once when this is made, so that a wrong one is found before any work.

    Args:
        folder: of the maps.
        images: that they are of.
        classes: of the model, labelled from 0, `IGNORED` if a pixel has none; None: depths up to 65,535, 0 if a pixel
            has none.
        reduced: whether classes are labelled from 1, and a pixel without one 0 (`do_reduce_labels` of processors).
    """

    def __init__(
        self, folder: Path, images: Sequence[Path], *, classes: int | None = None, reduced: bool = False
    ) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of label maps")
        self._classes, self._reduced = classes, reduced
        self._paths = [folder / f"{image.stem}.png" for image in images]
        first: dict[Path, Path] = {}
        labelled = False
        for path, image in zip(track(self._paths, "checking label maps", unit="map"), images, strict=True):
            if path in first:
                raise UserError(f"{first[path]} and {image} have one stem, and {path} is a map of one image")
            if not path.is_file():
                raise UserError(f"{path}: no such label map, which {image} needs")
            first[path] = image
            values = _read_png(path)
            with Image.open(image) as opened:
                width, height = turn_upright(opened).size
            if values.shape != (height, width):
                size_of_map = f"{values.shape[1]} x {values.shape[0]}"
                raise UserError(f"{path} is {size_of_map} pixels, its image {image} is {width} x {height}")
            most = int(self._label(values).max())
            labelled = labelled or most >= 0
            if classes is not None and most >= classes:
                given = f"label {most + reduced}, and the model has {classes} classes"
                ends = f"{int(reduced)} to {classes - 1 + reduced}"
                raise UserError(f"{path}: {given} ({ends}; {0 if reduced else IGNORED} is ignored)")
        if not labelled:
            raise UserError(f"{folder}: no pixel of any map is labelled")

    def read(self, index: int) -> Tensor:
        """Return the map of one image, (height, width) int64; −1 if a pixel has no label."""
        return torch.from_numpy(self._label(_read_png(self._paths[index])))

    def _label(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._classes is None:
            return np.where(values == 0, -1, values)
        return np.where(values == IGNORED, -1, values - self._reduced)


def _read_png(path: Path) -> NDArray[np.int64]:
    """Read the numbers of a map, (height, width)."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            if image.mode not in _MODES:
                raise UserError(f"{path} is a picture of mode {image.mode}: a label map has one number a pixel")
            values = np.asarray(image).astype(np.int64)
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise anything
        raise UserError(f"{path}: not a readable PNG: {describe_error(error)}") from error
    if values.min() < 0 or values.max() > _LARGEST:
        raise UserError(f"{path}: numbers beyond 0 to {_LARGEST}")
    return values


@dataclass(frozen=True)
class Segmentation(Figures):
    """How often a model is right about the class of a pixel.

    Attributes:
        miou: mean intersection over union of the classes that are labelled or predicted anywhere, 0 to 1.
        accuracy: share of the labelled pixels, 0 to 1.
        classes: intersection over union of each; None if it is neither labelled nor predicted.
        pixels: that are labelled.
    """

    columns: ClassVar[Columns] = (
        ("mIoU", "miou", ".4f"),
        ("pixels right", "accuracy", ".2%"),
        ("pixels", "pixels", ","),
    )
    miou: float
    accuracy: float
    classes: tuple[float | None, ...]
    pixels: int


@dataclass(frozen=True)
class DepthScores(Figures):
    """How near a model's depths are, over pixels that have one.

    Attributes:
        rmse: root of the mean squared error, in the model's unit.
        delta1: share of the pixels with max(d / d*, d* / d) < 1.25, 0 to 1; depths of zero or less count as wrong.
    """

    columns: ClassVar[Columns] = (("RMSE", "rmse", ".4f"), ("δ1", "delta1", ".2%"), ("pixels", "pixels", ","))
    rmse: float
    delta1: float
    pixels: int


class Tally(Protocol):
    """Sums over images, of which the figures of a model are made."""

    def add(self, told: Tensor, truth: Tensor) -> None:
        """Add what a model tells of the labelled pixels of an image, and their labels: (pixels,) both."""

    def score(self) -> Segmentation | DepthScores: ...


class ClassTally:
    """Counts pixels by their class and the one that a model puts them in, both int64."""

    def __init__(self, classes: int) -> None:
        self._confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, told: Tensor, truth: Tensor) -> None:
        classes = len(self._confusion)
        self._confusion += torch.bincount(truth * classes + told, minlength=classes**2).view(classes, classes)

    def score(self) -> Segmentation:
        right = self._confusion.diagonal()
        union = self._confusion.sum(0) + self._confusion.sum(1) - right
        shares = [int(hits) / int(both) if both else None for hits, both in zip(right, union, strict=True)]
        present = [share for share in shares if share is not None]
        pixels = int(self._confusion.sum())
        return Segmentation(sum(present) / len(present), int(right.sum()) / pixels, tuple(shares), pixels)


class DepthTally:
    """Adds up errors of depths, in float64."""

    def __init__(self, scale: float) -> None:
        self._scale, self._squares, self._near, self._pixels = scale, 0.0, 0, 0

    def add(self, told: Tensor, truth: Tensor) -> None:
        depths, true = told.double(), truth.double() / self._scale
        self._squares += float((depths - true).square().sum())
        near = (depths > 0) & (depths < WITHIN * true) & (true < WITHIN * depths)
        self._near += int(near.sum())
        self._pixels += len(true)

    def score(self) -> DepthScores:
        return DepthScores((self._squares / self._pixels) ** 0.5, self._near / self._pixels, self._pixels)
