"""How a model's graph is rounded to int8 or int4: what is asked for, and what harm is measured on."""

import math

import onnx_ir
import torch
from torch import Tensor

from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import plural
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.onnx.cases import noise_pixels, noise_windows
from ckpt_prune.onnx.manifest import ports
from ckpt_prune.onnx.outcome import ProofSamples
from ckpt_prune.onnx.quantization.deciding import Measuring, Scheme
from ckpt_prune.onnx.quantization.probe import Feed
from ckpt_prune.onnx.quantization.weights import split_gemms, weights_of
from ckpt_prune.onnx.session import Provider, complete
from ckpt_prune.onnx.tasks import PAST, PRESENT, Task
from ckpt_prune.onnx.validation import MAX_LOSS
from ckpt_prune.options.graphs import GraphSettings

HARM_WINDOWS, HARM_TOKENS, HARM_IMAGES = 4, 64, 16
"""What the graph is run on once for each weight: more says little more of which weights are harmful."""
CHECKED_WINDOWS, CHECKED_TOKENS = 8, 256
"""What sets of weights are measured on: a set that lost 0.076 nats on as little as single weights are measured on lost
0.100 of the proof's text (SmolLM2-135M)."""
BLOCK = 32
"""Weights that share a scale where nothing is asked for."""


def scheme_of(dtype: GraphType, settings: GraphSettings, task: Task, *, ranges: bool) -> Scheme:
    """How a graph is rounded.

    Args:
        dtype: one of `QUANTISED`.
        settings: what is asked for.
        task: of the graph.
        ranges: whether there are images to measure ranges on; without, inputs are rounded as they come.
    """
    static = task.modality == "image" and ranges
    return Scheme(
        kind="blocks" if dtype != "int8" else "static" if static else "dynamic",
        bits=8 if dtype == "int8" else 4,
        block=settings.block_size or BLOCK,
        symmetric=settings.symmetric,
        accuracy=settings.accuracy_level,
        rounding=settings.rounding if dtype != "int8" else "nearest",
        allowed=harm_allowed(MAX_LOSS[dtype] if settings.max_loss is None else settings.max_loss, task),
    )


def harm_allowed(max_loss: float, task: Task) -> float:
    """What outputs may lose for a task's metric to lose no more than is allowed.

    A perplexity grows by the factor exp(KL), where the model's own predictions are the truth. Classes change with a
    probability of at most √(KL / 2), which is Pinsker's inequality. A cosine falls by half of the energy that is lost.

    Args:
        max_loss: of the metric.
        task: which has one.

    Returns:
        KL in nats of each prediction, or for features a share of their energy.
    """
    if task.name in ("text-generation", "fill-mask"):
        return math.log1p(max_loss)
    return 2 * max_loss if task.name == "feature-extraction" else 2 * max_loss**2


def check_rounded(settings: GraphSettings, task: Task, *, images: bool, provider: Provider) -> None:
    """What of a request for rounded graphs cannot be, told before anything is loaded.

    Args:
        settings: what is asked for.
        task: of the graph.
        images: whether there are any.
        provider: what it is to be run on.

    Raises:
        UserError: there is no such graph.
    """
    if "int8" in settings.dtype and (provider == "cuda" or settings.optimize == "cuda"):
        raise UserError("--dtype int8: onnxruntime rounds inputs on the CPU alone; for CUDA take int4 or q4f16")
    if "int8" in settings.dtype and task.modality == "image" and not images:
        raise UserError("--dtype int8 of a model of images measures the ranges of its inputs: give --images DIR")


def check_blocks(model: onnx_ir.Model, settings: GraphSettings) -> None:
    """Refuse a block size that was asked for and does not divide.

    Raises:
        UserError: naming the first weight whose inputs it does not divide.
    """
    if settings.block_size is None:
        return
    copy = model.clone()
    split_gemms(copy.graph)
    for weight in weights_of(copy.graph):
        width = weight.shape[0]
        if width % settings.block_size:
            raise UserError(
                f"--block-size {settings.block_size} does not divide the {width} inputs of {weight.name}: leave it "
                f"out, and last blocks are padded, or prune to multiples of it"
            )


def measuring_of(
    model: onnx_ir.Model, task: Task, samples: ProofSamples, vocabulary: int, size: tuple[int, int, int]
) -> Measuring:
    """What harm is measured on: the samples' own text or images, or noise where there are none.

    Args:
        model: the graph.
        task: of it.
        samples: see `ProofSamples.measured`.
        vocabulary: of a model of text.
        size: (C, H, W) of a model of images.
    """
    measured = samples.measured
    what = str((samples.description or {}).get("what", "noise"))
    if isinstance(measured, Tensor) or (measured is None and task.modality == "text"):
        windows = noise_windows(vocabulary, HARM_TOKENS, samples.seed) if measured is None else measured
        short = windows[:HARM_WINDOWS, :HARM_TOKENS]
        rest = windows[HARM_WINDOWS:] if len(windows) > HARM_WINDOWS else windows
        long = rest[:CHECKED_WINDOWS, :CHECKED_TOKENS]
        calibration = [_text(model, window[None]) for window in windows]
        feeds, checked = [_text(model, short)], [_text(model, window[None]) for window in long]
        said = f"{what}: {plural(len(long), 'window')} of {plural(long.shape[1], 'token')}"
    else:
        whole = slice(None)
        pixels = noise_pixels(size, samples.seed) if measured is None else measured.batch(whole)["pixel_values"]
        feeds = [{"pixel_values": pixels[:HARM_IMAGES].numpy()}]
        others = pixels[HARM_IMAGES:] if len(pixels) > HARM_IMAGES else pixels
        checked = [{"pixel_values": part.numpy()} for part in torch.split(others, HARM_IMAGES)]
        calibration = [{"pixel_values": part.numpy()} for part in torch.split(pixels, HARM_IMAGES)]
        said = f"{what}: {plural(len(others), 'image')}"
    outputs = tuple(str(each.name) for each in model.graph.outputs if not str(each.name).startswith(PRESENT))
    logits = tuple(name for name in outputs if name.endswith("logits"))
    return Measuring(feeds, calibration, logits or outputs, bool(logits), said, checked)


def _text(model: onnx_ir.Model, ids: Tensor) -> Feed:
    feed = complete({"input_ids": ids})
    shapes = {port.name: port.shape for port in ports(model.graph.inputs)}
    past = {
        name: torch.zeros(len(ids), int(shape[1]), 0, int(shape[3]))
        for name, shape in shapes.items()
        if name.startswith(PAST)
    }
    return {name: value.numpy() for name, value in (feed | past).items() if name in shapes}
