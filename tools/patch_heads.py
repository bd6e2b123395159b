"""A linear head on every patch of an image: classes (segmentation) or a number (depth)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ckpt_prune.checkpoint.checkpoint import read_tensors
from ckpt_prune.checkpoint.shard import read_header
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.evaluation.batches import check_finite, iterate_samples
from ckpt_prune.evaluation.label_maps import ClassTally, DepthScores, DepthTally, LabelMaps, Segmentation, Tally
from ckpt_prune.measure.samples.samples import Samples, move_batch

_PREFIXES = ("decode_head.", "conv_seg.")
"""Of names in DINOv2's released heads, before `weight` and `bias` of the 1 × 1 convolution."""
_NORM = ("bn.running_mean", "bn.running_var", "bn.weight", "bn.bias")
_COUNTED = "bn.num_batches_tracked"
_NORM_EPSILON = 1e-5
"""PyTorch's, which DINOv2's heads keep."""


@dataclass(frozen=True)
class PatchHead:
    """A linear map of one patch's token: weight (outputs, d) and bias (outputs,) float64, a batch norm absorbed.

    One output is a number, several are classes.
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, patches: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        """Read out one image's patches (rows · columns, d), bilinear between them: (outputs, height, width)."""
        outputs = patches @ self.weight.to(patches).T + self.bias.to(patches)
        planes = outputs.T.reshape(1, -1, *grid)
        return functional.interpolate(planes, size, mode="bilinear", align_corners=False)[0]


def read_patch_head(path: Path) -> PatchHead:
    """Read a linear head from a safetensors file.

    Tensors: `weight` (outputs, d) or (outputs, d, 1, 1); perhaps `bias` (outputs,); perhaps a batch norm before them,
    `bn.running_mean`, `bn.running_var` and perhaps `bn.weight` and `bn.bias`, each (d,). Names may be those of
    DINOv2's released heads, `decode_head.conv_seg.weight` and `decode_head.bn.…`.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such head")
    stored = read_header(path).tensors
    names = {name.removeprefix(_PREFIXES[0]).removeprefix(_PREFIXES[1]): name for name in stored}
    unknown = sorted(names.keys() - {"weight", "bias", *_NORM, _COUNTED})
    if "weight" not in names or unknown:
        what = f"tensor {names[unknown[0]]} is" if unknown else "there is no tensor weight, which is"
        raise UserError(
            f"{path}: {what} not of a linear head on patches: weight (outputs, d), and perhaps bias and "
            "bn.running_mean, bn.running_var, bn.weight, bn.bias"
        )
    read = read_tensors(path.parent, stored.values())
    tensors = {short: read[name].double() for short, name in names.items() if short != _COUNTED}
    weight = tensors.pop("weight")
    if weight.dim() == 4 and weight.shape[2:] == (1, 1):
        weight = weight[:, :, 0, 0]
    if weight.dim() != 2:
        raise UserError(f"{path}: weight is {_shape(weight)}, not outputs x d or outputs x d x 1 x 1")
    outputs, width = weight.shape
    for short, tensor in tensors.items():
        length = outputs if short == "bias" else width
        if tuple(tensor.shape) != (length,):
            raise UserError(
                f"{path}: {names[short]} is {_shape(tensor)}, not {length} for a weight of {_shape(weight)}"
            )
    bias = tensors.pop("bias", weight.new_zeros(outputs))
    if tensors:  # a batch norm, absorbed: W((x − m) g / √(v + ε) + b) + c
        if not {*_NORM[:2]} <= tensors.keys():
            raise UserError(f"{path}: {min(tensors)} without bn.running_mean and bn.running_var")
        mean, variance = tensors[_NORM[0]], tensors[_NORM[1]]
        gain = tensors.get("bn.weight", torch.ones_like(mean)) / (variance + _NORM_EPSILON).sqrt()
        shift = tensors.get("bn.bias", torch.zeros_like(mean)) - mean * gain
        weight, bias = weight * gain, bias + weight @ shift
    if not (all_finite(weight) and all_finite(bias)):
        raise UserError(f"{path}: the head's numbers are not finite")
    return PatchHead(weight, bias)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"


def patch_grid(config: Any, batch: dict[str, Tensor]) -> tuple[int, int]:
    """Return rows and columns of the patches that every image of a batch is cut into."""
    patch = config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    rows, columns = batch["pixel_values"].shape[-2:]
    return rows // height, columns // width


@torch.inference_mode()
def measure_patch_head(
    models: Sequence[PreTrainedModel], head: PatchHead, samples: Samples, maps: LabelMaps
) -> tuple[list[Segmentation | DepthScores], float | None]:
    """Read patches of the last hidden states, behind their norm, out by a head, and compare the outputs with maps.

    Returns:
        The score of each of one or two models, and the share of the labelled pixels that two put in one class; None if
        there is one model, or the head gives numbers.
    """
    outputs, pixels, agreeing = len(head.weight), 0, 0
    tallies: list[Tally] = [DepthTally(1.0) if outputs == 1 else ClassTally(outputs) for _ in models]
    for start, batch in iterate_samples(samples, "patches"):
        patches = [_run(model, batch, head) for model in models]
        grid = patch_grid(models[0].config, batch)
        for row in range(len(patches[0])):
            truth = maps.read(start + row)
            there = truth >= 0
            planes = [head(tokens[row], grid, (truth.shape[0], truth.shape[1]))[:, there] for tokens in patches]
            told = [plane[0] if outputs == 1 else plane.argmax(0) for plane in planes]
            for tally, own in zip(tallies, told, strict=True):
                tally.add(own, truth[there])
            pixels += int(there.sum())
            agreeing += int((told[0] == told[-1]).sum())
    scores = [tally.score() for tally in tallies]
    return scores, agreeing / pixels if len(models) > 1 and outputs > 1 else None


def _run(model: PreTrainedModel, batch: dict[str, Tensor], head: PatchHead) -> Tensor:
    """Return the tokens of patches, (images, patches, d) float32 on CPU: the last ones in every family."""
    base: Any = model.base_model
    states = base.eval()(**move_batch(batch, model.device, model.dtype)).last_hidden_state.float().cpu()
    rows, columns = patch_grid(model.config, batch)
    if states.dim() != 3 or states.shape[1] < rows * columns:
        raise UserError(f"the model does not give a token for each of {rows} x {columns} patches")
    if states.shape[2] != head.weight.shape[1]:
        raise UserError(
            f"the head reads {head.weight.shape[1]} numbers of a patch, the model gives {states.shape[2]}: heads on "
            "several blocks, or with the class token beside every patch, are not read"
        )
    patches: Tensor = states[:, -rows * columns :]
    check_finite("model's features", patches)
    return patches
