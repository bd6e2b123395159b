"""Images as model input, decoded and processed when a batch is asked for."""

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.ImageOps import exif_transpose
from torch import Tensor

from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.checkpoint.files import Stamp, read_unchanged
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.image_files import FORMATS, ImageFiles, describe_error, take_images

_BLANK = (256, 256)


class ImageSamples:
    """Images as a model is called with them.

    Every file is read and decoded once when this is made, so that a damaged one is known before any work; it is left
    out and named. Each image is preprocessed by itself, so values do not depend on how images are batched.

    Args:
        files: images, with their classes or without.
        processor: the checkpoint's image processor, from `load_processor`.
        tokens: (height, width) after preprocessing → tokens that the model makes of such an image. Only called if the
            number is asked for, since it may refuse a model of unknown family.
        max_corrupt: share of the images that may fail to decode.

    Attributes:
        paths: the images that decode, in order.
        labels: their classes, int64 (N,), or None.
        split: which rows of which labels file they are, in words, if it has several splits.
        skipped: paths of those that do not decode, in order.
        size: (channels, height, width) of every image after preprocessing.
    """

    def __init__(
        self,
        files: ImageFiles,
        processor: Any,
        *,
        tokens: Callable[[tuple[int, int]], int],
        max_corrupt: float = 0.05,
    ) -> None:
        self._tokens = tokens
        self._processor = processor
        self._stamps: dict[Path, Stamp] = {}
        good, bad, digest = [], [], hashlib.sha256()
        for index, path in enumerate(track(files.paths, "checking images", unit="image")):
            try:
                data = read_unchanged(path, self._stamps)
                decode_image(data)
            except Exception as error:  # Pillow's decoders raise anything: OSError, SyntaxError, struct.error, ...
                bad.append((path, describe_error(error)))
            else:
                good.append(index)
                digest.update(hashlib.sha256(data).digest())
        count = len(files.paths)
        if not count:
            raise UserError("no images given: name at least one")
        first = f"the first is {bad[0][0]}: {bad[0][1]}" if bad else ""
        if len(bad) / count > max_corrupt:
            raise UserError(
                f"{len(bad)} of {count} images do not decode, more than the allowed share of {max_corrupt:g}; {first}"
            )
        if not good:
            raise UserError(f"none of {count} images decodes; {first}")
        digest.update(processor.to_json_string().encode())
        self.fingerprint = digest.hexdigest()
        """SHA-256 in hex over the digests of the files' bytes, in order, and the processor's settings as JSON."""
        decoded = take_images(files, good)
        self.paths, self.split = decoded.paths, decoded.split
        self.labels = None if decoded.labels is None else torch.tensor(decoded.labels, dtype=torch.int64)
        self.skipped = tuple(str(path) for path, _ in bad)
        self.size = tuple(self._read_pixels(self.paths[0]).shape)

    def take_classes(self, files: ImageFiles) -> None:
        """Take the classes of the images from files that have them, if those have all of these images."""
        classes = dict(zip(files.paths, files.labels or (), strict=files.labels is not None))
        if classes.keys() >= set(self.paths):
            self.labels = torch.tensor([classes[path] for path in self.paths])

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def tokens(self) -> int:
        """Tokens of one image inside the model."""
        height, width = self.size[1:]
        return self._tokens((height, width))

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Decode and preprocess a run of images: `pixel_values`, float32 (images, channels, height, width), on CPU."""
        paths = self.paths[rows]
        values = torch.empty(len(paths), *self.size)
        for row, path in enumerate(paths):
            pixels = self._read_pixels(path)
            if tuple(pixels.shape) != self.size:
                raise UserError(
                    f"{path} is {_times(pixels.shape)} after preprocessing, {self.paths[0]} is {_times(self.size)}: "
                    f"images must come out in one size; set a crop or a fixed size in {PROCESSOR}"
                )
            values[row] = pixels
        return {"pixel_values": values}

    def _process(self, path: Path, **settings: Any) -> Any:
        """Return what the image processor makes of an image under these settings."""
        try:
            image = decode_image(read_unchanged(path, self._stamps))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path} does not decode any more: {describe_error(error)}") from error
        try:
            return self._processor(images=image, return_tensors="pt", **settings)
        except Exception as error:  # anything, a processor being any code
            raise UserError(f"{path}: the image processor fails on it: {describe_error(error)}") from error

    def _read_pixels(self, path: Path) -> Tensor:
        values: Tensor = self._process(path)["pixel_values"]
        if values.dim() != 4 or len(values) != 1:
            raise UserError(
                f"the image processor makes {_times(values.shape)} values of one image, not 1 x channels x height x "
                "width: models that cut images into tiles are not supported"
            )
        return values[0].float()


def makes_one_size(processor: Any, settings: Mapping[str, Any]) -> bool:
    """Return whether an image processor makes one array of any image, and all of one size: no tiles and no patches."""
    blanks = (Image.new("RGB", size) for size in (_BLANK, (2 * _BLANK[0], _BLANK[1])))
    try:
        made = [processor(images=each, return_tensors="pt", **settings).get("pixel_values") for each in blanks]
        shapes = {() if each is None else tuple(each.shape) for each in made}  # patches may have a name of their own
    except Exception as error:  # anything, a processor being any code
        raise UserError(f"the image processor makes no image of a blank one: {describe_error(error)}") from error
    first, *others = shapes
    return not others and len(first) == 4 and first[0] == 1


def size_of_blank(processor: Any) -> tuple[int, int]:
    """Return height and width that an image processor makes of a square image; UserError if it makes none."""
    try:
        height, width = processor(images=Image.new("RGB", _BLANK), return_tensors="pt")["pixel_values"].shape[-2:]
    except Exception as error:  # anything, a processor being any code
        raise UserError(f"the image processor makes no image of a blank one: {describe_error(error)}") from error
    return int(height), int(width)


def decode_image(data: bytes) -> Image.Image:
    """Decode an image in eight bits of red, green and blue, the right side up. Pillow raises anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata, or palettes with transparency: the pixels are there
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _scale_to_eight_bits(image, turn_upright(image)).convert("RGB")  # reads every pixel


def turn_upright(image: Image.Image) -> Image.Image:
    """Turn an image as every viewer does, by the mark with which a camera says which side is up."""
    try:
        return exif_transpose(image)
    except Exception:  # a damaged mark says nothing
        return image


_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
"""Tags of TIFF."""


def _scale_to_eight_bits(file: Image.Image, image: Image.Image) -> Image.Image:
    """Return an image whose pixels go up to 255: Pillow cuts those of 16 bits off there, so that all would be white.

    `file` is the image as it was opened, with what its format says.
    """
    sixteen_bits = image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM"))
    if not sixteen_bits and image.mode not in ("I", "F"):
        return image
    if not sixteen_bits:
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(
            f"its pixels are {kind} of 32 bits, and nothing says which is white: save it with 8 or 16 bits"
        )
    tags: Any = getattr(file, "tag_v2", {})
    (bits, *_) = tags.get(_BITS, (16,))
    white = 2**bits - 1
    grey = (np.asarray(image).astype(np.int64) * 255 + white // 2) // white
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = 255 - grey
    return Image.fromarray(grey.astype(np.uint8))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)
