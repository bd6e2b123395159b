"""A table of the time that a block and a unit of its spaces take on this machine, for `--target-latency`.

Models of a few blocks, with random weights, are timed in turns in PyTorch: as many blocks as fit into `MOST_BYTES`,
half as many, and as many with half the units of each space. If dimensions of the residual stream may go, both numbers
of blocks are timed with half of these as well. Time is taken to be additive over blocks and linear in the widths of
each. One more model, of half of everything, measures the error of that.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from ckpt_prune._version import __version__
from ckpt_prune.benchmarking.run import take_turns
from ckpt_prune.benchmarking.runners import GraphTimer, TorchTimer
from ckpt_prune.benchmarking.workload import STEPS, Workload, choose_workloads, read_model_inputs
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.machine import processor_name
from ckpt_prune.common.progress import meter
from ckpt_prune.common.user_cache import user_cache
from ckpt_prune.job.latency import TRUSTED, Latencies, StreamTime
from ckpt_prune.model.containers.choosing import ANY, REMOTE, choose_container
from ckpt_prune.model.containers.remote import remote_model_class, with_block_facts
from ckpt_prune.model.cost import cost_of
from ckpt_prune.model.depth import shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config, skip_initialisation
from ckpt_prune.model.spaces import SpaceName, recipe_space
from ckpt_prune.recipe.sizes import Timed

MOST_BYTES = 2**30
"""Largest weights of a model that is timed for the table."""
ROUNDS, WARMUP = 12, 2
"""The fastest of the rounds counts: what else runs on the machine only slows a model down."""
ATTEMPTS = 3
"""Most measurements of a table, if a busy machine spoils the first."""
CHECKED_BYTES = 4 * 2**30
"""Weights of the largest model that is timed whole to check the table."""


class LatencyTable(BaseModel):
    """Measured times in nanoseconds: `rest`, `block`, `units` and `stream` as in `Latencies`.

    `blocks` is the number of blocks of the models that were timed. `half` is what a model of half of everything took,
    and `told` what the table says of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rest: float
    block: float
    units: dict[str, float]
    stream: StreamTime | None = None
    blocks: int
    half: float
    told: float

    @property
    def latencies(self) -> Latencies:
        return Latencies(self.rest, self.block, self.units, self.stream, self.error)

    @property
    def error(self) -> float:
        """Relative error of the table for the model of half of everything."""
        return abs(self.told / self.half - 1)

    @property
    def line(self) -> str:
        stream, doubt = "", ""
        if self.error > TRUSTED:
            doubt = ": the machine does other things too, so do not rely on it; it is not kept"
        if (own := self.stream) is not None:
            shares = [own.width * each for each in (own.block / self.block, own.rest / self.rest if self.rest else 0.0)]
            stream = f"; the width of the residual stream takes {shares[0]:.0%} and {shares[1]:.0%}"
        return (
            f"latency table: {self.block / 1e6:.4g} ms a block, {self.rest / 1e6:.4g} ms for the rest{stream}; of half "
            f"of everything it says {self.told / 1e6:.4g} ms, which took {self.half / 1e6:.4g} ms{doubt}"
        )


@dataclass(frozen=True)
class Variant:
    """A model that is timed: so many blocks, with so many units of some spaces, and all or half its residual stream."""

    blocks: int
    kept: dict[SpaceName, int]
    narrow: bool = False


@dataclass(frozen=True)
class HalfStream:
    """A residual stream of about half its dimensions: how many stay, and what makes a model have so many."""

    kept: int
    of: Callable[[Model], Model]


def choose_timed_workload(folder: Path, timed: Timed, *, trust: bool = False) -> Workload:
    """Return the workload for a size in time: reading a text, or a single token after one; of other models one pass."""
    inputs = read_model_inputs(folder, trust=trust)
    if timed.single and not inputs.cached:
        raise UserError(f"{folder} generates no text, so no single token can be timed: leave @token out")
    if timed.tokens is not None and inputs.modality == "image":
        raise UserError(f"{folder} reads images: leave out the @ and what follows it")
    steps = STEPS if timed.single and timed.tokens is not None else None if timed.single else 0
    if timed.tokens is not None and inputs.context is not None and timed.tokens + (steps or 0) > inputs.context:
        after = f" and {steps} after it" if steps else ""
        raise UserError(f"@: a text of {timed.tokens} tokens{after} is more than the context of {inputs.context}")
    (workload,) = choose_workloads([inputs] * 2, [str(folder)] * 2, batches=(1,), tokens=timed.tokens, steps=steps)
    return workload


