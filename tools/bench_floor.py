"""The least seconds that jobs take on this machine: FLOPs and bytes that they cannot do without, at its measured speed.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/bench_floor.py MODEL ... [--samples N] [--window T] [--ratio R]

Counted, from shapes alone, in the types that the package takes, at the speed of one thread:

- blocks: all matrix products of the passes that a recipe defines, at the speed of a large product (`model.cost` counts
  them). Measuring behind pruned blocks takes one pass of each, whatever is measured in it. Gradients take a pass again,
  since one block is held at a time, and one back: a product for every linear module, two for each of attention's. The
  head counts for tokens whose predictions are used.
- sums over tokens: one triangle of every Gram, drift times inputs, squares of gradients, gradients times what is tried.
- factors: a Cholesky factor and a solve of every set of equations. For a strength that is chosen, three factors on one
  fold and two on another; for widths that are chosen, one order by optimal brain surgeon and for each score the costs
  of its own.
- disk: the checkpoint is read once, from where it lies now (memory, if it was read lately); the output is written and
  synced once.

Where data decides, it is the least: Grams in float32 are never too coarse, and what `best` drops is what `ridge` does.

Not counted: starting Python; what is element by element (norms, rotary positions, softmax, activations, masks, codes);
refits for whole spaces that are tried; errors in the report; digests; tracing and translating a graph, and of its proof
all but one window in both runtimes. So the same steps cannot be faster in these types, and nothing reaches the floor.
"""

import argparse
import copy
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch

from ckpt_prune.job.job import Job
from ckpt_prune.model.containers.opening import open_model
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.model import Model, TensorSpecs
from ckpt_prune.onnx.samples import FEW_WINDOWS
from ckpt_prune.parallel.devices import resolve_compute_dtype
from ckpt_prune.recipe.space_kinds import CANDIDATES
from ckpt_prune.runner.run_job import preview_job
from ckpt_prune.scoring.costs import WIDE
from ckpt_prune.stages.quantize.keys import quantize_recipe
from ckpt_prune.stages.reading import load_recipe
from ckpt_prune.stages.recovery.training import SampleSplit
from ckpt_prune.stages.shared.measure_dense import LEAST_WINDOWS, TOKENS_PER_INPUT
from ckpt_prune.stages.spaces.effects.gradients import DRAWN, gradient_rows
from ckpt_prune.stages.spaces.effects.predicted import MANY, POSITIONS, SPACE_POINTS, SPACING
from ckpt_prune.stages.spaces.effects.site_variants import dropped_counts

FOLDS, STRENGTHS = 4, (3, 2)
"""Folds of the windows; and of each that a strength is chosen on, how many strengths show which one is the least."""
PARTS = ("blocks", "sums", "factors", "disk")
TURNS, CHUNK = 5, 2**23
"""Each speed is the best of so many; bytes that are read and written at once."""

Work = Counter[tuple[str, str]]
"""(Part, speed) → FLOPs, or bytes. The speed `blocks` is that of float32 or bfloat16, in which blocks run."""


