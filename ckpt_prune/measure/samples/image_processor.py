"""The image processor of a checkpoint: its settings and its class, without running code that was not asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor, PreTrainedConfig
from transformers.utils import is_torchvision_available

from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.checkpoint.digests import PROCESSOR, PROCESSOR_OF_ALL
from ckpt_prune.checkpoint.json_files import read_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.measure.samples.image_files import describe_error

_SIZES = ("size", "crop_size", "pad_size")
_AREAS = ("longest_edge", "max_pixels")
"""What some processors bound an image by; nothing is made as large as that."""
_LONGEST_SIDE = 8192
"""Pixels; images of published models have at most 1536."""


def load_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the image processor of a checkpoint folder, from local files only.

    Always transformers' Pillow implementation of it. By default transformers takes the torchvision one where that is
    installed, which resizes by other code: the same command could then measure other numbers on another machine. A
    processor that has no Pillow implementation loads only where torchvision is installed.

    Args:
        folder: A checkpoint folder.
        trust_remote_code: Run the processor's own code where its file names some and transformers has none. The
            model's code is never run.

    Raises:
        UserError: The folder has no image processor, it wants code to be run, or transformers cannot load it.
    """
    path, described = _settings(folder)
    _check_sizes(path, described)
    config = _stock_config(folder)
    try:
        return _from_pretrained(folder, config, trust=False)
    except Exception as error:  # transformers raises anything here, from KeyError to what a bad value runs into
        if "torchvision" in str(error).lower() and not is_torchvision_available():
            raise UserError(
                f"{folder}: its image processor has torchvision's implementation alone (DINOv3's has): install the "
                "torchvision of your torch build"
            ) from error
        if not _wants_code(described, config):
            raise UserError(f"{folder}: the image processor does not load: {describe_error(error)}") from error
        if not trust_remote_code:
            raise UserError(
                f"{path} asks for remote code (auto_map); read that code, then say --trust-remote-code to run it"
            ) from error
    try:
        return _from_pretrained(folder, config, trust=True)
    except Exception as error:  # whatever that code raises
        raise UserError(f"{folder}: the image processor does not load: {describe_error(error)}") from error


def _from_pretrained(folder: Path, config: PreTrainedConfig, *, trust: bool) -> Any:
    # With a config given, transformers does not load the model's own, which under trust would run the model's code.
    return AutoImageProcessor.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        trust_remote_code=trust,
        backend="pil",
        image_processor_filename=PROCESSOR,
    )


def _settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that transformers takes the image processor from, and what it says of it."""
    of_all, own = folder / PROCESSOR_OF_ALL, folder / PROCESSOR
    if of_all.is_file():
        part = read_json_object(of_all).get("image_processor")
        if isinstance(part, dict):
            return of_all, part
        if part is not None:
            raise UserError(f"{of_all}: image_processor is not a JSON object; download or restore the file")
    if not own.is_file():
        raise UserError(f"{folder}: no image processor ({PROCESSOR}); copy the model's {PROCESSOR} into the folder")
    return own, read_json_object(own)


def _check_sizes(path: Path, described: Mapping[str, Any], inside: bool = False) -> None:
    """Refuse sides that no image is resized to: one of 100,000 takes 30 GB."""
    for key, value in described.items():
        sized = inside or key in _SIZES
        if isinstance(value, dict):
            _check_sizes(path, value, sized)
        elif sized and key not in _AREAS and isinstance(value, int | float) and value > _LONGEST_SIDE:
            raise UserError(f"{path}: {key} is {value}, and {_LONGEST_SIDE} pixels are the longest side that is read")


def _stock_config(folder: Path) -> PreTrainedConfig:
    """The model's config as transformers' own class, an empty one where it has none: it says which processor is meant.

    Only looked at where the processor's file does not say.
    """
    try:
        return parse_config(read_json_object(folder / "config.json"))
    except (UserError, KeyError):
        return PreTrainedConfig()


def _wants_code(described: Mapping[str, Any], config: PreTrainedConfig) -> bool:
    """Whether the processor's file names code for what transformers has no class for, under the names it goes by."""
    auto_map, name = described.get("auto_map"), described.get("image_processor_type")
    if not isinstance(auto_map, dict):
        return False
    if "AutoImageProcessor" not in auto_map:
        if name or "AutoFeatureExtractor" not in auto_map:
            return False
        name = str(described.get("feature_extractor_type") or "").replace("FeatureExtractor", "ImageProcessor")
    name = str(name or getattr(config, "image_processor_type", "")).removesuffix("Fast")
    if name:
        return not any(hasattr(transformers, name + backend) for backend in ("", "Pil"))
    return type(config) not in IMAGE_PROCESSOR_MAPPING