def load_or_measure_table(
    model: Model, spaces: Iterable[SpaceName], workload: Workload, device: torch.device, half: HalfStream | None = None
) -> LatencyTable:
    """Return the table of a dense model: the one in the user's cache, or measured now.

    It is measured again if its error is above `TRUSTED`; after `ATTEMPTS` the best is returned, and not kept.

    Args:
        spaces: whose units may go.
        half: given if dimensions of the residual stream may go.
    """
    spaces = [space for space in spaces if max(model.unit_counts(space)) > 1]
    place = user_cache("latency") / f"{_cache_key(model, spaces, workload, device, half)}.json"
    with suppress(OSError, ValidationError):
        cached = LatencyTable.model_validate_json(place.read_bytes())
        if cached.error <= TRUSTED:
            return cached
    table = _measure_table(model, spaces, workload, device, half)
    for _ in range(ATTEMPTS - 1):
        if table.error <= TRUSTED:
            break
        table = min(table, _measure_table(model, spaces, workload, device, half), key=lambda each: each.error)
    if table.error <= TRUSTED:
        with suppress(OSError, UserError):  # it is measured again next time
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, table.model_dump_json(indent=2) + "\n")
    return table


def _cache_key(
    model: Model, spaces: Sequence[SpaceName], workload: Workload, device: torch.device, half: HalfStream | None
) -> str:
    """sha256 of all that the table depends on: machine, versions, the model's shape and what is timed."""
    processor = processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    config = {key: value for key, value in model.checkpoint.config.items() if not key.startswith("_")}
    facts = [__version__, torch.__version__, transformers.__version__, processor, torch.get_num_threads(), str(device)]
    key: list[Any] = [facts, config, list(spaces), asdict(workload)]
    if half is not None:
        key.append(half.kept)
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _measure_table(
    model: Model, spaces: Sequence[SpaceName], workload: Workload, device: torch.device, half: HalfStream | None
) -> LatencyTable:
    blocks = _count_timed_blocks(model)
    few = max(1, blocks // 2)
    names = list(dict.fromkeys(map(model.counted_as, spaces)))
    alike = {name: [space for space in spaces if model.counted_as(space) == name] for name in names}
    widths = {space: max(model.unit_counts(space)) for space in spaces}
    halves = {name: {space: max(1, widths[space] // 2) for space in members} for name, members in alike.items()}
    everything = {space: kept for counts in halves.values() for space, kept in counts.items()}
    variants = [Variant(blocks, {}), Variant(few, {}), *(Variant(blocks, counts) for counts in halves.values())]
    if half is not None:
        variants += [Variant(blocks, {}, narrow=True), Variant(few, {}, narrow=True)]
    variants.append(Variant(few, everything, narrow=half is not None))
    timers = [TorchTimer(build_variant(model, variant, half).to(device), device) for variant in variants]
    all_blocks, few_blocks, *others, least = time_fastest(timers, workload, "timing blocks")
    rest, block = _split_rest_and_block(all_blocks, few_blocks, blocks, few)
    units = {
        name: max((all_blocks - time) / blocks, 0.0) / (widths[members[0]] - halves[name][members[0]])
        for (name, members), time in zip(alike.items(), others[: len(alike)], strict=True)
    }
    units = _bound_units(units, block, {name: widths[members[0]] for name, members in alike.items()})
    units = dict.fromkeys(map(recipe_space, spaces), 0.0) | units  # one key states several: their time is the first's
    stream = None
    width = kept = model.dimension("hidden")
    if half is not None:
        kept = half.kept
        all_blocks, few_blocks = others[len(alike) :]
        narrow = _split_rest_and_block(all_blocks, few_blocks, blocks, few)
        stream = _time_stream(width, width - kept, (rest, block), narrow)
    table = LatencyTable(rest=rest, block=block, units=units, stream=stream, blocks=blocks, half=least, told=0.0)
    foretold = table.latencies.narrow(kept).at(model.dense_widths, _where_they_are(model, few, everything))
    return table.model_copy(update={"told": float(foretold)})


def _split_rest_and_block(whole: float, part: float, blocks: int, few: int) -> tuple[float, float]:
    """Time outside the blocks, and of one block, by models of `blocks` and of `few`."""
    block = max((whole - part) / (blocks - few), whole * 1e-6) if blocks > few else whole
    return max(0.0, whole - blocks * block), block


def _time_stream(width: int, dropped: int, wide: tuple[float, float], narrow: tuple[float, float]) -> StreamTime:
    """Time of one dimension in rest and block: above zero, and all together at most the whole.

    `wide` and `narrow` are rest and block of the dense model and of one without `dropped` of its `width` dimensions.
    """
    rest, block = (
        min(max((had - has) / dropped, 1e-4 * had / width), had / width) for had, has in zip(wide, narrow, strict=True)
    )
    return StreamTime(width=width, rest=rest, block=block)


def _bound_units(units: dict[str, float], block: float, counts: dict[str, int]) -> dict[str, float]:
    """Times of units above zero, and all together at most nearly the block's, in spite of noise."""
    least = {name: max(seconds, 1e-4 * block / counts[name]) for name, seconds in units.items()}
    together = sum(seconds * counts[name] for name, seconds in least.items())
    scale = min(1.0, 0.95 * block / together) if together else 1.0
    return {name: seconds * scale for name, seconds in least.items()}


def _count_timed_blocks(model: Model) -> int:
    """Return all blocks, or as many as fit, but two if there are two."""
    model_bytes = 4 * cost_of(model).parameters
    one = (
        model_bytes - 4 * cost_of(shorten_model(model, range(1, model.blocks))).parameters
        if model.blocks > 1
        else model_bytes
    )
    fit = int((MOST_BYTES - (model_bytes - model.blocks * one)) // max(one, 1))
    return max(min(2, model.blocks), min(model.blocks, fit))


def _where_they_are(model: Model, blocks: int, kept: Mapping[SpaceName, int]) -> list[dict[SpaceName, int]]:
    """Return the units of each of so many blocks, of the spaces that it has."""
    return [{name: units for name, units in kept.items() if name in model.spaces(block)} for block in range(blocks)]


def build_variant(model: Model, variant: Variant, half: HalfStream | None = None) -> nn.Module:
    """Return a model of a variant's shape with random weights, float32 on the CPU."""
    short = shorten_model(model, range(variant.blocks))
    if variant.narrow and half is not None:
        short = half.of(short)
    widths = _where_they_are(short, variant.blocks, variant.kept)
    try:
        container = choose_container(short, widths, short.biased, requested=ANY)
    except UserError:
        container = choose_container(short, widths, short.biased, requested=REMOTE)
    config = parse_config(container.config)
    with skip_initialisation():
        if container.remote_class is not None:
            built: Any = remote_model_class(container.remote_class)(with_block_facts(config, container.remote_class))
        else:
            built = getattr(transformers, container.architecture or short.family.architecture)(config)
    built.tie_weights()
    generator = torch.Generator().manual_seed(0)
    module: nn.Module = built.float().eval()
    for parameter in module.parameters():
        parameter.data.uniform_(-0.02, 0.02, generator=generator)
    return module


def time_fastest(timers: Sequence[TorchTimer | GraphTimer], workload: Workload, title: str) -> list[float]:
    """Nanoseconds of each model's fastest run, timed in turns."""
    phase = workload.phases[-1]
    with meter(ROUNDS + WARMUP, title, unit="round") as bar:
        rounds = iter(range(1, ROUNDS + WARMUP + 1))
        timings = take_turns(timers, workload, rounds=ROUNDS, warmup=WARMUP, tick=lambda: bar.to(next(rounds)))
    return [1e9 * min(min(each[phase]) for each in rounds) for rounds in timings]
