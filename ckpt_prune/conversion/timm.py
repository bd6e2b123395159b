"""Reads a plain vision transformer of timm as transformers' ViT, or as DeiT if it has a distillation token."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.digests import PROCESSOR
from ckpt_prune.checkpoint.json_files import pretty_json
from ckpt_prune.common.errors import UserError
from ckpt_prune.conversion.stock_checkpoint import NewTensor, StockCheckpoint

PLAIN = re.compile(r"(vit|deit|deit3)_(tiny|small|medium|base|large|huge)(_distilled)?_patch\d+_\d+")
"""Models of timm that compute what transformers' ViT does: a norm before each part, GELU, the class token read out."""
HEADS = {"tiny": 3, "small": 6, "medium": 8, "base": 12, "large": 16, "huge": 16}
_SHOWN = frozenset({"img_size", "embed_dim", "depth", "num_heads", "in_chans", "num_classes", "global_pool"})
"""Arguments of an architecture that only state sizes, which its tensors show, or that are checked separately."""
_WRAPPED = "timm_model."
_RESAMPLE = {"bilinear": 2, "bicubic": 3}
_EPS = 1e-6

_PARTS = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "attn.proj": "attention.output.dense",
}
"""Module of a block in timm → its name in transformers' files."""
_AXES = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "head.weight": 2}
"""Number of axes of tensors whose shapes say what the model is."""
_SCALES = {"attn.proj": "ls1.gamma", "mlp.fc2": "ls2.gamma"}
"""Projection → the layer scale of its output."""


def vit_of_timm(checkpoint: Checkpoint) -> StockCheckpoint:
    """Return a timm folder as ViT or DeiT; UserError if neither computes the same.

    Layer scales are absorbed by the projections before them: in float64, rounded once.
    """
    source = _Source.of(checkpoint)
    renamer = _Renamer(source)
    renamer.add_outside()
    for block in range(source.depth):
        renamer.add_block(block)
    if unknown := source.names() - renamer.used:
        raise UserError(
            f"{checkpoint.path} has tensor {min(unknown)} ({len(unknown)} such), which a plain vision transformer has "
            "no place for"
        )
    absorbed = f"{renamer.scales} layer scales are absorbed by the projections before them"
    notes = (absorbed,) if renamer.scales else ()
    texts = {PROCESSOR: pretty_json(source.processor())}
    return StockCheckpoint.of(checkpoint, source.config(), renamer.tensors, texts=texts, notes=notes)


