"""How each weight of a graph is stored: in few bits, unless that costs the outputs too much."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir
import torch
from torch import Tensor

from ckpt_prune.common import progress
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import format_duration, plural
from ckpt_prune.common.graph_types import GraphType
from ckpt_prune.common.progress import Notices, meter
from ckpt_prune.onnx.comparison import make_noise_pixels, make_noise_windows
from ckpt_prune.onnx.proof import MAX_LOSS
from ckpt_prune.onnx.quantization.blocks import Array, Bits, Blocks, Grid, round_by_gptq, round_to_nearest
from ckpt_prune.onnx.quantization.choosing import Choice, choose_weights, count_measurements
from ckpt_prune.onnx.quantization.int8 import quantize_to_int8, round_to_int8
from ckpt_prune.onnx.quantization.measuring import Feed, Probe, measure_grams
from ckpt_prune.onnx.quantization.weights import (
    DOMAIN,
    Weight,
    copy_with_split_gemms,
    find_weights,
    store_in_blocks,
    store_untransposed,
)
from ckpt_prune.onnx.records import KeptWeight, Quantization, describe_ports
from ckpt_prune.onnx.samples import ProofSamples
from ckpt_prune.onnx.session import Provider, complete_inputs
from ckpt_prune.onnx.tasks import PAST, PRESENT, Task
from ckpt_prune.options.graphs import GraphSettings

MARGIN = {"blocks": 0.8, "dynamic": 0.6, "static": 0.8}
"""Safety margin: use only this share of the allowed loss, since the proof uses other data. With dynamic rounding a
batch shares one range, and the proof has larger batches: SmolLM2 loses 1.5 times as much there."""
LONG = 30.0
"""A search that takes more seconds than this is announced."""
HARM_WINDOWS, HARM_TOKENS, HARM_IMAGES = 4, 64, 16
"""The data on which the graph runs once for each weight: more would hardly change which weights do harm."""
CHECKED_WINDOWS, CHECKED_TOKENS = 8, 256
"""The data on which sets of weights are measured. On the smaller data of single weights one set lost 0.076 nats, and
0.100 on the proof's text (SmolLM2-135M)."""
BLOCK = 32
"""Weights that share a scale by default."""


# ---- what is asked for ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """How a graph is to be rounded; `allowed` is the harm allowed, as `Probe.measure_harm` measures it."""

    kind: Literal["blocks", "dynamic", "static"]
    bits: Bits
    block: int
    symmetric: bool
    accuracy: int
    rounding: Literal["nearest", "gptq"]
    allowed: float


def make_scheme(dtype: GraphType, settings: GraphSettings, task: Task, *, ranges: bool) -> Scheme:
    """How a graph of a rounded type is rounded; `ranges`: there are images to measure the ranges of inputs on."""
    static = task.modality == "image" and ranges
    return Scheme(
        kind="blocks" if dtype != "int8" else "static" if static else "dynamic",
        bits=8 if dtype == "int8" else 4,
        block=settings.block_size or BLOCK,
        symmetric=settings.symmetric,
        accuracy=settings.accuracy_level,
        rounding=settings.rounding if dtype != "int8" else "nearest",
        allowed=allow_harm(MAX_LOSS[dtype] if settings.max_loss is None else settings.max_loss, task),
    )


def allow_harm(max_loss: float, task: Task) -> float:
    """Return how much outputs may lose for a task's metric to lose at most `max_loss`.

    A perplexity grows by the factor exp(KL), if the model's own predictions are the truth. Classes change with a
    probability of at most √(KL / 2), which is Pinsker's inequality. A cosine falls by half of the energy that is lost.

    Returns:
        KL in nats of each prediction, or for features a share of their energy.
    """
    if task.name in ("text-generation", "fill-mask"):
        return math.log1p(max_loss)
    return 2 * max_loss if task.name == "feature-extraction" else 2 * max_loss**2


