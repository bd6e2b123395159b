"""A table of the time that a block and a unit of its spaces take on this machine, for `--target-latency`.

Models of a few of its blocks, with weights that are drawn, are timed in turns in PyTorch: as many blocks as fit into
`MOST_BYTES`, half as many, and as many with half the units of each space; where dimensions of the residual stream may
go, both numbers of blocks with half of these as well. Time is taken to be additive over blocks and linear in the widths
of each. One more model, of half of everything, says how far off that is.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from ckpt_prune._version import __version__
from ckpt_prune.benchmarking.run import processor_name, take_turns
from ckpt_prune.benchmarking.runners import TorchTimer, timer_of
from ckpt_prune.benchmarking.workload import STEPS, Workload, choose_workloads, reads_of
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import meter
from ckpt_prune.job.cost import cost_of
from ckpt_prune.job.latency import TRUSTED, Latencies, StreamTime
from ckpt_prune.job.sizes import Timed
from ckpt_prune.model.containers.choosing import ANY, REMOTE, choose_container
from ckpt_prune.model.containers.remote import remote_model_class, with_block_facts
from ckpt_prune.model.depth import shorten_model
from ckpt_prune.model.model import Model
from ckpt_prune.model.skeleton import parse_config, skip_initialisation
from ckpt_prune.model.spaces import SpaceName, recipe_space

MOST_BYTES = 2**30
"""Of the weights of one of the models that are timed."""
ROUNDS, WARMUP = 12, 2
"""Of each of them; the fastest counts: what else runs on the machine only slows one down."""
ATTEMPTS = 3
"""Times that it is measured at the most, where a machine that does other things too spoils it."""
CHECKED_BYTES = 4 * 2**30
"""Weights of the largest model that a table is held against whole."""


class Table(BaseModel):
    """What was measured, as it is kept.

    Attributes:
        rest, block, units, stream: as `Latencies` has them, in nanoseconds.
        blocks: of the models that were timed.
        half: what a model of half of everything took.
        told: what the table says of it.
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
        """For the size of a model."""
        return Latencies(self.rest, self.block, self.units, self.stream, self.off)

    @property
    def off(self) -> float:
        """Share of what a model of half of everything took that the table misses it by."""
        return abs(self.told / self.half - 1)

    @property
    def line(self) -> str:
        """In words."""
        of = self.stream
        stream = ""
        doubt = (
            "" if self.off <= TRUSTED else ": the machine does other things too, so do not rely on it; it is not kept"
        )
        if of is not None:
            shares = [of.width * each for each in (of.block / self.block, of.rest / self.rest if self.rest else 0.0)]
            stream = f", of which the width of the residual stream makes {shares[0]:.0%} and {shares[1]:.0%}"
        return (
            f"latency table: {self.block / 1e6:.4g} ms a block, {self.rest / 1e6:.4g} ms for the rest{stream}; of half "
            f"of everything it says {self.told / 1e6:.4g} ms, which took {self.half / 1e6:.4g} ms{doubt}"
        )


@dataclass(frozen=True)
class Variant:
    """A model that is timed: so many blocks, with so many units of some spaces, and all its residual stream or half."""

    blocks: int
    kept: dict[SpaceName, int]
    narrow: bool = False


@dataclass(frozen=True)
class HalfStream:
    """A residual stream of about half its dimensions.

    Attributes:
        kept: how many.
        of: a model → the same with so many.
    """

    kept: int
    of: Callable[[Model], Model]


