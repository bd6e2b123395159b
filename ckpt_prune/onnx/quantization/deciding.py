"""How each weight of a graph is stored: in few bits, but where that costs the outputs too much."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir

from ckpt_prune.common import progress
from ckpt_prune.common.formatting import format_duration
from ckpt_prune.common.progress import Notices, meter
from ckpt_prune.onnx.quantization.blocks import Array, Bits, Blocks, Grid, in_blocks, matrix_of
from ckpt_prune.onnx.quantization.choosing import Choice, choose, measurements
from ckpt_prune.onnx.quantization.grams import Grams, grams_of
from ckpt_prune.onnx.quantization.int8 import in_int8, rounded_to_int8, unturned
from ckpt_prune.onnx.quantization.probe import Feed, Probe
from ckpt_prune.onnx.quantization.record import Kept, Quantised
from ckpt_prune.onnx.quantization.rounding import rounded
from ckpt_prune.onnx.quantization.storing import DOMAIN, store_in_blocks
from ckpt_prune.onnx.quantization.weights import Weight, split_gemms, weights_of

MARGIN = {"blocks": 0.8, "dynamic": 0.6, "static": 0.8}
"""Share of the allowance that is used up where harm is measured: the proof measures it on other data. Where inputs are
rounded as they come, a batch shares one range, and the proof's are larger: SmolLM2 loses 1.5 times as much there."""
LONG = 30.0
"""Seconds of a search that is announced."""


@dataclass(frozen=True)
class Measuring:
    """What harm is measured on, and how."""

    feeds: Sequence[Feed]
    """Short batches: the graph is run on them once for each weight."""
    calibration: Sequence[Feed]
    """Longer ones, for Grams and ranges of inputs."""
    outputs: tuple[str, ...]
    """Those that count."""
    classes: bool
    """Whether they are logits."""
    what: str
    """What sets of weights are measured on, in words, for the record."""
    checked: Sequence[Feed] = ()
    """Longer ones, others: sets of weights are measured on them, of which few are; none: on the short ones too."""


@dataclass(frozen=True)
class Scheme:
    """How a graph is to be rounded."""

    kind: Literal["blocks", "dynamic", "static"]
    bits: Bits
    block: int
    symmetric: bool
    accuracy: int
    rounding: Literal["nearest", "gptq"]
    allowed: float
    """Of harm, as `Probe.harm` measures it."""

    def grid(self, bits: Bits) -> Grid:
        """Blocks of so many bits."""
        return Grid(bits, self.block, self.symmetric)


