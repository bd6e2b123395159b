"""Label maps of images, put through the resizing and cropping of the model's own image processor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ckpt_prune.calibration.image_files import reason_of
from ckpt_prune.calibration.images import upright
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track

IGNORED = 255
"""The label of a pixel that has none, as in ADE20k's and Cityscapes' training maps."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
_LARGEST = 2**16 - 1


class LabelMaps:
    """A PNG for every image, of its size and stem: a class per pixel, or a number.

    All are read once when this is made, so that a wrong one is known before any work.

    Args:
        folder: of the maps.
        images: that they are of.
        processor: the checkpoint's image processor, from `load_processor`.
        size: (height, width) that it makes of every image.
        classes: that a head tells apart, labelled from 0, `IGNORED` where a pixel has none; 1: a number for every
            pixel, up to 65,535, 0 where a pixel has none.

    Raises:
        UserError: an image has no map, or two have the same one; a map is not a grey or palette PNG, is of another size
            than its image, or has a class beyond `classes`.
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
            values = _read(path)
            with Image.open(image) as opened:
                width, height = upright(opened).size
            if values.shape != (height, width):
                found = f"{values.shape[1]} x {values.shape[0]}"
                raise UserError(f"{path} is {found} pixels, its image {image} is {width} x {height}")
            labelled = values if classes == 1 else values[values != IGNORED]
            if classes > 1 and labelled.size and labelled.max() >= classes:
                raise UserError(
                    f"{path}: label {labelled.max()}, and the head has {classes} classes (0 to {classes - 1}; "
                    f"{IGNORED} is ignored)"
                )

    def of(self, index: int) -> Tensor:
        """The map of one image as the model sees that, (height, width) int64; −1 where a pixel has no label.

        Raises:
            UserError: the image processor does more than resize and crop.
        """
        path = self._paths[index]
        values = _read(path)
        if self._classes > 1:
            # 0 is what a processor pads with, so that it must stand for no label.
            values = np.where(values == IGNORED, 0, values + 1)
        halves = np.stack([values >> 8, values & 255, np.zeros_like(values)], axis=2).astype(np.uint8)
        try:
            made = self._processor(
                images=Image.fromarray(halves),
                return_tensors="pt",
                do_rescale=False,
                do_normalize=False,
                resample=Image.Resampling.NEAREST,
            )
        except Exception as error:  # anything, a processor being any code
            raise UserError(f"{path}: the image processor fails on it: {reason_of(error)}") from error
        planes = made["pixel_values"][0].to(torch.int64)
        found: Tensor = planes[0] * 256 + planes[1]
        known = torch.from_numpy(np.append(np.unique(values), 0))
        if found.shape != self._size or bool(planes[2].any()) or not bool(torch.isin(found, known).all()):
            raise UserError(f"{path}: the image processor does more to images than resize and crop: no map fits them")
        return found - 1 if self._classes > 1 else torch.where(found == 0, -1, found)


def _read(path: Path) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Numbers of a map, (height, width)."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            if image.mode not in _MODES:
                raise UserError(f"{path} is a picture of mode {image.mode}: a label map has one number a pixel")
            values = np.asarray(image).astype(np.int64)
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise anything
        raise UserError(f"{path}: not a readable PNG: {reason_of(error)}") from error
    if values.min() < 0 or values.max() > _LARGEST:
        raise UserError(f"{path}: numbers beyond 0 to {_LARGEST}")
    return values
