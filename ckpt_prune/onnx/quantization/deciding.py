"""How each weight of a graph is stored: in few bits, unless that costs the outputs too much."""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir
import torch
from torch import Tensor

from ckpt_prune.budget.choices import save, spend
from ckpt_prune.budget.columns import ColumnLosses
from ckpt_prune.common import progress
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.formatting import decimal_bytes, format_duration, plural
from ckpt_prune.common.graph_types import GraphStack, GraphType
from ckpt_prune.common.progress import Notices, meter
from ckpt_prune.common.spread import spread_evenly
from ckpt_prune.measure.samples.pairs import PairWindows
from ckpt_prune.onnx.comparison import make_noise_pixels, make_noise_windows
from ckpt_prune.onnx.pairs import make_pair_case
from ckpt_prune.onnx.proof import MAX_LOSS
from ckpt_prune.onnx.quantization.blocks import (
    Array,
    Bits,
    BlockRounding,
    Blocks,
    count_block_bytes,
    round_by_gptq,
    round_to_nearest,
)
from ckpt_prune.onnx.quantization.choosing import (
    Choice,
    ColumnChoice,
    Form,
    Prices,
    choose_weights,
    count_measurements,
    price_weights,
)
from ckpt_prune.onnx.quantization.int8 import quantize_to_int8, round_to_int8
from ckpt_prune.onnx.quantization.joining import Graphs, join_graphs, start_name
from ckpt_prune.onnx.quantization.measuring import Feed, Pool, Probe, measure_grams
from ckpt_prune.onnx.quantization.weights import (
    DOMAIN,
    GraphWeight,
    copy_with_products,
    find_weights,
    store_in_blocks,
    store_untransposed,
)
from ckpt_prune.onnx.records import KeptWeight, Quantization, describe_ports
from ckpt_prune.onnx.samples import CHECKED, ROUNDING_SAMPLES, ProofSamples
from ckpt_prune.onnx.session import Provider, complete_inputs
from ckpt_prune.onnx.tasks import PAST, PRESENT, GraphTask, Modality
from ckpt_prune.onnx.writing import count_written_bytes
from ckpt_prune.options.graphs import GraphSettings
from ckpt_prune.recipe.sizes import Size, parse_size
from ckpt_prune.rounding.damping import damp_for

MARGIN = {"blocks": 0.8, "dynamic": 0.6, "static": 0.8}
"""Safety margin: use only this share of the allowed loss, since the proof uses other data. With dynamic rounding a
batch shares one range, and the proof has larger batches: SmolLM2 loses 1.5 times as much there."""
LONG = 30.0
"""A search that takes more seconds than this is announced."""
HARM_WINDOWS, HARM_TOKENS, HARM_TEXTS, HARM_IMAGES, HARM_PAIRS = 4, 64, 16, 16, 8
"""The data on which the graph runs once for each weight: more would hardly change which weights do harm."""
CHECKED_TOKENS = 256
"""Of each window that sets of weights are measured on. On the smaller data of single weights one set lost 0.076 nats,
and 0.100 on the proof's text (SmolLM2-135M)."""
BLOCK = 32
"""Weights that share a scale by default."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""All that onnxruntime knows. A scale adds 2 bits to each weight in blocks of 16, and 1/8 in those of 256."""
SAMPLED = 128
"""Outputs of a matrix whose rounding tells how much more one form loses than another."""


