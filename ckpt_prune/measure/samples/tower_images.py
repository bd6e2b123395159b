"""Images as the tower of a vision language model is handed them by the model around it."""

from inspect import Parameter, signature
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.measure.samples.image_files import ImageFiles
from ckpt_prune.measure.samples.image_processor import image_settings, read_settings
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.model.composites import load_composite
from ckpt_prune.model.skeleton import build_skeleton, parse_config, stock_class

if TYPE_CHECKING:
    from ckpt_prune.model.model import Model

_LOOKS = ("get_image_features", "forward")
"""Methods by which models look at what their image processor makes of images, or do so before anything else."""


class _TowerReachedError(Exception):
    """Raised instead of running a tower, with what it was called with."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.options = arguments, options


class TowerImages(ImageSamples):
    """Images as a tower is called with them: in tiles, as patches with their places, or whole in any size.

    The stock class of the whole, without weights, is shown what its image processor makes of an image, up to where it
    calls the tower. Each image has as many tokens as it needs, so that one is taken at a time.
    """

    varies = True

    def __init__(self, files: ImageFiles, processor: Any, model: "Model", *, max_corrupt: float = 0.05) -> None:
        within = model.checkpoint.within
        assert within is not None
        composite, config = load_composite(within.whole.config), parse_config(within.whole.config)
        self._settings = image_settings(within.whole.config["model_type"])
        self._whole: Any = build_skeleton(config, composite.architecture)
        (path,) = composite.part(within.part).modules
        self._tower, self._model = self._whole.get_submodule(path), model
        inside = [*self._whole.modules()]  # it may be a module in the whole that looks
        self._look = next(getattr(each, name) for name in _LOOKS for each in inside if hasattr(each, name))
        super().__init__(files, processor, tokens=model.image_tokens, max_corrupt=max_corrupt)

    @property
    def tokens(self) -> int:
        """Tokens of the first image: others may have more or fewer."""
        if self._model.family.stride is not None:
            tiles, *_, rows, columns = self.size
            return rows if len(self.size) == 3 else tiles * self._tokens((rows, columns))
        config, channels = self._model.config, getattr(self._model.config, "num_channels", 3)
        sizes = (getattr(config, key, 1) for key in ("patch_size", "temporal_patch_size"))
        patch, frames = (size if isinstance(size, list | tuple) else (size,) for size in sizes)
        numbers = int(channels * patch[0] * patch[-1] * frames[0])
        tiles = self.size[0] if len(self.size) == 4 else 1
        return prod(self.size) // numbers + tiles * self._model.family.special_tokens

    def batch(self, rows: slice) -> dict[str, Tensor]:
        """Decode and preprocess one image: what the tower is called with, on CPU."""
        (path,) = self.paths[rows]
        return self._call(path)

    def _read_pixels(self, path: Path) -> Tensor:
        return next(each for each in self._call(path).values() if each.is_floating_point())

    @torch.no_grad()
    def _call(self, path: Path) -> dict[str, Tensor]:
        processed = self._process(path, **self._settings)

        def stop(_module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            raise _TowerReachedError(arguments, options)

        taken = signature(self._look).parameters.keys()
        words = {"input_ids": torch.zeros(1, 1, dtype=torch.long)} if "input_ids" in taken else {}
        hook = self._tower.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._look(**words, **{name: each for name, each in processed.items() if name in taken})
        except _TowerReachedError as reached:
            called = signature(self._tower.forward).bind(*reached.arguments, **reached.options).arguments
            given = called | called.get("kwargs", {})
            return {name: each for name, each in given.items() if isinstance(each, Tensor)}
        except Exception as error:  # whatever the class makes of another model's processor
            raise UserError(
                f"{path}: the model does not take what its processor makes of it: {one_line(error)}"
            ) from error
        finally:
            hook.remove()
        raise UserError(f"{type(self._whole).__name__} does not call {type(self._tower).__name__} for an image alone")


def check_reads_whole(model: "Model", processor: Any) -> None:
    """Refuse an image processor that makes whole images for a tower that is handed something else with them."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    within = model.checkpoint.within
    assert within is not None
    tower = stock_class(model.family.architecture, model.config)
    _self, _images, *others = signature(tower.forward).parameters.items()
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    if needed := [name for name, each in others if each.default is Parameter.empty and each.kind in kinds]:
        own = type(processor).__name__.removesuffix("Pil")
        stock = IMAGE_PROCESSOR_MAPPING_NAMES.get(within.whole.config["model_type"], {}).get("torchvision")
        file, _ = read_settings(model.checkpoint.path)
        raise UserError(
            f"{file}: {own} makes whole images of one size, and {tower.__name__} reads {' and '.join(needed)} beside "
            f"images, as {stock or 'its own processor'} makes: put the model's own file in its place"
        )