@dataclass(frozen=True)
class Block:
    """FLOPs of a block in a window: of its linear modules, and of the products of queries, keys and values."""

    linears: int
    attention: int

    @classmethod
    def of(cls, model: Model, tokens: int, specs: TensorSpecs) -> "Block":
        config, first = copy.copy(model.config), model.spaced_blocks.start
        config.max_position_embeddings = tokens  # costs are those of a window as long as the context
        flops = cost_of(model.with_config(config), specs).flops - tokens * _count_head(model)
        linears = 2 * tokens * sum(prod(specs[name][1]) for name in model.weights(first))
        return cls(linears, flops // model.blocks - linears)

    @property
    def forward(self) -> int:
        return self.linears + self.attention

    @property
    def back(self) -> int:
        """Gradients at what enters, but none of weights."""
        return self.linears + 2 * self.attention


@dataclass(frozen=True)
class Site:
    """A linear module of which inputs can go: (outputs, inputs), inputs that stay, and orders that are tried."""

    outputs: int
    inputs: int
    kept: int
    orders: int

    @property
    def type(self) -> str:
        """The type in which its order, costs and strengths are computed."""
        return "float32" if self.inputs > WIDE else "float64"


@dataclass(frozen=True)
class Shape:
    """A model of blocks that are alike, its output, and the windows of a job.

    Attributes:
        windows: how many.
        first, few: those that `best` decides widths on, and those that it takes gradients of.
        tokens: of a window.
        head: FLOPs of the head for a token.
        dense, narrow: a block before and after.
        inputs: for all that linear modules of a block read, in the order of computation: width, outputs of the readers.
        sites: of a block, in the same order.
        tried: passes of short windows in which a whole space is tried: how many, and FLOPs of all for one window.
    """

    blocks: int
    windows: int
    first: int
    few: int
    tokens: int
    head: int
    dense: Block
    narrow: Block
    inputs: tuple[tuple[int, int], ...]
    sites: tuple[Site, ...]
    tried: tuple[int, int]

    @classmethod
    def of(cls, model: Model, windows: int, tokens: int, pruned: TensorSpecs) -> "Shape":
        """Return the shape of a model whose output has the tensors `pruned`."""
        family, specs, first = model.family, model.shapes, model.spaced_blocks.start
        if len({tuple(specs[name][1] for name in model.weights(block)) for block in range(model.blocks)}) > 1:
            raise ValueError(f"{model.checkpoint.path}: blocks are not alike")
        sizes = {module: specs[model.tensor(first, module)][1] for module in family.linears}
        readers = {own: [sizes[reader][0] for reader in readers] for own, readers in family.inputs.items()}
        inputs = tuple((sizes[own][1], sum(outputs)) for own, outputs in readers.items())
        wanted = max(LEAST_WINDOWS, math.ceil(TOKENS_PER_INPUT * model.widest_consumer / tokens))
        decide = min(windows, wanted)
        few = len(gradient_rows(model, decide, FOLDS))
        sites, passes, flops, short = [], 0, 0, min(tokens, SPACING * POSITIONS // few)
        for space, described in family.consumers.items():
            units = model.units(space)
            orders = len(CANDIDATES) if units >= MANY else 1  # of a few units, scores may agree
            for index, count in enumerate(dropped_counts(units, SPACE_POINTS)):
                times = orders + 1 if index == 0 and orders > 1 else 1
                narrow = Block.of(model, short, model.shapes_at([{space: units - count}] * model.blocks))
                passes, flops = passes + times, flops + times * model.blocks * narrow.forward
            kept = pruned[model.tensor(first, described.consumer)][1][1]
            if units > 1:
                sites.append(Site(*sizes[described.consumer], kept, orders))
        return cls(
            model.blocks, windows, decide, few, tokens, _count_head(model), Block.of(model, tokens, specs),
            Block.of(model, tokens, pruned), inputs, tuple(sites), (passes, flops),
        )  # fmt: skip

    @property
    def pruned(self) -> list[Site]:
        return [site for site in self.sites if site.kept < site.inputs]

    @property
    def in_turn(self) -> int:
        """FLOPs of a window through blocks that are changed in turn, whose sites run with what stays of their inputs.

        Producers run whole, since their outputs decide what goes. Nothing needs the last block's output.
        """
        gone = sum(2 * self.tokens * site.outputs * (site.inputs - site.kept) for site in self.sites)
        width, outputs = self.inputs[-1]
        kept = min((site.kept for site in self.sites[-1:]), default=width)
        return self.blocks * (self.dense.forward - gone) - 2 * self.tokens * outputs * kept


def _count_head(model: Model) -> int:
    family, shapes = model.family, model.shapes
    head, embedding = f"{family.head}.weight", f"{family.on_disk(family.embedding or '')}.weight"
    return 2 * prod(shapes[head if head in shapes else embedding][1])


def _count_gram(tokens: int, width: int) -> int:
    return tokens * width * (width + 1)


def count_passes(shape: Shape) -> Work:
    """Wanda and Wanda-sp: norms take no products."""
    return Work({("blocks", "blocks"): shape.windows * shape.in_turn})


def count_sparsegpt(shape: Shape) -> Work:
    """Also GPTQ: a Gram and a factor of every input, and each column's error passed on to the later ones."""
    work = count_passes(shape)
    for width, outputs in shape.inputs:
        work["sums", "blocks"] += shape.blocks * _count_gram(shape.windows * shape.tokens, width)
        work["factors", "cholesky float64"] += shape.blocks * width**3 // 3
        work["factors", "float64"] += shape.blocks * outputs * width**2
    return work


def count_ridge(shape: Shape) -> Work:
    """A Gram of each site; what dropped inputs were to the kept ones, a factor, and two triangular solves."""
    work = count_passes(shape)
    for site in shape.pruned:
        k, o = site.kept, site.outputs
        work["sums", "blocks"] += shape.blocks * _count_gram(shape.windows * shape.tokens, site.inputs)
        work["factors", "cholesky float64"] += shape.blocks * k**3 // 3
        work["factors", "float64"] += shape.blocks * (2 * o * (site.inputs - k) * k + 2 * o * k**2)
    return work


def count_best(shape: Shape) -> Work:
    """Count `best`, and `best-uniform`, which takes the same steps.

    One dense pass with Grams; gradients of a few windows, the sites tried on them; whole spaces tried on short ones;
    then what `ridge` does, with drift and a strength that is chosen.
    """
    some, (passes, tried) = shape.few * shape.tokens, shape.tried
    work = count_ridge(shape)
    work["blocks", "blocks"] += shape.blocks * (shape.first + shape.few) * shape.dense.forward
    # What enters the first block needs no gradient.
    work["blocks", "blocks"] += shape.few * ((shape.blocks - 1) * shape.dense.back + tried)
    work["blocks", "blocks"] += (2 * some + (passes + 1) * min(POSITIONS, some)) * shape.head
    in_block = Work()
    for site in shape.sites:
        d, o, orders = site.inputs, site.outputs, site.orders
        in_block["sums", "blocks"] += _count_gram(shape.first * shape.tokens, d) + _count_gram(some, o)
        in_block["sums", "float32"] += orders * (some // DRAWN if d > WIDE else some) * (d**2 + 2 * o * d)
        # The inverse, its updates and those of ŴᵀŴ; then for each order a factor, W L and F W L.
        in_block["factors", f"cholesky {site.type}"] += (1 + orders) * d**3 // 3
        in_block["factors", site.type] += 5 * d**3 // 3 + o * d**2 + orders * (o * d**2 + 2 * o**2 * d)
    for site in shape.pruned:
        d, o, k = site.inputs, site.outputs, site.kept
        in_block["sums", "blocks"] += 2 * shape.windows * shape.tokens * o * d
        in_block["factors", "float64"] += len(STRENGTHS) * 2 * o * (d - k) * k
        in_block["factors", f"cholesky {site.type}"] += sum(STRENGTHS) * k**3 // 3
    return work + Work({key: shape.blocks * flops for key, flops in in_block.items()})


def count_scaled(shape: Shape) -> Work:
    """`best`; then over as many other windows the dense model's predictions, and one pass forward, again and back."""
    windows, measured = shape.windows, len(SampleSplit.of(shape.windows, 0).measured)
    forward, back = shape.blocks * shape.narrow.forward, (shape.blocks - 1) * shape.narrow.back
    blocks = windows * (shape.blocks * shape.dense.forward + 2 * forward + back) + 2 * measured * forward
    heads = (3 * windows + 4 * measured) * shape.tokens * shape.head
    return count_best(shape) + Work({("blocks", "blocks"): blocks + heads})


def count_export(shape: Shape) -> Work:
    """The proof: a window of its own in the model and in its graph."""
    once = shape.blocks * shape.dense.forward + shape.tokens * shape.head
    return Work({("blocks", "float32"): 2 * FEW_WINDOWS * once})


JOBS: dict[str, Callable[[Shape], Work]] = {
    "wanda-50": count_passes,
    "sparsegpt-50": count_sparsegpt,
    "wanda-sp": count_passes,
    "ridge": count_ridge,
    "best-uniform": count_best,
    "best": count_best,
    "best-scaled": count_scaled,
    "GPTQ": count_sparsegpt,
    "export": count_export,
}


def find_output(model: Model, job: str, ratio: float) -> tuple[TensorSpecs, int]:
    """Return the tensors of an output, those of the input where shapes stay, and bytes."""
    if job == "export":
        return model.shapes, cost_of(model).parameters * torch.float32.itemsize
    recipe = load_recipe(job, ratio=None if job.endswith("-50") else ratio) if job != "GPTQ" else None
    output = preview_job(Job(model, recipe or quantize_recipe("int4", None, "gptq"))).output
    specs = {name: spec for file in output.layout.values() for name, spec in file.items()}
    return model.shapes if output.packed else specs, output.cost.bytes


def count_work(model: Model, job: str, windows: int, tokens: int, ratio: float) -> Work:
    specs, written = find_output(model, job, ratio)
    disk = Work({("disk", "read"): cost_of(model).bytes, ("disk", "write"): written})
    return JOBS[job](Shape.of(model, windows, tokens, specs)) + disk


def _time(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    def once() -> float:
        start = clock()
        run()
        return clock() - start

    return min(once() for _ in range(TURNS))


def measure_speeds(model: Model, folder: Path) -> dict[str, float]:
    """Return FLOPs or bytes a second: of products with the largest weight, a factor as wide as its Gram, and files."""
    rows, columns = max((model.shapes[name][1] for name in model.weights(model.spaced_blocks.start)), key=prod)
    speeds: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x, weight, name = torch.rand(2048, columns).to(dtype), torch.rand(rows, columns).to(dtype), _name(dtype)
        speeds[name] = 2 * len(x) * rows * columns / _time(partial(torch.matmul, x, weight.T))
        if dtype != torch.bfloat16:
            gram = (x.T @ x).add_(torch.eye(columns, dtype=dtype), alpha=columns)
            speeds[f"cholesky {name}"] = columns**3 / 3 / _time(partial(torch.linalg.cholesky, gram))
    speeds["blocks"] = speeds[_name(resolve_compute_dtype("auto", torch.device("cpu"), model.dtype))]
    files, buffer = sorted(model.checkpoint.path.glob("*.safetensors")), bytearray(CHUNK)

    def read() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def write() -> None:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for _ in range(16):
                file.write(buffer)
            os.fsync(file.fileno())

    speeds["read"] = sum(path.stat().st_size for path in files) / _time(read, time.perf_counter)
    speeds["write"] = 16 * CHUNK / _time(write, time.perf_counter)
    return speeds


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Measure this machine, count, and print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder to time writing in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for path in args.models:
        model = open_model(str(path))
        speeds = measure_speeds(model, args.work)
        print(f"\n{path.name}, 1e9 a second: " + ", ".join(f"{kind} {n / 1e9:.3g}" for kind, n in speeds.items()))
        kinds = [kind for kind in speeds if kind not in ("bfloat16", "read", "write")]
        titles = [*(f"TFLOP, {kind}" for kind in kinds), *(f"{part}, s" for part in PARTS), "floor, s"]
        print(f"| job | {' | '.join(titles)} |\n|{'---|' * (len(titles) + 1)}")
        for job in JOBS:
            work = count_work(model, job, args.samples, args.window, args.ratio)
            flops = [sum(n for (_, own), n in work.items() if own == kind) / 1e12 for kind in kinds]
            seconds = [sum(n / speeds[kind] for (own, kind), n in work.items() if own == part) for part in PARTS]
            cells = [*(f"{n:.2f}" for n in flops), *(f"{n:.1f}" for n in [*seconds, sum(seconds)])]
            print(f"| `{job}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