def check_rounding(settings: GraphSettings, task: Task, *, images: bool, provider: Provider) -> None:
    """Refuse rounded graphs that cannot be, before anything is loaded; `images`: whether there are any."""
    if "int8" in settings.dtype and (provider == "cuda" or settings.optimize == "cuda"):
        raise UserError("--dtype int8: onnxruntime rounds inputs on the CPU alone; for CUDA take int4 or q4f16")
    if "int8" in settings.dtype and task.modality == "image" and not images:
        raise UserError("--dtype int8 of a model of images measures the ranges of its inputs: give --images DIR")


def check_block_size(model: onnx_ir.Model, settings: GraphSettings) -> None:
    """Refuse a block size that was asked for and does not divide the inputs of a weight."""
    if settings.block_size is None:
        return
    for weight in find_weights(copy_with_split_gemms(model).graph):
        width = weight.shape[0]
        if width % settings.block_size:
            raise UserError(
                f"--block-size {settings.block_size} does not divide the {width} inputs of {weight.name}: leave it "
                f"out, and last blocks are padded, or prune to multiples of it"
            )


@dataclass(frozen=True)
class Measuring:
    """The data that harm is measured on, and how."""

    feeds: Sequence[Feed]
    """Short batches: the graph is run on them once for each weight."""
    calibration: Sequence[Feed]
    """Longer ones, for Grams and ranges of inputs."""
    outputs: tuple[str, ...]
    """Those that count."""
    classes: bool
    """Whether they are logits."""
    what: str
    """The data on which sets of weights are measured, in words for the record."""
    checked: Sequence[Feed] = ()
    """Longer ones, others: sets of weights are measured on them; none: on the short ones too."""


def make_measuring(
    model: onnx_ir.Model, task: Task, samples: ProofSamples, vocabulary: int, size: tuple[int, int, int]
) -> Measuring:
    """Return the data to measure harm on: the samples' own text or images, or noise if there are none.

    Args:
        samples: see `ProofSamples.for_rounding`.
        vocabulary: of a model of text.
        size: (C, H, W) of a model of images.
    """
    own_data = samples.for_rounding
    source = str((samples.description or {}).get("what", "noise"))
    if isinstance(own_data, Tensor) or (own_data is None and task.modality == "text"):
        windows = make_noise_windows(vocabulary, HARM_TOKENS, samples.seed) if own_data is None else own_data
        others = windows[HARM_WINDOWS:] if len(windows) > HARM_WINDOWS else windows
        long = others[:CHECKED_WINDOWS, :CHECKED_TOKENS]
        feeds: Sequence[Feed] = [_feed_text(model, windows[:HARM_WINDOWS, :HARM_TOKENS])]
        calibration: Sequence[Feed] = [_feed_text(model, window[None]) for window in windows]
        checked: Sequence[Feed] = [_feed_text(model, window[None]) for window in long]
        what = f"{source}: {plural(len(long), 'window')} of {plural(long.shape[1], 'token')}"
    else:
        everything = slice(None)
        pixels = (
            make_noise_pixels(size, samples.seed) if own_data is None else own_data.batch(everything)["pixel_values"]
        )
        others = pixels[HARM_IMAGES:] if len(pixels) > HARM_IMAGES else pixels
        feeds = [{"pixel_values": pixels[:HARM_IMAGES].numpy()}]
        checked, calibration = (
            [{"pixel_values": part.numpy()} for part in torch.split(images, HARM_IMAGES)] for images in (others, pixels)
        )
        what = f"{source}: {plural(len(others), 'image')}"
    outputs = tuple(str(each.name) for each in model.graph.outputs if not str(each.name).startswith(PRESENT))
    logits = tuple(name for name in outputs if name.endswith("logits"))
    return Measuring(feeds, calibration, logits or outputs, bool(logits), what, checked)