@dataclass
class Decision:
    """What becomes of each weight.

    Attributes:
        blocks: name → its blocks.
        int8: names of weights that are in int8 with their inputs.
        record: for the folder.
    """

    scheme: Scheme
    blocks: dict[str, Blocks] = field(default_factory=dict)
    int8: frozenset[str] = frozenset()
    choice: Choice = field(default_factory=lambda: Choice((), ()))
    padded: int = 0
    what: str = ""
    unit: Literal["KL", "energy"] = "KL"

    @property
    def record(self) -> Quantised:
        """What the folder says of it."""
        scheme = self.scheme
        kinds = [f"{blocks.grid.bits}-bit blocks" for blocks in self.blocks.values()] + ["int8"] * len(self.int8)
        loss = self.choice.together
        return Quantised(
            scheme=scheme.kind,
            bits=scheme.bits,
            block_size=scheme.block,
            symmetric=scheme.symmetric,
            accuracy_level=scheme.accuracy,
            rounding=scheme.rounding,
            weights={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            padded=self.padded,
            kept=[
                Kept(name=name, harm=self.choice.alone.get(name, 0.0), at_once=self.choice.at_once.get(name, 1))
                for name in self.choice.more
            ],
            loss=loss if np.isfinite(loss) else None,
            allowed=scheme.allowed,
            unit=self.unit,
            measured_on=self.what,
        )


def decide(model: onnx_ir.Model, scheme: Scheme, measuring: Measuring | None, scratch: Path) -> Decision:
    """Choose how each weight is stored.

    Args:
        model: the graph in float32; not changed.
        scheme: how most of them are to be.
        measuring: what harm is measured on; None: all are stored alike, rounded to the nearest.
        scratch: folder for copies of the graph meanwhile.
    """
    copy = model.clone()
    split_gemms(copy.graph)
    weights = {weight.name: weight for weight in weights_of(copy.graph)}
    made = _Forms(weights, scheme, _grams(model, scheme, measuring, scratch))
    candidates = [name for name in weights if scheme.kind == "blocks" or not weights[name].lookups]
    plain = Choice(tuple(candidates), ())
    choice = plain if measuring is None else _chosen(model, scheme, measuring, made, candidates, scratch)
    few = set(choice.few)
    blocks = {
        name: made.few_blocks(name) if scheme.kind == "blocks" and name in few else made.more(name)
        for name in weights
        if scheme.kind == "blocks" or name not in few
    }
    return Decision(
        scheme,
        blocks,
        frozenset(few) if scheme.kind != "blocks" else frozenset(),
        choice,
        sum(weights[name].shape[0] % scheme.block != 0 for name in blocks),
        "nothing: all weights are rounded alike" if measuring is None else measuring.what,
        "KL" if measuring is None or measuring.classes else "energy",
    )


def _chosen(
    model: onnx_ir.Model,
    scheme: Scheme,
    measuring: Measuring,
    made: "_Forms",
    candidates: Sequence[str],
    scratch: Path,
) -> Choice:
    """What is rounded, by what it costs; a long search is announced."""
    inputs = scheme.kind != "blocks"
    feeds = [*measuring.feeds, *measuring.checked]
    short = slice(len(measuring.feeds))
    long = slice(short.stop if measuring.checked else 0, None)
    probe = Probe(model, feeds, scratch, measuring.outputs, classes=measuring.classes, inputs=inputs)
    single, sets = measurements(len(candidates))
    with meter(single + sets, "measuring what rounding costs", unit="run") as bar:
        done, longest = 0, 0.0

        def harm(few: Collection[str], more: Collection[str], on: slice) -> float:
            nonlocal done
            values = {name: made.few(name) for name in few} | {name: matrix_of(made.more(name)) for name in more}
            found = probe.harm(values, frozenset(few) if inputs else frozenset(), on)
            bar.to(done := done + 1)
            return found

        def together(few: Collection[str]) -> float:
            nonlocal longest
            begun = progress.now()
            found = harm(few, made.names - set(few), long)
            longest = max(longest, progress.now() - begun)
            return found

        def alone(few: Collection[str]) -> float:
            if done == 1 and (seconds := single * probe.seconds + sets * longest) >= LONG:
                Notices()(
                    f"what rounding costs is measured in at most {single + sets} runs of the graph: about "
                    f"{format_duration(seconds)}"
                )
            return harm(few, (), short)

        roles: dict[tuple[object, ...], list[str]] = {}
        for name in candidates:
            roles.setdefault(probe.weights[name].role, []).append(name)
        saved = {name: made.saved(name) for name in candidates}
        choice = choose(saved, together, alone, MARGIN[scheme.kind] * scheme.allowed, alike=list(roles.values()))
        bar.to(single + sets)
    return choice


def _grams(model: onnx_ir.Model, scheme: Scheme, measuring: Measuring | None, scratch: Path) -> Grams | None:
    if scheme.rounding != "gptq" or measuring is None:
        return None
    return grams_of(model, measuring.calibration, scratch)


class _Forms:
    """Weights as they are stored in few bits and in more, each made once where that takes time."""

    def __init__(self, weights: dict[str, Weight], scheme: Scheme, grams: Grams | None) -> None:
        self._weights, self._scheme, self._grams = weights, scheme, grams
        self._made: dict[str, Blocks] = {}
        self._kept: dict[str, Blocks] = {}
        self.names = frozenset(weights)

    def few_blocks(self, name: str) -> Blocks:
        if name not in self._made:
            matrix, grid = self._weights[name].matrix(), self._scheme.grid(self._scheme.bits)
            gram = None if self._grams is None else self._grams.of(name)
            self._made[name] = in_blocks(matrix, grid) if gram is None else rounded(matrix, gram, grid)
        return self._made[name]

    def few(self, name: str) -> Array:
        """As it is in few bits, (K, N) float32."""
        if self._scheme.kind == "blocks":
            return matrix_of(self.few_blocks(name))
        return rounded_to_int8(self._weights[name].matrix())

    def more(self, name: str) -> Blocks:
        """As it is where few bits cost too much: in blocks of 8, to the nearest."""
        if name not in self._kept:
            self._kept[name] = in_blocks(self._weights[name].matrix(), self._scheme.grid(8))
        return self._kept[name]

    def saved(self, name: str) -> int:
        """Bytes that few bits save; in int8 none, but products that inputs in 8 bits make faster."""
        rows, columns = self._weights[name].shape
        return rows * columns * (8 - self._scheme.bits) // 8 or rows * columns


def store(model: onnx_ir.Model, decision: Decision, measuring: Measuring | None, scratch: Path) -> onnx_ir.Model:
    """The graph with its weights as decided.

    Args:
        model: the one that was decided on, or the same traced in float16; not changed.
        decision: of it.
        measuring: of which the calibration gives the ranges of a static scheme.
        scratch: folder for copies of the graph meanwhile.
    """
    copy = model.clone()
    graph, scheme = copy.graph, decision.scheme
    split_gemms(graph)
    nodes: list[str] = []
    for weight in weights_of(graph):
        if weight.name in decision.int8:
            nodes += [node.name or "" for node in weight.products]
            unturned(graph, weight)
            continue
        blocks = decision.blocks.get(weight.name)
        if blocks is None:  # the name of another trace
            blocks = in_blocks(weight.matrix(), scheme.grid(8))
        store_in_blocks(graph, weight, _typed(blocks, weight), scheme.accuracy)
    copy.opset_imports[DOMAIN] = 1
    if scheme.kind == "blocks":
        return copy
    static = scheme.kind == "static"
    feeds = measuring.calibration if static and measuring is not None else None
    return in_int8(copy, nodes, feeds, scratch)


def _typed(blocks: Blocks, weight: Weight) -> Blocks:
    """Blocks whose scales have the type that the graph computes in."""
    assert weight.value.const_value is not None
    kind = weight.value.const_value.dtype.numpy()
    return Blocks(blocks.grid, blocks.rows, blocks.packed, blocks.scales.astype(kind), blocks.zeros)