def workload_of(folder: Path, timed: Timed, *, trust: bool = False) -> Workload:
    """What is timed of a model.

    Args:
        folder: its checkpoint.
        timed: reading a text, or a single token after one; of other models one pass.
        trust: run the checkpoint's own code for its config.

    Raises:
        UserError: the model cannot do that.
    """
    reads = reads_of(folder, None, trust=trust)
    if timed.single and not reads.cached:
        raise UserError(f"{folder} generates no text, of which a single token could be timed: leave @token out")
    if timed.tokens is not None and reads.modality == "image":
        raise UserError(f"{folder} reads images: leave out what stands behind the @")
    steps = STEPS if timed.single and timed.tokens is not None else None if timed.single else 0
    if timed.tokens is not None and reads.context is not None and timed.tokens + (steps or 0) > reads.context:
        after = f" and {steps} after it" if steps else ""
        raise UserError(f"@: a text of {timed.tokens} tokens{after} is more than the context of {reads.context}")
    (found,) = choose_workloads([reads, reads], [str(folder)] * 2, batches=(1,), tokens=timed.tokens, steps=steps)
    return found


def table_of(
    model: Model, spaces: Iterable[SpaceName], workload: Workload, device: torch.device, half: HalfStream | None = None
) -> Table:
    """The table of a model: what is kept of it in the user's cache, or measured now.

    It is measured again where it misses what holds it to account by more than `TRUSTED`; the best of `ATTEMPTS` is
    taken then, and is not kept.

    Args:
        model: the dense model.
        spaces: of which units may go.
        workload: what is timed.
        device: where.
        half: where dimensions of the residual stream may go: what is timed of that.
    """
    wanted = [space for space in spaces if model.units(space) > 1]
    place = _folder() / f"{_key(model, wanted, workload, device, half)}.json"
    try:
        kept = Table.model_validate_json(place.read_bytes())
        if kept.off <= TRUSTED:  # one of an earlier version may not be
            return kept
    except (OSError, ValidationError):
        pass
    found = _measured(model, wanted, workload, device, half)
    for _ in range(ATTEMPTS - 1):
        if found.off <= TRUSTED:
            break
        found = min(found, _measured(model, wanted, workload, device, half), key=lambda each: each.off)
    if found.off > TRUSTED:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, found.model_dump_json(indent=2) + "\n")
    except (OSError, UserError):  # it is measured again next time
        pass
    return found


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "ckpt-prune" / "latency"


