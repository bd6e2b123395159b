"""Estimates of a run: memory and disk from sizes, time from the first block, run on one sample.

Time of a recipe = time of `ridge` times the recipe's own `time` (tools/time_recipes.py). Recipes without that key get
no estimate of time. `ridge` is: every block run once on every sample with the Grams of its inputs, unless statistics
are given, and one solve as wide as its widest input. Recipes that decide widths on some of the samples alone take less.
Times are those of the processor, which other work on the machine does not lengthen. The time that the command has
spent so far, most of it on imports, is added.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.formatting import format_duration, human_bytes
from ckpt_prune.common.memory import available_bytes, resident_bytes
from ckpt_prune.common.progress import elapsed_seconds
from ckpt_prune.evaluation.perplexity import STRIP_BYTES, PredictionSums
from ckpt_prune.evaluation.streamed import StreamedModel, states_limit
from ckpt_prune.job.afterwork import Afterwork
from ckpt_prune.job.job import Job
from ckpt_prune.job.model_view import ModelView
from ckpt_prune.job.plan import Plan
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.measure.moments.kinds import Collect
from ckpt_prune.measure.samples.choose import usual_samples
from ckpt_prune.measure.samples.samples import SampleRange, Samples, TokenWindows
from ckpt_prune.measure.statistics.measurement import count_statistics_bytes
from ckpt_prune.measure.streams.hidden_stream import TOKENS_PER_BATCH
from ckpt_prune.measure.streams.state_memory import StateMemory
from ckpt_prune.model.containers.container import container_of
from ckpt_prune.model.context import image_size
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.image_inputs import image_inputs
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import stock_names
from ckpt_prune.options.commands import FrontierOptions
from ckpt_prune.parallel.devices import resolve_compute_dtype, resolve_device
from ckpt_prune.recipe.recipe import Recipe
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.runner.run_job import preview_job
from ckpt_prune.stages.recipe_files import load_recipe
from ckpt_prune.stages.shared.measure_dense import choose_samples, plan_end_states

WORTH_SAYING = 20.0
"""Seconds from which on a run starts with an estimate."""
LIBRARIES = 160 * 2**20
"""Bytes that libraries take once they compute."""
_BACKWARD = 3
"""Time of a run and a pass back through it, as a multiple of the run."""
_SHARE = 4
"""A solve is timed at a width that is this many times smaller, if it is large: it grows with the cube of the width."""
_LARGE = 1024
"""Narrower matrices are multiplied at a lower speed."""
_FRONTIER = {"llama.cpp": (2.6, 2.0), "onnxruntime": (2.0, 0.5), "vllm": (1.0, 2.0)}
"""Time in which `frontier` measures a model, and in which it makes and measures a file, as multiples of `ridge`'s."""
_PRUNING = 2.4
"""Time in which it finds what columns and tokens lose, and prunes, likewise."""
_COPIES = {"llama.cpp": 1, "onnxruntime": 8, "vllm": 1}
"""How often it holds all weights in float32, as measured: the model, its graph, both in a runtime, and in few bits."""


