"""Images as model input: decoded and processed when a batch is asked for."""

import hashlib
import io
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.ImageOps import exif_transpose
from torch import Tensor

from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import track
from ckpt_prune.measure.samples.image_files import FORMATS, ImageFiles, describe_error, take_images


class ImageSamples:
    """Images as a model is called with them, decoded when they are asked for.

    Every file is read and decoded once when this is made, so that a damaged one is known before any work; it is left
    out and named. Each image is preprocessed by itself, so values do not depend on how images are batched.

    Args:
        files: Images, with their classes or without.
        processor: The checkpoint's image processor, from `load_processor`.
        tokens: (height, width) after preprocessing → tokens the model makes of such an image. Called when the number
            is asked for, which measuring a classifier does not: it may refuse a model of unknown family.
        max_corrupt: Share of the images that may fail to decode.

    Attributes:
        paths: The images that decode, in order.
        labels: Their classes, int64 (N,), or None.
        skipped: Paths of those that do not decode, in order.
        size: (channels, height, width) of every image after preprocessing.

    Raises:
        UserError: More images than `max_corrupt` allows do not decode, or all; the processor fails on the first one
            or makes something else of it than one tensor (C, H, W).
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
        good, bad, digest = [], [], hashlib.sha256()
        for index, path in enumerate(track(files.paths, "checking images", unit="image")):
            try:
                data = path.read_bytes()
                _decode(data)
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
        self._fingerprint = digest.hexdigest()
        kept = take_images(files, good)
        self.paths = kept.paths
        self.labels = None if kept.labels is None else torch.tensor(kept.labels, dtype=torch.int64)
        self.skipped = tuple(str(path) for path, _ in bad)
        self.size = tuple(self._pixels(self.paths[0]).shape)

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def tokens(self) -> int:
        """Tokens of one image inside the model."""
        height, width = self.size[1:]
        return self._tokens((height, width))

    @property
    def fingerprint(self) -> str:
        """sha256 in hex over the digests of the files' bytes, in order, and the processor's settings as JSON."""
        return self._fingerprint

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Decode and preprocess a run of images.

        Returns:
            `pixel_values`, float32 (images, channels, height, width), on CPU.

        Raises:
            UserError: An image comes out in another size than the first one, or no longer decodes.
        """
        paths = self.paths[rows]
        values = torch.empty(len(paths), *self.size)
        for row, path in enumerate(paths):
            pixels = self._pixels(path)
            if tuple(pixels.shape) != self.size:
                raise UserError(
                    f"{path} is {_times(pixels.shape)} after preprocessing, {self.paths[0]} is {_times(self.size)}: "
                    f"images must come out in one size; set a crop or a fixed size in {PROCESSOR}"
                )
            values[row] = pixels
        return {"pixel_values": values}

    def _pixels(self, path: Path) -> Tensor:
        try:
            image = _decode(path.read_bytes())
        except Exception as error:
            raise UserError(f"{path} does not decode any more: {describe_error(error)}") from error
        try:
            made = self._processor(images=image, return_tensors="pt")
        except Exception as error:  # anything, a processor being any code
            raise UserError(f"{path}: the image processor fails on it: {describe_error(error)}") from error
        return self._values(path, made)

    def _values(self, path: Path, made: Any) -> Tensor:
        """Of what the processor makes of one image."""
        values: Tensor = made["pixel_values"]
        if values.dim() != 4 or len(values) != 1:
            raise UserError(
                f"the image processor makes {_times(values.shape)} values of one image, not 1 x channels x height x "
                "width: models that cut images into tiles are not supported"
            )
        return values[0].float()


class PatchSamples(ImageSamples):
    """Images as patches that are cut out beforehand (Qwen-VL), the same rows and columns of each.

    Attributes:
        size: (patches, numbers of one) of every image.
    """

    _grid: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Patches of one image."""
        return int(self.size[0])

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Decode and preprocess a run of images.

        Returns:
            `hidden_states`, float32 (images x patches, numbers), and `grid_thw`, int64 (images, 3), on CPU.
        """
        values = super().batch(rows)["pixel_values"]
        assert self._grid is not None
        return {"hidden_states": values.flatten(0, 1), "grid_thw": self._grid.repeat(len(values), 1)}

    def _values(self, path: Path, made: Any) -> Tensor:
        values, grid = made.get("pixel_values"), made.get("image_grid_thw")
        if grid is None or len(grid) != 1 or values.dim() != 2:
            raise UserError(f"{path}: the image processor makes no patches of it with their rows and columns")
        if self._grid is None:
            self._grid = grid
        if not torch.equal(grid, self._grid):
            mine, first = (" x ".join(map(str, each[0, 1:].tolist())) for each in (grid, self._grid))
            raise UserError(
                f"{path} is cut into {mine} patches, {self.paths[0]} into {first}: give images of one size "
                "(`mogrify -resize 448x448! *.jpg` makes such)"
            )
        found: Tensor = values.float()
        return found


def _decode(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata, or palettes with transparency: the pixels are there
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _eight_bits(image, turn_upright(image)).convert("RGB")  # reads every pixel


def turn_upright(image: Image.Image) -> Image.Image:
    """An image as every viewer shows it: a camera says by a mark which side is up."""
    try:
        return exif_transpose(image)
    except Exception:  # marks that are damaged say nothing
        return image


_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
"""Tags of TIFF."""


def _eight_bits(file: Image.Image, image: Image.Image) -> Image.Image:
    """An image whose pixels go up to 255: Pillow cuts those of 16 bits off there, so that they would all be white.

    Args:
        file: as it was opened, with what its format says.
        image: its pixels.

    Raises:
        ValueError: its pixels are numbers of 32 bits, whose white nothing says.
    """
    deep = image.mode.startswith("I;16") or (image.mode == "I" and file.format in ("PNG", "PPM"))
    if not deep and image.mode not in ("I", "F"):
        return image
    if not deep:
        kind = "floats" if image.mode == "F" else "integers"
        raise ValueError(
            f"its pixels are {kind} of 32 bits, and nothing says which is white: save it with 8 or 16 bits"
        )
    tags: Any = getattr(file, "tag_v2", {})
    (bits, *_) = tags.get(_BITS, (16,))
    most = 2**bits - 1
    values = np.asarray(image).astype(np.int64)
    grey = (values * 255 + most // 2) // most
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = 255 - grey
    return Image.fromarray(grey.astype(np.uint8))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)
