"""The image processor of a checkpoint, loaded without running code that was not asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from ckpt_prune.checkpoint.digests import PROCESSOR, PROCESSOR_OF_ALL
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.progress import say_once
from ckpt_prune.measure.samples.image_files import describe_error
from ckpt_prune.model.skeleton import parse_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SIZES = ("size", "crop_size", "pad_size")
_AREAS = ("longest_edge", "max_pixels")
"""Some processors bound an image by these; nothing is made as large."""
_LONGEST_SIDE = 8192
"""Pixels; images of published models have at most 1536."""


def load_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the image processor of a checkpoint folder, from local files only.

    Always transformers' Pillow implementation of it. By default transformers takes the torchvision one if that is
    installed, which resizes by other code: the same command could then measure other numbers on another machine. A
    processor that has no Pillow implementation loads only if torchvision is installed.

    Args:
        trust_remote_code: run the processor's own code if its file names some and transformers has none. The model's
            code is never run.
    """
    path, settings = read_settings(folder)
    _check_sizes(path, settings)
    config = _read_stock_config(folder)
    try:
        return _load(folder, config, trust=False)
    except Exception as error:  # transformers raises anything here, from KeyError to what a bad value runs into
        refuse_without_torchvision(folder, "image processor", error)
        if not _needs_own_code(settings, config):
            raise UserError(f"{folder}: the image processor does not load: {describe_error(error)}") from error
        if not trust_remote_code:
            raise UserError(
                f"{path} asks for remote code (auto_map); read that code, then say --trust-remote-code to run it"
            ) from error
    try:
        return _load(folder, config, trust=True)
    except Exception as error:  # whatever that code raises
        raise UserError(f"{folder}: the image processor does not load: {describe_error(error)}") from error


def refuse_without_torchvision(folder: Path, processor: str, error: Exception) -> None:
    """Raise UserError if what a processor raised says that torchvision is missing, as DINOv3's and Pixtral's do."""
    if "torchvision" in str(error).lower() and not transformers.utils.is_torchvision_available():
        raise UserError(
            f"{folder}: its {processor} needs torchvision: install the torchvision of your torch build"
        ) from error


def image_settings(model_type: str) -> dict[str, Any]:
    """Return how the stock processor of a model of images with text calls its image processor: in tiles, for one."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES  # it loads all that loads models

    try:
        stock = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(model_type, ""), None)
        settings = getattr(stock, "images_kwargs", {})
        return {name: value for name, value in settings.items() if name != "return_tensors"}  # which callers say
    except ImportError as error:  # a package that it reads videos with, or writes numbers out
        say_once(f"images are prepared as the image processor of {model_type} does by itself: {one_line(error)}")
        return {}


def _load(folder: Path, config: "PreTrainedConfig", *, trust: bool) -> Any:
    # With a config given, transformers does not load the model's own, which under trust would run the model's code.
    return transformers.AutoImageProcessor.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        trust_remote_code=trust,
        backend="pil",
        image_processor_filename=PROCESSOR,
    )


def read_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that transformers takes the image processor from, and what it says of it."""
    of_all, own = folder / PROCESSOR_OF_ALL, folder / PROCESSOR
    if of_all.is_file():
        settings = read_json_object(of_all).get("image_processor")
        if isinstance(settings, dict):
            return of_all, settings
        if settings is not None:
            raise UserError(f"{of_all}: image_processor is not a JSON object; download or restore the file")
    if not own.is_file():
        raise UserError(f"{folder}: no image processor ({PROCESSOR}); copy the model's {PROCESSOR} into the folder")
    return own, read_json_object(own)


def _check_sizes(path: Path, settings: Mapping[str, Any], inside: bool = False) -> None:
    """Refuse sides that no image is resized to: one of 100,000 pixels takes 30 GB."""
    for key, value in settings.items():
        sized = inside or key in _SIZES
        if isinstance(value, dict):
            _check_sizes(path, value, sized)
        elif sized and key not in _AREAS and isinstance(value, int | float) and value > _LONGEST_SIDE:
            raise UserError(f"{path}: {key} is {value}, and {_LONGEST_SIDE} pixels are the longest side that is read")


def _read_stock_config(folder: Path) -> "PreTrainedConfig":
    """Return the model's config as transformers' own class, or an empty one if it has none.

    It says which processor is meant if the processor's file does not.
    """
    try:
        return parse_config(read_json_object(folder / "config.json"))
    except (UserError, KeyError):
        return transformers.PreTrainedConfig()


def _needs_own_code(settings: Mapping[str, Any], config: "PreTrainedConfig") -> bool:
    """Return True if the processor's file names code, and transformers has no class under the names it goes by."""
    auto_map, name = settings.get("auto_map"), settings.get("image_processor_type")
    if not isinstance(auto_map, dict):
        return False
    if "AutoImageProcessor" not in auto_map:
        if name or "AutoFeatureExtractor" not in auto_map:
            return False
        name = str(settings.get("feature_extractor_type") or "").replace("FeatureExtractor", "ImageProcessor")
    name = str(name or getattr(config, "image_processor_type", "")).removesuffix("Fast")
    if name:
        return not any(hasattr(transformers, name + backend) for backend in ("", "Pil"))
    return type(config) not in transformers.IMAGE_PROCESSOR_MAPPING
