"""Label maps of images, put through the resizing and cropping of the model's own image processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.image_files import describe_error
from ckpt_prune.measure.samples.images import turn_upright

IGNORED = 255
"""The label of a pixel that has none, as in ADE20k's and Cityscapes' training maps."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
_LARGEST = 2**16 - 1


class LabelMaps:
    """A PNG for every image, of its size and stem: a class per pixel, or a number.

    All are read once when this is made, so that a wrong one is found before any work.

    Args:
        folder: of the maps.
        images: that they are of.
        processor: the checkpoint's image processor.
        size: (height, width) that it makes of every image.
        classes: of a head, labelled from 0, `IGNORED` if a pixel has none; 1: a number for every pixel, up to 65,535,
            0 if a pixel has none.
    """

    def __init__(
        self, folder: Path, images: Sequence[Path], processor: Any, size: tuple[int, int], *, classes: int
    ) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of label maps")
        self._processor, self._size, self._classes = processor, size, classes
        self._paths = [folder / f"{image.stem}.png" for image in images]
        first: dict[Path, Path] = {}
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
            labelled = values[values != IGNORED]
            if classes > 1 and labelled.size and labelled.max() >= classes:
                raise UserError(
                    f"{path}: label {labelled.max()}, and the head has {classes} classes (0 to {classes - 1}; "
                    f"{IGNORED} is ignored)"
                )

    def read(self, index: int) -> Tensor:
        """Return the map of one image as the model sees that, (height, width) int64; −1 if a pixel has no label."""
        path = self._paths[index]
        values = _read_png(path)
        if self._classes > 1:
            # 0 is what a processor pads with, so it must stand for no label.
            values = np.where(values == IGNORED, 0, values + 1)
        bytes_of_values = np.stack([values >> 8, values & 255, np.zeros_like(values)], axis=2).astype(np.uint8)
        try:
            processed = self._processor(
                images=Image.fromarray(bytes_of_values),
                return_tensors="pt",
                do_rescale=False,
                do_normalize=False,
                resample=Image.Resampling.NEAREST,
            )
        except Exception as error:  # anything, a processor being any code
            raise UserError(f"{path}: the image processor fails on it: {describe_error(error)}") from error
        high, low, zeros = processed["pixel_values"][0].to(torch.int64)
        labels: Tensor = high * 256 + low
        values_or_none = torch.from_numpy(np.append(np.unique(values), 0))
        if labels.shape != self._size or bool(zeros.any()) or not bool(torch.isin(labels, values_or_none).all()):
            raise UserError(f"{path}: the image processor does more to images than resize and crop: no map fits them")
        return labels - 1 if self._classes > 1 else torch.where(labels == 0, -1, labels)


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