def _feed_text(model: onnx_ir.Model, ids: Tensor) -> Feed:
    feed = complete_inputs({"input_ids": ids})
    shapes = {port.name: port.shape for port in describe_ports(model.graph.inputs)}
    past = {
        name: torch.zeros(len(ids), int(shape[1]), 0, int(shape[3]))
        for name, shape in shapes.items()
        if name.startswith(PAST)
    }
    return {name: value.numpy() for name, value in (feed | past).items() if name in shapes}


# ---- what is decided -----------------------------------------------------------------------------------------------


@dataclass
class Decision:
    """How each weight is stored: in `blocks`, by name, or in `int8` with its inputs; `record` is for the folder."""

    scheme: Scheme
    blocks: dict[str, Blocks]
    int8: frozenset[str]
    record: Quantization = field(repr=False)


def decide(model: onnx_ir.Model, scheme: Scheme, measuring: Measuring | None, scratch: Path) -> Decision:
    """Choose how each weight is stored.

    Args:
        model: the graph in float32; not changed.
        scheme: how most of them are to be.
        measuring: what harm is measured on; None: all are stored alike, rounded to the nearest.
        scratch: folder for copies of the graph meanwhile.
    """
    weights = {weight.name: weight for weight in find_weights(copy_with_split_gemms(model).graph)}
    grams = {}
    if scheme.rounding == "gptq" and measuring is not None:
        grams = measure_grams(model, measuring.calibration, scratch)
    forms = _Forms(weights, scheme, grams)
    in_blocks = scheme.kind == "blocks"
    candidates = [name for name in weights if in_blocks or not weights[name].lookups]
    choice = Choice(tuple(candidates), ())
    if measuring is not None:
        choice = _choose(model, scheme, measuring, forms, candidates, scratch)
    few = set(choice.few)
    blocks = {
        name: forms.few_blocks(name) if name in few else forms.more_blocks(name)
        for name in weights
        if in_blocks or name not in few
    }
    int8 = frozenset() if in_blocks else frozenset(few)
    kinds = [f"{each.grid.bits}-bit blocks" for each in blocks.values()] + ["int8"] * len(int8)
    record = Quantization(
        scheme=scheme.kind,
        bits=scheme.bits,
        block_size=scheme.block,
        symmetric=scheme.symmetric,
        accuracy_level=scheme.accuracy,
        rounding=scheme.rounding,
        weights={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        padded=sum(weights[name].shape[0] % scheme.block != 0 for name in blocks),
        kept=[
            KeptWeight(name=name, harm=choice.alone.get(name, 0.0), at_once=choice.at_once.get(name, 1))
            for name in choice.more
        ],
        loss=choice.together if np.isfinite(choice.together) else None,
        allowed=scheme.allowed,
        unit="KL" if measuring is None or measuring.classes else "energy",
        measured_on="nothing: all weights are rounded alike" if measuring is None else measuring.what,
    )
    return Decision(scheme, blocks, int8, record)


def _choose(
    model: onnx_ir.Model,
    scheme: Scheme,
    measuring: Measuring,
    forms: "_Forms",
    candidates: Sequence[str],
    scratch: Path,
) -> Choice:
    """Choose what is rounded by what it costs; a long search is announced."""
    inputs = scheme.kind != "blocks"
    feeds = [*measuring.feeds, *measuring.checked]
    short = slice(len(measuring.feeds))
    long = slice(short.stop if measuring.checked else 0, None)
    probe = Probe(model, feeds, scratch, measuring.outputs, classes=measuring.classes, inputs=inputs)
    single, sets = count_measurements(len(candidates))
    with meter(single + sets, "measuring what rounding costs", unit="run") as bar:
        done, longest = 0, 0.0

        def measure(few: Collection[str], more: Collection[str], on: slice) -> float:
            nonlocal done
            values = {name: forms.few(name) for name in few}
            values |= {name: forms.more_blocks(name).to_matrix() for name in more}
            harm = probe.measure_harm(values, frozenset(few) if inputs else frozenset(), on)
            bar.to(done := done + 1)
            return harm

        def together(few: Collection[str]) -> float:
            nonlocal longest
            begun = progress.now()
            harm = measure(few, forms.weights.keys() - set(few), long)
            longest = max(longest, progress.now() - begun)
            return harm

        def alone(few: Collection[str]) -> float:
            begun = progress.now()
            harm = measure(few, (), short)
            # Told when one of each kind has been timed, weights put in and taken out.
            if done == 2 and (seconds := single * (progress.now() - begun) + sets * longest) >= LONG:
                Notices()(
                    f"what rounding costs is measured in at most {single + sets} runs of the graph: about "
                    f"{format_duration(seconds)}"
                )
            return harm

        roles: dict[tuple[object, ...], list[str]] = {}
        for name in candidates:
            roles.setdefault(probe.weights[name].role, []).append(name)
        saved = {name: forms.count_saved_bytes(name) for name in candidates}
        allowed = MARGIN[scheme.kind] * scheme.allowed
        choice = choose_weights(saved, together, alone, allowed, alike=list(roles.values()))
        bar.to(single + sets)
    return choice


class _Forms:
    """Weights as they are stored in few bits and in more, each made once if that takes time."""

    def __init__(self, weights: dict[str, Weight], scheme: Scheme, grams: dict[str, Tensor]) -> None:
        self.weights, self._scheme, self._grams = weights, scheme, grams
        self._few: dict[str, Blocks] = {}
        self._more: dict[str, Blocks] = {}

    def few_blocks(self, name: str) -> Blocks:
        if name not in self._few:
            matrix, grid = self.weights[name].to_matrix(), self._grid(self._scheme.bits)
            gram = self._grams.get(name)
            self._few[name] = round_to_nearest(matrix, grid) if gram is None else round_by_gptq(matrix, gram, grid)
        return self._few[name]

    def few(self, name: str) -> Array:
        """Return a weight in few bits, (K, N) float32."""
        if self._scheme.kind == "blocks":
            return self.few_blocks(name).to_matrix()
        return round_to_int8(self.weights[name].to_matrix())

    def more_blocks(self, name: str) -> Blocks:
        """Return a weight for which few bits cost too much: in blocks of 8, to the nearest."""
        if name not in self._more:
            self._more[name] = round_to_nearest(self.weights[name].to_matrix(), self._grid(8))
        return self._more[name]

    def count_saved_bytes(self, name: str) -> int:
        """Bytes that few bits save; in int8 none, but products that inputs in 8 bits make faster."""
        rows, columns = self.weights[name].shape
        return rows * columns * (8 - self._scheme.bits) // 8 or rows * columns

    def _grid(self, bits: Bits) -> Grid:
        return Grid(bits, self._scheme.block, self._scheme.symmetric)


def store(model: onnx_ir.Model, decision: Decision, measuring: Measuring | None, scratch: Path) -> onnx_ir.Model:
    """Return the graph with its weights as decided.

    Args:
        model: the one that was decided on, or the same traced in float16; not changed.
        measuring: its calibration gives the ranges of a static scheme.
        scratch: folder for copies of the graph meanwhile.
    """
    copy, scheme = copy_with_split_gemms(model), decision.scheme
    graph = copy.graph
    nodes: list[str] = []
    for weight in find_weights(graph):
        if weight.name in decision.int8:
            nodes += [node.name or "" for node in weight.products]
            store_untransposed(graph, weight)
            continue
        blocks = decision.blocks.get(weight.name)
        if blocks is None:  # the name of another trace
            blocks = round_to_nearest(weight.to_matrix(), Grid(8, scheme.block, scheme.symmetric))
        store_in_blocks(graph, weight, blocks, scheme.accuracy)
    copy.opset_imports[DOMAIN] = 1
    if scheme.kind == "blocks":
        return copy
    feeds = measuring.calibration if scheme.kind == "static" and measuring is not None else None
    return quantize_to_int8(copy, nodes, feeds, scratch)