# ---- what is asked for ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """How a graph is to be rounded.

    `allowed` is the harm allowed, as `Probe.measure_harm` measures it, and `limit` the bytes of the file, which count
    in its place. With other `blocks` each weight may also be stored in these, or stay in float32.
    """

    kind: Literal["blocks", "dynamic", "static"]
    bits: Bits
    block: int
    symmetric: bool
    accuracy: int
    rounding: Literal["nearest", "gptq"]
    allowed: float
    limit: int | None = None
    blocks: tuple[int, ...] = ()


def make_scheme(
    dtype: GraphType, settings: GraphSettings, task: GraphTask, *, ranges: bool, dense: int | None = None
) -> Scheme:
    """How a graph of a rounded type is rounded.

    Args:
        ranges: there are images to measure the ranges of inputs on.
        dense: bytes of the model's tensors; None: the settings' size does not matter.
    """
    limit = None
    if dtype == "int4" and settings.target_bytes is not None and dense is not None:
        limit = _read_size(settings.target_bytes).of(dense)
    static = task.modality == "image" and ranges
    return Scheme(
        kind="blocks" if dtype != "int8" else "static" if static else "dynamic",
        bits=8 if dtype == "int8" else 4,
        block=settings.block_size or BLOCK,
        symmetric=settings.symmetric,
        accuracy=settings.accuracy_level,
        rounding=settings.rounding if dtype != "int8" else "nearest",
        allowed=allow_harm(MAX_LOSS[dtype] if settings.max_loss is None else settings.max_loss, task),
        limit=limit,
        blocks=BLOCK_SIZES if limit is not None and settings.block_size is None else (),
    )


def allow_harm(max_loss: float, task: GraphTask) -> float:
    """Return how much outputs may lose for a task's metric to lose at most `max_loss`.

    A perplexity grows by the factor exp(KL), if the model's own predictions are the truth. Classes change with a
    probability of at most √(KL / 2), which is Pinsker's inequality. A cosine falls by half of the energy that is lost.

    Returns:
        KL in nats of each prediction, or for features a share of their energy.
    """
    if task.modality == "pairs" or task.name in ("text-generation", "fill-mask"):
        return math.log1p(max_loss)
    return 2 * max_loss if task.name == "feature-extraction" else 2 * max_loss**2


def _read_size(text: str) -> Size:
    try:
        return parse_size("bytes", text)
    except ValueError as error:
        raise UserError(f"--target-bytes: {error}") from error


def check_rounding(settings: GraphSettings, task: GraphTask, *, images: bool, provider: Provider) -> None:
    """Refuse rounded graphs that cannot be, before anything is loaded; `images`: whether there are any."""
    if settings.target_bytes is not None:
        _read_size(settings.target_bytes)
    if "int8" in settings.dtype and (provider == "cuda" or settings.optimize == "cuda"):
        raise UserError("--dtype int8: onnxruntime rounds inputs on the CPU alone; for CUDA take int4 or q4f16")
    if "int8" in settings.dtype and task.modality == "image" and not images:
        raise UserError("--dtype int8 of a model of images measures the ranges of its inputs: give --images DIR")


def check_block_size(graphs: Graphs, settings: GraphSettings) -> None:
    """Refuse a block size that was asked for and does not divide the inputs of a weight."""
    if settings.block_size is None:
        return
    for weight in find_weights(copy_with_products(join_graphs(graphs)).graph):
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
    pool: Pool | None = None
    """Makes the vectors of texts of the outputs, if it is these that count."""


def make_measuring(
    graphs: Graphs,
    task: GraphTask,
    samples: ProofSamples,
    vocabulary: int,
    size: tuple[int, int, int],
    pool: Pool | None = None,
) -> Measuring:
    """Return the data to measure harm on: the samples' own text, images or pairs, or noise if there are none.

    Args:
        samples: see `ProofSamples.for_rounding`; an encoder-decoder needs pairs there.
        vocabulary: of a model of text.
        size: (C, H, W) of a model of images.
        pool: makes the vectors of texts, if it is these that count.
    """
    model, own_data = join_graphs(graphs), samples.for_rounding
    source = str((samples.description or {}).get("what", "noise"))
    if isinstance(own_data, Tensor) or (own_data is None and task.modality == "text"):
        windows = make_noise_windows(vocabulary, HARM_TOKENS, samples.seed) if own_data is None else own_data
        fitted, others = (windows[rows] for rows in _hold_out(len(windows), "text"))
        few, rows = (HARM_WINDOWS, 1) if pool is None else (HARM_TEXTS, HARM_TEXTS)
        long = others[:, :CHECKED_TOKENS]
        feeds: Sequence[Feed] = [_feed_tokens(model, {"input_ids": windows[:few, :HARM_TOKENS]})]
        checked, calibration = (
            list[Feed](_feed_tokens(model, {"input_ids": some}) for some in torch.split(part, rows))
            for part in (long, fitted)
        )
        what = f"{source}: {plural(len(long), 'window')} of {plural(long.shape[1], 'token')}"
    elif isinstance(own_data, PairWindows):
        # One by one, so that none is padded.
        every = [_feed_tokens(model, make_pair_case(own_data, row, row + 1).feed) for row in range(len(own_data))]
        calibration, checked = (every[rows] for rows in _hold_out(len(every), "pairs"))
        feeds, what = every[:HARM_PAIRS], f"{source}: {plural(len(checked), 'pair')}"
    else:
        everything = slice(None)
        pixels = (
            make_noise_pixels(size, samples.seed) if own_data is None else own_data.batch(everything)["pixel_values"]
        )
        fitted, others = (pixels[rows] for rows in _hold_out(len(pixels), "image"))
        feeds = [{"pixel_values": pixels[:HARM_IMAGES].numpy()}]
        checked, calibration = (
            list[Feed]({"pixel_values": some.numpy()} for some in torch.split(part, HARM_IMAGES))
            for part in (others, fitted)
        )
        what = f"{source}: {plural(len(others), 'image')}"
    outputs = tuple(str(each.name) for each in model.graph.outputs if not str(each.name).startswith(PRESENT))
    logits = tuple(name for name in outputs if name.endswith("logits"))
    if pool is not None:
        outputs = outputs[:1]  # the hidden states
    return Measuring(feeds, calibration, logits or outputs, bool(logits), what, checked, pool)


def _hold_out(count: int, modality: Modality) -> tuple[slice, slice]:
    """Return which samples to fit to, and which others to measure sets of weights on; all for both if there is one.

    Of the others there are `CHECKED` for every `ROUNDING_SAMPLES` to fit to, if there are enough.
    """
    most, checked = ROUNDING_SAMPLES[modality], CHECKED[modality]
    fitted = max(count * most // (most + checked), min(count // 2, most))
    return (slice(fitted), slice(fitted, None)) if fitted else (slice(None), slice(None))


def _feed_tokens(model: onnx_ir.Model, tokens: dict[str, Tensor]) -> Feed:
    """Return all that a graph reads of texts or pairs without padding, with a cache of no tokens."""
    feed = complete_inputs(tokens) if "input_ids" in tokens else tokens
    shapes = {port.name: port.shape for port in describe_ports(model.graph.inputs)}
    batch = len(next(iter(tokens.values())))
    past = {
        name: torch.zeros(batch, int(shape[1]), 0, int(shape[3]))
        for name, shape in shapes.items()
        if name.startswith(PAST)
    }
    return {name: value.numpy() for name, value in (feed | past).items() if name in shapes}


# ---- what is decided -----------------------------------------------------------------------------------------------

Label = BlockRounding | Literal["int8", "float32"]
"""How a weight is stored."""
Narrow = tuple[Fraction, int]
"""Share that stays of the axis of a weight that has so many rows or columns."""


@dataclass(frozen=True)
class Scale:
    """Factors from predicted losses of parts of a graph to the loss of its outputs, which was measured.

    Attributes:
        outside: bytes of the file that no weight takes.
        rounding: factor of what rounding weights is predicted to lose.
        pruning: factor of what dropping columns is predicted to lose.
    """

    outside: int
    rounding: float
    pruning: float


@dataclass
class Decision:
    """How each weight is stored.

    Attributes:
        choice: the label of each; names of those of an encoder-decoder begin with that of its stack.
        blocks: of those that are stored so.
        unit, measured_on: as of `Quantization`.
    """

    scheme: Scheme
    choice: Choice
    blocks: dict[str, Blocks] = field(repr=False)
    unit: Literal["KL", "energy"]
    measured_on: str

    def of(self, stack: GraphStack | None) -> "Decision":
        """Return what is decided of the graph of one stack, by the names that weights have in it."""
        start, choice = start_name(stack), self.choice

        def of_stack(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}

        named: dict[str, Any] = {name: of_stack(getattr(choice, name)) for name in ("labels", "alone", "at_once")}
        more = tuple(of_stack(dict.fromkeys(choice.more)))
        return replace(self, choice=replace(choice, more=more, **named), blocks=of_stack(self.blocks))

    def find(self, label: Literal["int8", "float32"]) -> frozenset[str]:
        """Return the weights that are in int8 with their inputs, or stay as they are."""
        return frozenset(name for name, each in self.choice.labels.items() if each == label)

    @property
    def record(self) -> Quantization:
        """The entry for the folder's record."""
        scheme, choice = self.scheme, self.choice
        kinds = [self._words(label) for label in choice.labels.values()]
        kept = [
            KeptWeight(name=name, harm=choice.alone.get(name, 0.0), at_once=choice.at_once.get(name, 1))
            for name in choice.more
        ]
        return Quantization(
            scheme=scheme.kind,
            bits=scheme.bits,
            block_size=scheme.block,
            symmetric=scheme.symmetric,
            accuracy_level=scheme.accuracy,
            rounding=scheme.rounding,
            weights={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            padded=sum(each.rows % each.grid.block != 0 for each in self.blocks.values()),
            kept=[] if scheme.blocks else kept,
            loss=choice.together if np.isfinite(choice.together) else None,
            allowed=scheme.allowed,
            unit=self.unit,
            measured_on=self.measured_on,
        )

    def _words(self, label: Label) -> str:
        if not isinstance(label, BlockRounding):
            return label
        return f"{label.bits}-bit blocks" + ("" if label.block == self.scheme.block else f" of {label.block}")


def decide(graphs: Graphs, scheme: Scheme, measuring: Measuring | None, scratch: Path) -> Decision:
    """Choose how each weight is stored.

    Args:
        graphs: in float32; not changed. Weights of several are chosen together, by one size or loss of all.
        scheme: how most of them are to be, or what the files may weigh.
        measuring: what harm is measured on; None: all are stored alike, rounded to the nearest.
        scratch: folder for copies of the graphs meanwhile.

    Raises:
        UserError: no forms make graphs as small as the scheme says.
    """
    if measuring is None:
        return Decider(graphs, scheme, None, scratch).as_first()
    decider = Decider(graphs, scheme, measuring, scratch)
    return decider.within_loss() if scheme.limit is None else decider.within_bytes(scheme.limit)


class Decider:
    """Decides about the weights of a model's graphs, whose harms are measured once.

    Args: as of `decide`.

    Attributes:
        reference: decides about the graph of another model, whose outputs are held to be right where all weights are
            measured together; None: this one's own in float32 are.
    """

    reference: "Decider | None" = None

    def __init__(self, graphs: Graphs, scheme: Scheme, measuring: Measuring | None, scratch: Path) -> None:
        self._graphs, self._model = graphs, join_graphs(graphs)
        self.scheme, self._measuring, self._scratch = scheme, measuring, scratch
        self._weights = {weight.name: weight for weight in find_weights(copy_with_products(self._model).graph)}
        self._grams: dict[str, tuple[Tensor, int]] = {}
        if scheme.rounding == "gptq" and measuring is not None:
            self._grams = measure_grams(self._model, measuring.calibration, scratch)
        self._blocks: dict[tuple[str, BlockRounding, bool], Blocks] = {}
        self._longest = 0.0  # seconds that a set took to be measured

    @cached_property
    def forms(self) -> dict[str, list[Form]]:
        """The forms of each weight, the coarsest of the scheme's own block size first."""
        return {name: self._forms_of(weight) for name, weight in self._weights.items()}

    def _forms_of(self, weight: GraphWeight) -> list[Form]:
        rows, columns = weight.shape
        scheme, more = self.scheme, self._grid(8)
        if scheme.kind != "blocks":  # int8 saves no bytes, but products that inputs in 8 bits make faster
            blocks = Form(more, rows * columns, 0.0)
            return [blocks] if weight.lookups else [Form("int8", 0), blocks]
        grids = [self._grid(scheme.bits), *([] if scheme.bits == 8 else [more])]
        if scheme.blocks:
            grids += [
                grid for block in scheme.blocks for bits in (4, 8) if (grid := self._grid(bits, block)) not in grids
            ]
        some = np.array(spread_evenly(min(columns, SAMPLED), columns))
        matrix = weight.to_matrix()[:, some].astype(np.float32)
        errors = [float(np.square(round_to_nearest(matrix, grid).to_matrix() - matrix).sum()) for grid in grids]
        forms = [
            Form(
                grid,
                count_block_bytes(rows, columns, grid, weight.dtype.itemsize),
                error / errors[0] if errors[0] else 0.0,
            )
            for grid, error in zip(grids, errors, strict=True)
        ]
        forms[0] = replace(forms[0], share=1.0)
        if scheme.blocks:
            forms.append(Form("float32", rows * columns * weight.dtype.itemsize, 0.0))
        return forms

    def _grid(self, bits: Bits, block: int | None = None) -> BlockRounding:
        return BlockRounding(bits, block or self.scheme.block, self.scheme.symmetric)

    def _rounded(self, name: str, grid: BlockRounding, *, fitted: bool = True) -> Blocks:
        """Return a weight in blocks, made once, since that takes time; `fitted`: by GPTQ, if the scheme says so."""
        gram = self._grams.get(name) if fitted and grid.bits == self.scheme.bits else None
        key = name, grid, gram is not None
        if key not in self._blocks:
            matrix = self._weights[name].to_matrix()
            self._blocks[key] = (
                round_to_nearest(matrix, grid)
                if gram is None
                else round_by_gptq(matrix, gram[0], grid, damp=damp_for(len(matrix), gram[1]))
            )
        return self._blocks[key]

    def _to_matrix(self, name: str, label: Label, *, fitted: bool) -> Array:
        if isinstance(label, BlockRounding):
            return self._rounded(name, label, fitted=fitted).to_matrix()
        matrix = self._weights[name].to_matrix()
        return round_to_int8(matrix) if label == "int8" else matrix

    # ---- what it loses ---------------------------------------------------------------------------------------------

    @cached_property
    def _probe(self) -> Probe:
        measuring = self._measuring
        assert measuring is not None
        feeds = [*measuring.feeds, *measuring.checked]
        how: dict[str, Any] = {"classes": measuring.classes, "pool": measuring.pool}
        return Probe(self._model, feeds, self._scratch, measuring.outputs, inputs=self.scheme.kind != "blocks", **how)

    def _measure(self, labels: Mapping[str, Label], on: slice, *, fitted: bool = True) -> float:
        values = {name: self._to_matrix(name, label, fitted=fitted) for name, label in labels.items()}
        inputs = frozenset(name for name, label in labels.items() if label == "int8")
        return self._probe.measure_harm(values, inputs, on)

    def _together(self, labels: Mapping[str, Label], *, pooled: bool = True) -> float:
        assert self._measuring is not None
        begun = progress.now()
        if self.scheme.kind == "blocks":  # products by blocks round their inputs, too
            graph = store(self._model, self._decide(Choice(dict(labels))), self._measuring, self._scratch)
            harm = self._measure_stored(graph, pooled=pooled)
        else:
            harm = self._measure(labels, self._checked)
        self._longest = max(self._longest, progress.now() - begun)
        return harm

    def _measure_stored(self, graph: onnx_ir.Model, *, pooled: bool = True) -> float:
        """Measure what a graph loses beside that of `reference`, on the feeds that sets of weights are measured on."""
        reference = None if self.reference is None else self.reference._probe
        return self._probe.measure_graph(graph, self._checked, reference=reference, pooled=pooled)

    @property
    def _checked(self) -> slice:
        """The feeds that sets of weights are measured on."""
        assert self._measuring is not None
        return slice(len(self._measuring.feeds) if self._measuring.checked else 0, None)

    def in_float(self) -> float:
        """Measure what the graph in float32 loses beside that of `reference`."""
        return self._measure_stored(self._model)

    def _alone(self, few: Collection[str]) -> float:
        assert self._measuring is not None
        labels = {name: self.forms[name][0].label for name in few}
        # To the nearest: prices are the same for both ways to round.
        return self._measure(labels, slice(len(self._measuring.feeds)), fitted=False)

    @property
    def _alike(self) -> list[list[str]]:
        roles: dict[tuple[object, ...], list[str]] = {}
        for name in self.forms:
            roles.setdefault(self._probe.weights[name].role, []).append(name)
        return list(roles.values())

    @cached_property
    def prices(self) -> Prices:
        """The loss of each weight alone in its first form; measured once."""
        single, sets = count_measurements(len(self.forms))
        with meter(single, "measuring what rounding costs", unit="run") as bar:
            done = 0

            def alone(few: Collection[str]) -> float:
                nonlocal done
                begun = progress.now()
                harm = self._alone(few)
                seconds = single * (progress.now() - begun) + sets * self._longest
                # Told when one has been timed, weights put in and taken out.
                if (done := done + 1) == 2 and seconds >= LONG:
                    Notices()(
                        f"what rounding costs is measured in at most {single + sets} runs of the graph: about "
                        f"{format_duration(seconds)}"
                    )
                bar.to(done)
                return harm

            found = price_weights(self.forms, alone, self._alike)
            bar.to(single)
        return found

    # ---- what is chosen --------------------------------------------------------------------------------------------

    def as_first(self) -> Decision:
        """Store all weights alike, as the scheme says first."""
        choice = Choice({name: own[0].label for name, own in self.forms.items()})
        return self._decide(choice)

    def by_gptq(self) -> "Decider":
        """Return the same with weights in few bits rounded by GPTQ; what each loses is taken to be in proportion."""
        assert self._measuring is not None
        other = copy(self)
        other.scheme = replace(self.scheme, rounding="gptq")
        other._grams = measure_grams(self._model, self._measuring.calibration, self._scratch)
        return other

    def within_loss(self, allowed: float | None = None) -> Decision:
        """Store weights in as few bits as an allowance permits, by default with a margin that of the scheme."""
        allowed = MARGIN[self.scheme.kind] * self.scheme.allowed if allowed is None else allowed
        choice = choose_weights(self.forms, self._together, lambda: self.prices, allowed)
        return self._decide(choice)

    def within_bytes(self, limit: int) -> Decision:
        """Store weights so that the files have at most so many bytes and outputs are predicted to lose least."""
        outside, over = self.check_bytes(limit), 0
        while True:
            choice = self.prices.at_cost(limit - outside - over)
            excess = self._count_bytes(self._decide(choice)) - limit
            if excess <= 0:
                return self._decide(replace(choice, together=self._together(choice.labels)))
            over += excess

    def scale(self, limit: int | None, loss: float) -> Scale:
        """Measure the loss of the graph's outputs beside what is predicted of its weights and columns.

        Weights are stored for that so that the file has about this size, or loss, by GPTQ if the scheme says so.

        Args:
            limit: bytes of the files; None: `loss` counts.
        """
        least, of_weights = self._least
        outside = least - of_weights
        bits = self.prices.at_loss(loss) if limit is None else self.prices.at_cost(max(limit - outside, of_weights))
        lost = self._together(bits.labels)
        pooled = 1.0 if self._probe.pools is None else lost / self._together(bits.labels, pooled=False)
        return Scale(outside, lost / bits.predicted, pooled)

    def with_columns(
        self,
        scale: Scale,
        limit: int | None,
        loss: float,
        mlps: Mapping[int, Sequence[str]],
        columns: ColumnLosses,
        tables: Mapping[str, Narrow] | None = None,
    ) -> ColumnChoice:
        """Choose forms of weights and columns of MLPs together: what loses least in a file of so many bytes.

        Args:
            limit: None: what takes fewest bytes and loses at most `loss`, which otherwise does not matter.
            mlps: block → names of the weights of its MLP (`find_matrices`).
            columns: what fewer of them lose, all of them among the numbers that may stay; in nats, or as a share of
                the energy of all hidden states.
            tables: weights of which rows of tokens go, whatever is chosen; rounding the others loses as much.

        Raises:
            BudgetError: nothing fits.
        """
        units, cut = max((max(by_width) for by_width in columns.values()), default=0), tables or {}
        choice = self.prices.with_columns(
            partial(save, allowed=loss) if limit is None else partial(spend, budget=limit - scale.outside),
            mlps,
            columns,
            lambda name, share: self._count_narrow(name, cut.get(name, (share, units))),
            scale.rounding,
            scale.pruning,
        )
        return replace(choice, cost=choice.cost + scale.outside)

    def _count_narrow(self, name: str, narrow: Narrow) -> list[int]:
        """Return the bytes of each form of a weight that keeps a share of an axis.

        Blocks run along the inputs, and a last one is padded.
        """
        share, units = narrow
        (rows, columns), size = self._weights[name].shape, self._weights[name].dtype.itemsize
        if rows == units:
            rows = int(rows * share)
        elif columns == units:
            columns = int(columns * share)
        grids = (form.label for form in self.forms[name])
        return [
            count_block_bytes(rows, columns, grid, size) if isinstance(grid, BlockRounding) else rows * columns * size
            for grid in grids
        ]

    def find_matrices(self, matrices: Mapping[str, Array]) -> dict[str, str]:
        """Return for each matrix, float32 and either way round, the name of the weight with its values, if any has."""
        names = {_digest(weight.to_matrix()): name for name, weight in self._weights.items()}
        pairs = [(name, names.get(_digest(each)) or names.get(_digest(each.T))) for name, each in matrices.items()]
        return {name: weight for name, weight in pairs if weight is not None}

    def reaches(self, limit: int) -> bool:
        """Return whether a file may have so few bytes."""
        return self._least[0] <= limit

    def check_bytes(self, limit: int, narrow: Mapping[str, Narrow] | None = None) -> int:
        """Refuse a size that is out of reach; return the bytes of the smallest file that no weight takes.

        Args:
            narrow: weights that can be narrower, and how narrow they can be.
        """
        least, of_weights = self._least
        saved = sum(
            min(form.cost for form in self.forms[name]) - min(self._count_narrow(name, own))
            for name, own in (narrow or {}).items()
        )
        if least - saved > limit:
            fewest = "the fewest columns and tokens that are tried"
            pruned = f", and with {fewest} {decimal_bytes(least - saved)}" if narrow else ""
            alone, reach = None in self._graphs, "out of reach: with all weights in blocks of 4 bits"
            raise UserError(
                f"{'a graph' if alone else 'graphs'} of {decimal_bytes(limit)} {'is' if alone else 'together are'} "
                f"{reach} {'it has' if alone else 'they have'} {decimal_bytes(least)}{pruned}; ask for more, or prune "
                "first: `prune`, or `prune --vocabulary` where the embedding is large"
            )
        return least - of_weights

    @cached_property
    def _least(self) -> tuple[int, int]:
        """Bytes of the smallest files, and of their weights."""
        smallest = {name: min(forms, key=lambda form: form.cost) for name, forms in self.forms.items()}
        nearest = copy(self)  # however weights are rounded, they take as much, and GPTQ takes long
        nearest._grams = {}
        decision = nearest._decide(Choice({name: form.label for name, form in smallest.items()}))
        return self._count_bytes(decision), sum(form.cost for form in smallest.values())

    def _count_bytes(self, decision: Decision) -> int:
        return sum(
            count_written_bytes(store(graph, decision.of(stack), self._measuring, self._scratch))
            for stack, graph in self._graphs.items()
        )

    def _decide(self, choice: Choice) -> Decision:
        blocks = {
            name: self._rounded(name, label)
            for name, label in choice.labels.items()
            if isinstance(label, BlockRounding)
        }
        measuring = self._measuring
        if measuring is None:
            return Decision(self.scheme, choice, blocks, "KL", "nothing: all weights are rounded alike")
        return Decision(self.scheme, choice, blocks, "KL" if measuring.classes else "energy", measuring.what)


def _digest(matrix: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(matrix, np.float32).tobytes()).hexdigest()


def store(model: onnx_ir.Model, decision: Decision, measuring: Measuring | None, scratch: Path) -> onnx_ir.Model:
    """Return the graph with its weights as decided.

    Args:
        model: the one that was decided on, or the same traced in float16; not changed.
        measuring: its calibration gives the ranges of a static scheme.
        scratch: folder for copies of the graph meanwhile.
    """
    copy, scheme = copy_with_products(model), decision.scheme
    graph, int8, plain = copy.graph, decision.find("int8"), decision.find("float32")
    nodes: list[str] = []
    for weight in find_weights(graph):
        if weight.name in int8:
            nodes += [node.name or "" for node in weight.products]
            store_untransposed(graph, weight)
            continue
        if weight.name in plain:
            continue
        blocks = decision.blocks.get(weight.name)
        if blocks is None:  # the name of another trace
            blocks = round_to_nearest(weight.to_matrix(), BlockRounding(8, scheme.block, scheme.symmetric))
        store_in_blocks(graph, weight, blocks, scheme.accuracy)
    copy.opset_imports[DOMAIN] = 1
    if scheme.kind == "blocks":
        return copy
    feeds = measuring.calibration if scheme.kind == "static" and measuring is not None else None
    return quantize_to_int8(copy, nodes, feeds, scratch)