@dataclass(frozen=True)
class Estimate:
    """Time, memory and disk of a run.

    Attributes:
        seconds: wall time, if nothing else runs on this machine; None if it is not known.
        peak_bytes: of memory.
        disk_bytes: of what is written, scratch included.
        export_bytes: of them those of a graph or GGUF file, whose export and proof `seconds` leave out.
        assumed: samples that stand for those that were not given; 0 if none do.
    """

    seconds: float | None
    peak_bytes: int
    disk_bytes: int
    export_bytes: int = 0
    assumed: int = 0

    @property
    def line(self) -> str:
        spent = "" if self.seconds is None else f"about {format_duration(self.seconds)}, "
        spent = f"with {self.assumed} samples {spent}" if self.assumed else spent
        size = f"{human_bytes(self.peak_bytes)} of memory"
        size += f" and {human_bytes(self.disk_bytes)} of disk" if self.disk_bytes else ""
        if self.export_bytes:
            size += f", {human_bytes(self.export_bytes)} of that for what is exported"
        if self.seconds is None:
            return spent + size
        more = ", without the time of the export" if self.export_bytes else ""
        return f"{spent}{size}, where nothing else runs on this machine{more}"

    def since_start(self) -> "Estimate":
        """Return the estimate of the whole command: with what it has spent on imports, reading, and this estimate."""
        return self if self.seconds is None else replace(self, seconds=self.seconds + elapsed_seconds())

    def followed_by(self, other: "Estimate") -> "Estimate":
        """Return the estimate of this work and another one after it."""
        is_known = self.seconds is not None and other.seconds is not None
        return Estimate(
            (self.seconds or 0) + (other.seconds or 0) if is_known else None,
            max(self.peak_bytes, other.peak_bytes),
            self.disk_bytes + other.disk_bytes,
            self.export_bytes + other.export_bytes,
            self.assumed,
        )

    @property
    def warning(self) -> str | None:
        """The warning before a run that is long or needs more memory than is free; None for any other."""
        free = available_bytes()
        if free is not None and self.peak_bytes > free + (resident_bytes() or 0):
            return (
                f"this takes {self.line}, and only {human_bytes(free)} of memory are free: close other programs, or "
                "see by --dry-run what fewer --samples take"
            )
        return f"this takes {self.line}" if self.seconds is not None and self.seconds >= WORTH_SAYING else None

    def data(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else round(self.seconds, 3)
        data = {"seconds": seconds, "peak_bytes": self.peak_bytes, "disk_bytes": self.disk_bytes}
        return data | ({"export_bytes": self.export_bytes} if self.export_bytes else {})


def estimate_job(preview: Prepared) -> Estimate:
    """Return what a prune will take, by what `preview_job` tells of its output.

    If there is nothing to measure on, `usual_samples` stands for it.
    """
    job = preview.job
    recipe, model = job.recipe, job.model
    samples = usual_samples(model) if job.samples is None else len(job.samples)
    tokens = model.tokens if job.samples is None else job.samples.tokens
    live, measured = recipe.needs_moments and job.statistics is None, 0
    if live:
        folds = job.live.folds if job.live is not None else recipe.folds
        measured = count_statistics_bytes(model, collect=recipe.collect, folds=folds, samples=samples)
    part = samples
    if job.live is not None and preview.measures_first:
        chosen = choose_samples(preview, job.live)
        part, kept = len(chosen.samples), plan_end_states(preview, chosen, Path())
        measured += 0 if kept is None else kept.bytes
    # Before the first block is timed: what that leaves behind is used again.
    # A site's own and the part that stays; where folds are held out, those of folds, too.
    grams = 0 if "gram" not in recipe.collect else 1 + recipe.folds
    peak = _peak(model, samples if live else 0, tokens, _dtype(job), grams, remembered=_limit_remembered(preview))
    seconds = None
    multiple = _multiple(recipe)
    if multiple is not None and job.plan is None:
        run = time_run(model, job.device, _dtype(job), job.samples) if live else 0.0
        if run is not None:
            # Only what follows the choice of widths takes all samples: as long as `ridge`, or twice that with drift.
            on_all = min(multiple, 2.0 if preview.recipe.target == "drift" else 1.0)
            runs = on_all * samples + (multiple - on_all) * part
            seconds = run * runs + multiple * time_solve(model, job.device)
    disk = preview.output.cost.bytes + (measured if preview.measures_first else 0)
    return Estimate(seconds, peak, disk, assumed=samples if live and job.samples is None else 0)


def estimate_prune(preview: Prepared, afterwork: Sequence[Afterwork], windows: int, window: int) -> Estimate:
    """Return what a prune will take with its export, and with measuring it afterwards.

    Args:
        afterwork: what follows the output.
        windows: of text that it and the dense model are measured on, of `window` tokens each; 0 for none.
    """
    estimate, job = estimate_job(preview), preview.job
    size = sum(work.bytes(preview.output.cost.parameters) for work in afterwork)
    estimate = replace(estimate, disk_bytes=estimate.disk_bytes + size, export_bytes=size)
    dense = StreamedModel.open(job.model.checkpoint.path, job.device, job.model.dtype) if windows else None
    if dense is not None:
        shares = 1.0, preview.after.flops / preview.before.flops
        estimate = estimate.followed_by(estimate_evaluation([dense, dense], windows, window, shares))
    return estimate.since_start()


def estimate_plan(job: Job, plan: Plan) -> Estimate:
    """Return what a prune by a plan of a job will take: what a solve by statistics does."""
    estimate = estimate_job(preview_job(replace(job, plan=plan)))
    if job.statistics is None:
        return estimate
    return replace(estimate, seconds=time_solve(job.model, job.device))


def estimate_calibration(
    model: Model,
    samples: Samples,
    collect: Sequence[Collect],
    folds: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Estimate:
    """Return what `calibrate` will take."""
    size = count_statistics_bytes(model, collect=collect, folds=folds, samples=len(samples))
    peak = _peak(model, len(samples), samples.tokens, dtype, 5 if "gram" in collect else 0)
    run = time_run(model, device, dtype, samples)
    runs = 1 + (_BACKWARD if {"fisher", "taylor"} & set(collect) else 0)
    seconds = None if run is None else run * len(samples) * runs
    return Estimate(seconds, peak, size)


def estimate_frontier(
    model: Model, samples: Samples, options: FrontierOptions, files: int, file_bytes: int | None, prunes: bool
) -> Estimate:
    """Return what `frontier` will take: it measures the model, and makes and measures files.

    Args:
        files: candidates that it makes.
        file_bytes: of each; None: that is not known.
        prunes: whether columns and tokens will surely be in question, since fewer bits do not reach the size.
    """
    device = resolve_device("cpu" if options.runs_on == "onnxruntime" else options.device)
    dtype = resolve_compute_dtype(options.compute_dtype, device, model.dtype)
    measuring, each = _FRONTIER[options.runs_on]
    run = time_run(model, device, dtype, samples)
    ridge = None if run is None else run * len(samples) + time_solve(model, device)
    seconds = None if ridge is None else ridge * (measuring + files * each + prunes * _PRUNING)
    cost = cost_of(model)
    loaded = (resident_bytes() or 0) + LIBRARIES + 4 * _COPIES[options.runs_on] * cost.parameters
    peak = max(loaded, _peak(model, len(samples), samples.tokens, dtype, 2))
    disk = files * max(file_bytes or 0, cost.parameters)  # one of them is in int8
    if options.runs_on == "llama.cpp":  # two are kept at most
        disk = min(files, 2) * (file_bytes or cost.bytes // 2)
    disk += prunes * cost.bytes
    return Estimate(seconds, peak, disk)


def estimate_evaluation(
    models: Sequence[StreamedModel], windows: int, tokens: int, shares: Sequence[float] = (1.0, 1.0)
) -> Estimate:
    """Return what it takes to measure models, one or two, on so many windows of text, block by block.

    Args:
        shares: of the time that each takes, for a model that stands for one that is still to be pruned.
    """
    seconds, states, outside, busiest, copied = 0.0, 0, 0, 0, 0
    for each, share in zip(models, shares, strict=False):
        model, dtype = each.model, each.dtype
        one = TokenWindows(torch.zeros(windows, tokens, dtype=torch.long))
        seconds += share * windows * (time_run(model, each.device, dtype, one, False) or 0.0)
        states += _count_states(model, windows, tokens, dtype)
        unread = "" if model.tied else model.family.embedding_weight
        others = [model.checkpoint.tensors[name] for name in model.outside() if name != unread]
        outside += sum(info.numel for info in others) * dtype.itemsize
        copied = max(copied, *(info.nbytes for info in others))
        busiest = max(busiest, 3 * _block_bytes(model) + _activations(model, windows * tokens, dtype))
    vocabulary, hidden = models[0].config.get_text_config().vocab_size, models[0].model.dimension("hidden")
    seconds += windows * tokens * _time_head(vocabulary, hidden, len(models), models[0].device)
    strip = min(STRIP_BYTES, windows * tokens * vocabulary * 4)
    heads = outside + copied + (1 + len(models)) * strip
    base = (resident_bytes() or 0) + LIBRARIES
    in_memory = min(states, len(models) * states_limit())
    return Estimate(seconds, base + in_memory + max(busiest, heads), states - in_memory)


@dataclass(frozen=True, eq=False)
class _BlankImage:
    """One image, as a vision model is called with it, in place of samples."""

    inputs: dict[str, Tensor]
    tokens: int
    fingerprint: str = ""

    def __len__(self) -> int:
        return 1

    def batch(self, rows: slice) -> dict[str, Tensor]:
        return self.inputs


def _time_head(vocabulary: int, hidden: int, models: int, device: torch.device) -> float:
    """Return the seconds that heads, and what is made of their logits, take for one position."""
    classes, rows = min(vocabulary, 8192), 256
    states, weight = torch.randn(rows, hidden, device=device), torch.randn(classes, hidden, device=device)
    targets, spent = torch.zeros(rows, dtype=torch.long, device=device), 0.0
    for _ in range(2):  # once to warm up
        start = _clock(device)
        PredictionSums().add([states @ weight.T for _ in range(models)], targets)
        spent = _clock(device) - start
    return spent / rows * vocabulary / classes


def time_run(
    model: Model, device: torch.device, dtype: torch.dtype, samples: Samples | None, measured: bool = True
) -> float | None:
    """Return the seconds that all blocks take for one sample, `measured` with Grams of the inputs of their linears.

    The first block of each shape is run, on as many samples as run together. If there are none, that is a window of the
    model's context, or an image of its config's size; there is none for sounds.
    """
    family, forms = model.family, list[Samples]() if samples is None else [samples]
    own = container_of(model) if model.has_remote_code else None
    if samples is None and family.modality == "text":
        forms = [TokenWindows(torch.zeros(1, model.tokens, dtype=torch.long))]
    elif samples is None and family.modality == "image":
        whole = stock_names(model.checkpoint.config, family.architecture).model if own is None else own.skeleton()
        inputs = image_inputs(whole, 1, image_size(family, model.config))
        forms = [_BlankImage(each, model.tokens) for each in inputs]
    view = ModelView(model, device, container=own)
    while forms:
        one = forms.pop(0)
        count = min(len(one), max(1, TOKENS_PER_BATCH // one.tokens))
        try:
            stream, total = view.stream(SampleRange(one, 0, count), dtype), 0.0
            break
        except Exception:  # whatever a class runs into with images in another form than its own
            if not forms:
                raise
    else:
        return None
    for block, alike in _blocks_by_shape(model).items():
        for before in range(block) if stream.reads_results(block) else ():
            module = stream.factory.build_block(before, view.block(before))
            stream.pass_through(module, before, stream.states, torch.empty_like(stream.states))
        tensors, spent = view.block(block), 0.0
        for _ in range(2):  # once to warm up
            start = _clock(device)
            if measured:
                stream.observe(block, tensors, dict.fromkeys(model.inputs(block), True))
            else:
                module = stream.factory.build_block(block, tensors)
                stream.pass_through(module, block, stream.states, torch.empty_like(stream.states))
            spent = _clock(device) - start
        total += alike * spent
        if block == 0 and family.passes_on:  # it may change the shape of what the others read
            stream.advance(block, tensors)
    return total / count


def _blocks_by_shape(model: Model) -> Counter[int]:
    """Return the first block of each shape → how many blocks have it."""
    first: dict[object, int] = {}
    counts: Counter[int] = Counter()
    for block, spaces in enumerate(model.dense_widths):
        prefix = model.family.tensor(block, "", "itself")
        shapes = {name.removeprefix(prefix): model.checkpoint.tensors[name].shape for name in model.block_names(block)}
        counts[first.setdefault((*spaces, *shapes.items()), block)] += 1
    return counts


def time_solve(model: Model, device: torch.device) -> float:
    """Return the seconds of a solve for the widest input of every block."""
    return sum(_time_solve(_widest(model, block), device) * alike for block, alike in _blocks_by_shape(model).items())


def _time_solve(width: int, device: torch.device) -> float:
    if not width:
        return 0.0
    part = min(width, max(_LARGE, width // _SHARE))
    gram = torch.eye(part, dtype=torch.float64, device=device)
    torch.linalg.cholesky(gram)  # once to warm up
    start = _clock(device)
    torch.linalg.cholesky(gram)
    gram @ gram
    return (_clock(device) - start) * (width / part) ** 3


def _clock(device: torch.device) -> float:
    """Return seconds: of each of the processor's threads, or those that pass while an accelerator works."""
    return time.process_time() / torch.get_num_threads() if device.type == "cpu" else time.perf_counter()


def _multiple(recipe: Recipe) -> float | None:
    """Return the time of a recipe in units of `ridge`: its own, or that of the first shipped one like it."""
    if recipe.time is not None:
        return recipe.time

    def traits(each: Recipe) -> tuple[object, ...]:
        return tuple(stage.key for stage in each.stages if stage.prunes), each.allocation, each.target

    for count in (3, 2, 1):
        for each in _timed_recipes():
            if traits(each)[:count] == traits(recipe)[:count]:
                return each.time
    return None


@cache
def _timed_recipes() -> tuple[Recipe, ...]:
    """Return the shipped recipes whose time is known; to read them all takes a third of a second."""
    return tuple(each for each in map(load_recipe, shipped_recipes()) if each.time is not None)


def _dtype(job: Job) -> torch.dtype:
    data = job.live or job.training
    return torch.float32 if data is None else data.compute_dtype


def _peak(model: Model, samples: int, tokens: int, dtype: torch.dtype, grams: int, remembered: float = 0) -> int:
    """Return bytes of memory: four blocks (read, pruned, the next and the last), hidden states, float64 Grams.

    Args:
        grams: of the widest input, that are held when a site is solved.
        remembered: most bytes of a block's results that are kept for its next run, hidden states included.
    """
    widest = max(_widest(model, block) for block in range(model.blocks))
    states, gram = _count_states(model, samples, tokens, dtype), 8 * widest**2
    blocks, solve = 4 * _block_bytes(model), grams * gram
    base = (resident_bytes() or 0) + LIBRARIES + states
    if not samples:
        return base + blocks + solve
    # The input of the mlp's last layer, and what norms, attention and mlp hand on.
    kept = samples * tokens * (widest + 4 * model.dimension("hidden")) * dtype.itemsize
    blocks += int(max(0, min(kept, remembered - states)))
    embedding = model.checkpoint.tensors.get(model.family.embedding_weight)
    # It is gone before blocks run.
    entry = 0 if embedding is None else embedding.nbytes + embedding.numel * dtype.itemsize
    return base + max(entry, blocks + max(solve, min(grams, 1) * gram + _activations(model, samples * tokens, dtype)))


def _limit_remembered(preview: Prepared) -> float:
    """Return how many bytes of states and results of a block `--state-memory` leaves (`BlockMemory`)."""
    live = preview.live
    if live is None or not preview.sequential or preview.job.device.type != "cpu":
        return 0
    return live.allocate.free if isinstance(live.allocate, StateMemory) else inf


def _count_states(model: Model, samples: int, tokens: int, dtype: torch.dtype) -> int:
    return samples * tokens * model.dimension("hidden") * dtype.itemsize


def _block_bytes(model: Model) -> int:
    tensors = model.checkpoint.tensors
    return max(sum(tensors[name].nbytes for name in model.weights(block)) for block in range(model.blocks))


def _activations(model: Model, tokens: int, dtype: torch.dtype) -> int:
    """Return bytes of the largest running block: its weights, and four tensors (gate, up, both, the next) as wide."""
    tensors, rows = model.checkpoint.tensors, 4 * min(tokens, TOKENS_PER_BATCH)
    largest = max(
        sum(tensors[name].numel for name in model.weights(block)) + rows * _widest(model, block)
        for block in range(model.blocks)
    )
    return largest * dtype.itemsize


def _widest(model: Model, block: int) -> int:
    """Return the inputs of the widest linear of a block that spaces lie on; 0 if there is none."""
    return max((model.checkpoint.tensors[name].shape[-1] for name in model.weights(block)), default=0)