def _key(
    model: Model, spaces: Sequence[SpaceName], workload: Workload, device: torch.device, half: HalfStream | None
) -> str:
    """sha256 of all that the table depends on: machine, versions, the model's shape and what is timed."""
    where = processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    config = {key: value for key, value in model.checkpoint.config.items() if not key.startswith("_")}
    facts = [__version__, torch.__version__, transformers.__version__, where, torch.get_num_threads(), str(device)]
    told: list[Any] = [facts, config, list(spaces), asdict(workload)]
    if half is not None:
        told.append(half.kept)
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def _measured(
    model: Model, spaces: Sequence[SpaceName], workload: Workload, device: torch.device, half: HalfStream | None
) -> Table:
    blocks = _blocks(model)
    few = max(1, blocks // 2)
    known = list(dict.fromkeys(map(recipe_space, spaces)))
    alike = {name: [space for space in spaces if recipe_space(space) == name] for name in known}
    halves = {name: {space: max(1, model.units(space) // 2) for space in own} for name, own in alike.items()}
    every = {space: kept for own in halves.values() for space, kept in own.items()}
    variants = [Variant(blocks, {}), Variant(few, {}), *(Variant(blocks, own) for own in halves.values())]
    if half is not None:
        variants += [Variant(blocks, {}, narrow=True), Variant(few, {}, narrow=True)]
    variants.append(Variant(few, every, narrow=half is not None))
    timers = [timer_of(built(model, variant, half), device) for variant in variants]
    whole, part, *others, least = fastest(timers, workload, "timing blocks")
    rest, block = _rest_and_block(whole, part, blocks, few)
    units = {
        name: max((whole - took) / blocks, 0.0) / (model.units(own[0]) - halves[name][own[0]])
        for (name, own), took in zip(alike.items(), others[: len(alike)], strict=True)
    }
    units = _within(units, block, {name: model.units(own[0]) for name, own in alike.items()})
    stream = None
    width = kept = model.dimension("hidden")
    if half is not None:
        kept = half.kept
        whole, part = others[len(alike) :]
        stream = _stream_time(width, width - kept, (rest, block), _rest_and_block(whole, part, blocks, few))
    found = Table(rest=rest, block=block, units=units, stream=stream, blocks=blocks, half=least, told=0.0)
    told = found.latencies.narrowed(kept).at(model.units, [every] * few)
    return found.model_copy(update={"told": float(told)})


def _rest_and_block(whole: float, part: float, blocks: int, few: int) -> tuple[float, float]:
    """What stands outside the blocks takes, and one of them, by models of `blocks` and of `few`."""
    block = max((whole - part) / (blocks - few), whole * 1e-6) if blocks > few else whole
    return max(0.0, whole - blocks * block), block


def _stream_time(width: int, gone: int, wide: tuple[float, float], narrow: tuple[float, float]) -> StreamTime:
    """What a dimension takes, of rest and block: something, and all of them together no more than there is.

    Args:
        width: dimensions of the dense stream.
        gone: of them, in the narrow model.
        wide: rest and block of the dense model.
        narrow: of the narrow one.
    """
    rest, block = (
        min(max((had - has) / gone, 1e-4 * had / width), had / width) for had, has in zip(wide, narrow, strict=True)
    )
    return StreamTime(width=width, rest=rest, block=block)


def _within(units: dict[str, float], block: float, counts: dict[str, int]) -> dict[str, float]:
    """Times of units above zero, and all together no more than nearly the block's, whatever noise there was."""
    least = {name: max(own, 1e-4 * block / counts[name]) for name, own in units.items()}
    together = sum(own * counts[name] for name, own in least.items())
    scale = min(1.0, 0.95 * block / together) if together else 1.0
    return {name: own * scale for name, own in least.items()}


def _blocks(model: Model) -> int:
    """How many blocks are timed: all, or as many as fit; two at the least where there are two."""
    whole = 4 * cost_of(model).parameters
    one = whole - 4 * cost_of(shorten_model(model, range(1, model.blocks))).parameters if model.blocks > 1 else whole
    fit = int((MOST_BYTES - (whole - model.blocks * one)) // max(one, 1))
    return max(min(2, model.blocks), min(model.blocks, fit))


def built(model: Model, variant: Variant, half: HalfStream | None = None) -> nn.Module:
    """A model of a variant's shape on the CPU, in float32, its weights drawn."""
    short = shorten_model(model, range(variant.blocks))
    if variant.narrow and half is not None:
        short = half.of(short)
    widths = [variant.kept] * variant.blocks
    biases = {module for module in short.family.linears if short.has(module, "bias")}
    try:
        container = choose_container(short, widths, biases, requested=ANY)
    except UserError:
        container = choose_container(short, widths, biases, requested=REMOTE)
    config = parse_config(container.config)
    with skip_initialisation():
        if container.remote_class is not None:
            made: Any = remote_model_class(container.remote_class)(with_block_facts(config, container.remote_class))
        else:
            made = getattr(transformers, container.architecture or short.family.architecture)(config)
    made.tie_weights()
    generator = torch.Generator().manual_seed(0)
    found: nn.Module = made.float().eval()
    for parameter in found.parameters():
        parameter.data.uniform_(-0.02, 0.02, generator=generator)
    return found


def fastest(timers: Sequence[TorchTimer], workload: Workload, say: str) -> list[float]:
    """Nanoseconds of each, timed in turns."""
    phase = workload.phases[-1]
    with meter(ROUNDS + WARMUP, say, unit="round") as bar:
        rounds = iter(range(1, ROUNDS + WARMUP + 1))
        timings = take_turns(timers, workload, rounds=ROUNDS, warmup=WARMUP, tick=lambda: bar.to(next(rounds)))
    return [1e9 * min(min(each[phase]) for each in own) for own in timings]
