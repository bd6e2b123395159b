"""A linear head on every patch of an image: classes (segmentation) or a number (depth) (evaluation/README.md, 8)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.calibration.samples import Samples, as_input
from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.evaluation.batches import check_features, sample_batches
from ckpt_prune.evaluation.probes import patch_grid

_PREFIXES = ("decode_head.", "conv_seg.")
"""Of names in DINOv2's released heads, before `weight` and `bias` of the 1 × 1 convolution."""
_NORM = ("bn.running_mean", "bn.running_var", "bn.weight", "bn.bias")
_COUNTED = "bn.num_batches_tracked"
_NORM_EPSILON = 1e-5
"""PyTorch's, which DINOv2's heads keep."""


@dataclass(frozen=True)
class PatchHead:
    """What is made of one patch's token.

    Attributes:
        weight: (outputs, d) float64, a batch norm before it absorbed.
        bias: (outputs,) float64.
    """

    weight: Tensor
    bias: Tensor

    @property
    def outputs(self) -> int:
        """Classes; 1 where it gives a number."""
        return len(self.weight)

    def __call__(self, patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        """Read out one image, bilinear between patches.

        Args:
            patches: (rows · columns, d), row by row.
            grid: rows and columns.
            size: height and width of what is given.

        Returns:
            (outputs, height, width), in the dtype of `patches`.
        """
        found = patches @ self.weight.to(patches).T + self.bias.to(patches)
        planes = found.T.reshape(1, -1, *grid)
        return functional.interpolate(planes, size, mode="bilinear", align_corners=False)[0]


def read_patch_head(path: Path) -> PatchHead:
    """Read a linear head from a safetensors file.

    Tensors: `weight` (outputs, d) or (outputs, d, 1, 1); perhaps `bias` (outputs,); perhaps a batch norm before them,
    `bn.running_mean`, `bn.running_var` and perhaps `bn.weight` and `bn.bias`, each (d,). Names may be those of
    DINOv2's released heads, `decode_head.conv_seg.weight` and `decode_head.bn.…`.

    Raises:
        UserError: the file is not safetensors, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such head")
    tensors = read_header(path).tensors
    names: dict[str, str] = {}
    for name in tensors:
        short = name
        for prefix in _PREFIXES:
            short = short.removeprefix(prefix)
        names[short] = name
    known = {"weight", "bias", *_NORM, _COUNTED}
    unknown = sorted(set(names) - known)
    if "weight" not in names or unknown:
        what = f"tensor {names[unknown[0]]} is" if unknown else "there is no tensor weight, which is"
        raise UserError(
            f"{path}: {what} not of a linear head on patches: weight (outputs, d), and perhaps bias and "
            "bn.running_mean, bn.running_var, bn.weight, bn.bias"
        )
    read = read_tensors(path.parent, tensors.values())
    found = {short: read[name].double() for short, name in names.items() if short != _COUNTED}
    weight = found["weight"]
    if weight.dim() == 4 and weight.shape[2:] == (1, 1):
        weight = weight[:, :, 0, 0]
    if weight.dim() != 2:
        raise UserError(f"{path}: weight is {_times(weight)}, not outputs x d or outputs x d x 1 x 1")
    outputs, width = weight.shape
    for short, tensor in found.items():
        length = outputs if short == "bias" else width
        if short != "weight" and tuple(tensor.shape) != (length,):
            raise UserError(
                f"{path}: {names[short]} is {_times(tensor)}, not {length} for a weight of {_times(weight)}"
            )
    bias = found.get("bias", weight.new_zeros(outputs))
    head = _normalised(path, weight, bias, found)
    if not all(all_finite(each) for each in (head.weight, head.bias)):
        raise UserError(f"{path}: the head's numbers are not finite")
    return head


def _normalised(path: Path, weight: Tensor, bias: Tensor, found: dict[str, Tensor]) -> PatchHead:
    """A batch norm at inference, absorbed: W((x − m) g / √(v + ε) + b) + c."""
    norm = [name for name in _NORM if name in found]
    if not norm:
        return PatchHead(weight, bias)
    if not {*_NORM[:2]} <= set(norm):
        raise UserError(f"{path}: {norm[0]} without bn.running_mean and bn.running_var")
    mean, variance = found[_NORM[0]], found[_NORM[1]]
    gain = found.get("bn.weight", torch.ones_like(mean)) / (variance + _NORM_EPSILON).sqrt()
    shift = found.get("bn.bias", torch.zeros_like(mean)) - mean * gain
    return PatchHead(weight * gain, bias + weight @ shift)


def _times(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"


@dataclass(frozen=True)
class Segmentation:
    """How often a head is right about the class of a pixel.

    Attributes:
        miou: mean intersection over union of the classes that are labelled or predicted anywhere, 0 to 1.
        accuracy: share of the labelled pixels, 0 to 1.
        classes: intersection over union of each; None where it is neither labelled nor predicted.
        pixels: that are labelled.
    """

    miou: float
    accuracy: float
    classes: tuple[float | None, ...] = field(repr=False)
    pixels: int


def segmentation(confusion: Tensor) -> Segmentation:
    """Figures from pixels counted by class.

    Args:
        confusion: (classes, classes) int64: labelled in rows, predicted in columns.
    """
    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    share = [int(hit) / int(both) if both else None for hit, both in zip(right, union, strict=True)]
    there = [each for each in share if each is not None]
    pixels = int(confusion.sum())
    return Segmentation(sum(there) / len(there), int(right.sum()) / pixels, tuple(share), pixels)


@dataclass(frozen=True)
class Depth:
    """How far a head's numbers are from those of the maps.

    Attributes:
        rmse: root of the mean squared error over pixels, in the maps' unit.
        pixels: that have a number.
    """

    rmse: float
    pixels: int


class Maps(Protocol):
    """What is known of every pixel of images."""

    def of(self, index: int) -> Tensor:
        """Of one image, (height, width) int64; −1 where nothing is known."""
        ...


@dataclass(frozen=True)
class Measured:
    """A head on one or two models' patches.

    Attributes:
        scores: of each model, in order.
        agreement: share of the labelled pixels that two put in one class; None of one, or of numbers.
    """

    scores: tuple[Segmentation | Depth, ...]
    agreement: float | None


@torch.inference_mode()
def measure_patch_head(models: Sequence[PreTrainedModel], head: PatchHead, samples: Samples, maps: Maps) -> Measured:
    """Read patches of the last hidden states, behind their norm, out by a head, and hold them against maps.

    Args:
        models: one, or two to hold side by side. Heads of their own are left out.
        head: for patches of their hidden size.
        samples: images.
        maps: of these.

    Raises:
        UserError: the head is of another width, a model has no token for every patch, or gives no numbers.
    """
    pixels = agreed = 0
    confusions = [torch.zeros(head.outputs, head.outputs, dtype=torch.int64) for _ in models]
    errors = [0.0 for _ in models]
    for start, batch in sample_batches(samples, "patches"):
        tokens = [_patches(model, batch, head) for model in models]
        grid = patch_grid(models[0].config, batch)
        for row in range(len(tokens[0])):
            truth = maps.of(start + row)
            known = truth >= 0
            labels = truth[known]
            size = (truth.shape[0], truth.shape[1])
            planes = [head(each[row], grid, size)[:, known] for each in tokens]
            pixels += len(labels)
            if head.outputs == 1:
                for index, plane in enumerate(planes):
                    errors[index] += (plane[0].double() - labels).square().sum().item()
                continue
            picked = [plane.argmax(0) for plane in planes]
            for confusion, own in zip(confusions, picked, strict=True):
                confusion += torch.bincount(labels * head.outputs + own, minlength=head.outputs**2).view_as(confusion)
            agreed += int((picked[0] == picked[-1]).sum())
    if not pixels:
        raise UserError("no pixel of any label map is labelled")
    if head.outputs == 1:
        return Measured(tuple(Depth((error / pixels) ** 0.5, pixels) for error in errors), None)
    return Measured(tuple(map(segmentation, confusions)), agreed / pixels if len(models) > 1 else None)


def _patches(model: PreTrainedModel, batch: dict[str, Tensor], head: PatchHead) -> Tensor:
    """Tokens of patches, (images, patches, d) float32 on CPU: the last ones in every family."""
    base: Any = model.base_model
    states = base.eval()(**as_input(batch, model.device, model.dtype)).last_hidden_state.float().cpu()
    rows, columns = patch_grid(model.config, batch)
    if states.dim() != 3 or states.shape[1] < rows * columns:
        raise UserError(f"the model does not give a token for each of {rows} x {columns} patches")
    if states.shape[2] != head.weight.shape[1]:
        raise UserError(
            f"the head reads {head.weight.shape[1]} numbers of a patch, the model gives {states.shape[2]}: heads on "
            "several blocks, or with the class token beside every patch, are not read"
        )
    found: Tensor = states[:, -rows * columns :]
    check_features(finite=all_finite(found))
    return found