@dataclass(frozen=True)
class _Source:
    """A timm folder: prefix of its tensors' names, height and width of an image, and timm's `pretrained_cfg`."""

    checkpoint: Checkpoint
    prefix: str
    heads: int
    size: tuple[int, int]
    data: dict[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "_Source":
        config, path = checkpoint.config, checkpoint.path
        architecture = str(config["architecture"]).split(".")[0]
        match = PLAIN.fullmatch(architecture)
        if match is None:
            raise UserError(
                f"{path} holds timm's {architecture}: only plain vit, deit and deit3 (PATCH and image size after their "
                "size, nothing else) compute what a stock class of transformers does"
            )
        changes = dict(config.get("model_args") or {})
        if other := sorted(changes.keys() - _SHOWN):
            raise UserError(f"{path} changes {architecture} by model_args.{other[0]}, which is not known to be a ViT")
        for pool in (config.get("global_pool"), changes.get("global_pool")):
            if pool not in (None, "token"):
                raise UserError(f"{path} pools its tokens by global_pool {pool!r}, where ViT reads the class token")
        data = config.get("pretrained_cfg")
        is_complete = isinstance(data, dict) and all(_is_three(data.get(key)) for key in ("input_size", "mean", "std"))
        if not isinstance(data, dict) or not is_complete:
            raise UserError(
                f"{path}: config.json has no pretrained_cfg with input_size, mean and std, three numbers each"
            )
        prefix = _WRAPPED if any(name.startswith(_WRAPPED) for name in checkpoint.tensors) else ""
        size = changes.get("img_size") or data["input_size"][1:]
        height, width = (size, size) if isinstance(size, int) else size
        source = cls(checkpoint, prefix, int(changes.get("num_heads") or HEADS[match[2]]), (height, width), data)
        if source.distilled != (match[3] is not None):
            raise UserError(f"{path}: {architecture} and its tensors do not agree on a distillation token")
        if source.hidden % source.heads:
            raise UserError(f"{path}: {source.heads} heads do not divide its hidden size of {source.hidden}")
        return source

    def names(self) -> set[str]:
        """Return the names of all tensors, without the prefix."""
        return {name.removeprefix(self.prefix) for name in self.checkpoint.tensors}

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.checkpoint.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there."""
        if not self.has(name):
            raise UserError(f"{self.checkpoint.path} lacks tensor {self.prefix}{name}")
        shape = self.checkpoint.tensors[f"{self.prefix}{name}"].stored_shape
        if len(shape) != _AXES.get(name, len(shape)):
            raise UserError(f"{self.checkpoint.path}: {self.prefix}{name} has shape {list(shape)}, which no ViT's has")
        return shape

    @property
    def distilled(self) -> bool:
        return self.has("dist_token")

    @property
    def hidden(self) -> int:
        return self.shape("cls_token")[2]

    @property
    def depth(self) -> int:
        blocks = [re.match(r"blocks\.(\d+)\.", name) for name in self.names()]
        return 1 + max((int(match[1]) for match in blocks if match), default=-1)

    @property
    def headed(self) -> bool:
        return self.has("head.weight")

    @property
    def patch(self) -> int:
        return self.shape("patch_embed.proj.weight")[2]

    @property
    def lacking(self) -> int:
        """Tokens without a position: the class token if `no_embed_class` is set (DeiT III)."""
        patches = math.prod(side // self.patch for side in self.size)
        extra = 1 + self.distilled
        positions = self.shape("pos_embed")[1]
        if positions not in (patches, patches + extra):
            raise UserError(
                f"{self.checkpoint.path} has {positions} positions for {patches} patches and {extra} tokens beside them"
            )
        return patches + extra - positions

    def config(self) -> dict[str, Any]:
        """Return the config.json of the stock class."""
        height, width = self.size
        kind = "DeiT" if self.distilled else "ViT"
        head = "ForImageClassificationWithTeacher" if self.distilled else "ForImageClassification"
        values: dict[str, Any] = {
            "model_type": kind.lower(),
            "architectures": [f"{kind}{head if self.headed else 'Model'}"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "intermediate_size": self.shape("blocks.0.mlp.fc1.weight")[0],
            "hidden_act": "gelu",
            "layer_norm_eps": _EPS,
            "image_size": height if height == width else [height, width],
            "patch_size": self.patch,
            "num_channels": self.shape("patch_embed.proj.weight")[1],
            "qkv_bias": self.has("blocks.0.attn.qkv.bias"),
            "dtype": str(self.checkpoint.dtype).removeprefix("torch."),
        }
        if self.headed:
            names = self._classes()
            values |= {"id2label": names, "label2id": {name: int(index) for index, name in names.items()}}
        return values

    def _classes(self) -> dict[str, str]:
        count = self.shape("head.weight")[0]
        names = self.checkpoint.config.get("label_names")
        if not isinstance(names, list) or len(set(names)) != count or len(names) != count:
            names = [f"LABEL_{index}" for index in range(count)]
        return {str(index): str(name) for index, name in enumerate(names)}

    def processor(self) -> dict[str, Any]:
        """Return the preprocessor_config.json that prepares images as timm does to evaluate."""
        height, width = self.size
        mode, interpolation = self.data.get("crop_mode", "center"), self.data.get("interpolation", "bicubic")
        if mode not in ("center", "squash") or interpolation not in _RESAMPLE:
            raise UserError(
                f"{self.checkpoint.path} prepares images by crop_mode {mode} and interpolation {interpolation}, "
                "which no image processor does"
            )
        values: dict[str, Any] = {
            "do_resize": True,
            "resample": _RESAMPLE[interpolation],
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.data["mean"]),
            "image_std": list(self.data["std"]),
        }
        if mode == "squash" or height != width:
            return values | {"image_processor_type": "ViTImageProcessor", "size": {"height": height, "width": width}}
        return values | {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": math.floor(height / float(self.data.get("crop_pct") or 1.0))},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
            "do_convert_rgb": True,
        }


def _is_three(values: Any) -> bool:
    return isinstance(values, list) and len(values) == 3 and all(isinstance(each, int | float) for each in values)


class _Renamer:
    """Tensors of the new checkpoint by their new names, names of the source that were used, and absorbed scales."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.base = source.config()["model_type"] + "." if source.headed else ""
        self.tensors: dict[str, NewTensor] = {}
        self.used: set[str] = set()
        self.scales = 0

    def _put(self, name: str, old: str, tensor: NewTensor | None = None) -> None:
        """Give the source's tensor `old` a new name, unchanged by default."""
        self.used.add(old)
        self.tensors[name] = tensor or self._new([old], self.source.shape(old))

    def _new(self, names: Sequence[str], shape: tuple[int, ...], *make: Callable[..., Tensor]) -> NewTensor:
        return NewTensor.of(self.source.checkpoint, [f"{self.source.prefix}{name}" for name in names], shape, *make)

    def add_outside(self) -> None:
        source, base = self.source, self.base
        embeddings = f"{base}embeddings."
        self._put(f"{embeddings}cls_token", "cls_token")
        lacking, (_, positions, hidden) = source.lacking, source.shape("pos_embed")
        places = self._new(
            ["pos_embed"],
            (1, positions + lacking, hidden),
            lambda own: torch.cat([own.new_zeros(1, lacking, hidden), own], 1),
        )
        self._put(f"{embeddings}position_embeddings", "pos_embed", places)
        if source.distilled:
            self._put(f"{embeddings}distillation_token", "dist_token")
        kinds = ("weight", "bias")
        for kind in kinds:
            self._put(f"{embeddings}patch_embeddings.projection.{kind}", f"patch_embed.proj.{kind}")
            self._put(f"{base}layernorm.{kind}", f"norm.{kind}")
            if source.distilled and source.headed:
                self._put(f"cls_classifier.{kind}", f"head.{kind}")
                self._put(f"distillation_classifier.{kind}", f"head_dist.{kind}")
            elif source.headed:
                self._put(f"classifier.{kind}", f"head.{kind}")

    def add_block(self, index: int) -> None:
        source, old, new = self.source, f"blocks.{index}.", f"{self.base}encoder.layer.{index}."
        for kind in ("weight", "bias"):
            for module, name in _PARTS.items():
                self._put(f"{new}{name}.{kind}", f"{old}{module}.{kind}", self._absorb_scale(old, module, kind))
            if kind == "bias" and not source.has(f"{old}attn.qkv.bias"):
                continue
            fused = f"{old}attn.qkv.{kind}"
            rows, *rest = source.shape(fused)
            for place, name in enumerate(("query", "key", "value")):
                part = slice(place * rows // 3, (place + 1) * rows // 3)
                projection = self._new([fused], (rows // 3, *rest), lambda stacked, part=part: stacked[part])
                self._put(f"{new}attention.attention.{name}.{kind}", fused, projection)

    def _absorb_scale(self, block: str, module: str, kind: str) -> NewTensor | None:
        """Return a projection with its layer scale absorbed; None if it has none."""
        if module not in _SCALES or not self.source.has(block + _SCALES[module]):
            return None
        scale, weight = block + _SCALES[module], f"{block}{module}.{kind}"
        self.used.add(scale)
        self.scales += kind == "weight"
        return self._new([weight, scale], self.source.shape(weight), _times)


def _times(projection: Tensor, scale: Tensor) -> Tensor:
    """Return a weight (out, in) or bias (out,) times the scale of each output."""
    wide = projection.double() * scale.double().reshape(-1, *[1] * (projection.dim() - 1))
    return wide.to(projection.dtype)
