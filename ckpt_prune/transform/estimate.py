"""What a job will take, said before it begins: time, memory and disk, from its shapes and what the machine does.

A pure function of the job and of `machine.Rates`. It counts what limits a run on one machine; it knows of nothing else
that runs there. Masks, rotations, recovery block by block, experts, and a search for λ by perplexity are not counted:
of these there is no estimate.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckpt_prune import machine
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import ENDS, SpaceName, known_space
from ckpt_prune.calibration.choosing import DEFAULT_WINDOWS
from ckpt_prune.calibration.fisher import LIMITS
from ckpt_prune.calibration.kinds import Collect
from ckpt_prune.calibration.measure import statistics_bytes
from ckpt_prune.calibration.products import gram_flops
from ckpt_prune.calibration.readout import READOUT_TOKENS
from ckpt_prune.calibration.streams import fold_slices
from ckpt_prune.checkpoint.units import duration, human_bytes
from ckpt_prune.compensation.choice import PLENTY
from ckpt_prune.machine import Rates
from ckpt_prune.planning.kinds import CHOSEN, kind_of
from ckpt_prune.planning.plan import Plan
from ckpt_prune.planning.recipe import Recipe
from ckpt_prune.planning.recovery_recipe import RecoveryRecipe
from ckpt_prune.recovery.training import Split, part_size
from ckpt_prune.scoring.unit_scores import UNIT_SCORES
from ckpt_prune.transform.engine import SWEEPS
from ckpt_prune.transform.estimate_axes import absorbing, stages_before, weighs
from ckpt_prune.transform.measured_effects import SHALLOW
from ckpt_prune.transform.refits import tried_out
from ckpt_prune.transform.settle import Settled
from ckpt_prune.transform.site_variants import POINTS, dropped_counts
from ckpt_prune.transform.space_effects import MANY, SPACE_POINTS
from ckpt_prune.transform.work import (
    BACK,
    Shape,
    Site,
    Stage,
    Work,
    back,
    back_of_logits,
    blended,
    described,
    factored,
    held_out,
    inner_moments,
    inner_ranked,
    inner_solved,
    moments,
    ranked,
    refitted,
    tried,
    turned,
)

WORTH_SAYING = 20.0
"""Seconds from which on a run is told of before it begins."""
STARTING = Work(calls=100_000)
"""Opening a model, its tokenizer and its config, and what else does not depend on its size."""
LIBRARIES = 160 * 2**20
"""Bytes that libraries take once they compute."""
_SLOW = Rates(2e9, 2e9, 2e9, 1e9, 5e8, 5e8, 5e8, 2e7, 1e5, 2e7, 1e8, 0)
"""A machine that is slower than any: a job that is short even there needs no measurement of this one."""


@dataclass(frozen=True)
class Estimate:
    """What a job will take.

    Attributes:
        seconds: by stage.
        peak_bytes: of memory.
        disk_bytes: of what is written, scratch included.
    """

    seconds: dict[str, float]
    peak_bytes: int
    disk_bytes: int

    @property
    def line(self) -> str:
        """In words."""
        return (
            f"about {duration(sum(self.seconds.values()))}, {human_bytes(self.peak_bytes)} of memory and "
            f"{human_bytes(self.disk_bytes)} of disk, where nothing else runs on this machine"
        )

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        stages = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        return {
            "seconds": round(sum(self.seconds.values()), 3),
            "peak_bytes": self.peak_bytes,
            "disk_bytes": self.disk_bytes,
            "stages": stages,
        }


def estimate(stages: Sequence[Stage], disk: int, rates: Rates) -> Estimate:
    """What stages take on a machine."""
    seconds: dict[str, float] = {}
    for stage in stages:
        seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.work.seconds(rates)
    peak = rates.resident + LIBRARIES + max(stage.memory for stage in stages)
    return Estimate(seconds, peak, disk)


def is_long(stages: Sequence[Stage]) -> bool:
    """Whether some machine may need `WORTH_SAYING` for it."""
    return sum(stage.work.seconds(_SLOW) for stage in stages) >= WORTH_SAYING


# ---- jobs --------------------------------------------------------------------------------------------------------


def of_calibration(
    model: Model,
    samples: int,
    tokens: int,
    collect: Sequence[Collect],
    folds: int,
    *,
    effects: bool = False,
    spaces: Collection[SpaceName] | None = None,
) -> list[Stage]:
    """Stages of `calibrate`.

    Args:
        model: the dense model.
        samples: how many.
        tokens: of each.
        collect: kinds of statistics.
        folds: of samples.
        effects: whether sites are pruned alone, too.
        spaces: whose sites are tried out; by default those that stand in no other.
    """
    trials = tried_out(model, spaces)
    shape = Shape.of(model, {space: model.units(space) for space in trials})
    count, grams = samples * tokens, "gram" in collect
    size = statistics_bytes(model, collect=collect, folds=folds, samples=samples)
    each = shape.read() + shape.run(samples, tokens) + shape.moments(count, gram=grams, linears="linears" in collect)
    for space, heads in shape.inner.items():
        if ENDS[known_space(space)] in collect:
            each += inner_moments(heads, samples, tokens)
    written = Work(disk=size, hashed=size, moved=4 * size)
    held = shape.states(samples, tokens) + shape.block_bytes + shape.activations(tokens) + 2 * size // shape.blocks
    stages = [Stage("measuring", STARTING + each * shape.blocks + written, held)]
    few = _few(model, samples, folds)
    if "fisher" in collect:
        stages += _gradients(model, shape, few, tokens, trials if grams else ())
    if "taylor" in collect:
        own = back(shape, samples, tokens) + Work(gemm=2 * count * shape.weights, moved=12 * samples * shape.weights)
        work = own * shape.blocks + back_of_logits(shape, count)
        stages.append(Stage("gradients", work, _of_gradients(shape, samples, tokens)))
    if effects:
        stages.append(_effects(model, shape, few, tokens, trials))
    return stages


def of_prune(settled: Settled) -> tuple[list[Stage], int] | None:
    """Stages of a prune, and what it writes; None where there is no estimate.

    Args:
        settled: the job. Without anything to measure on, the default number of windows stands for it.
    """
    request, recipe, model = settled.request, settled.recipe, settled.model
    if _uncounted(recipe) or settled.known is None:
        return None
    goes = request.shortened is not None or request.narrowed is not None
    if goes and request.whole.live is None and model.family.modality == "image":
        return None
    before, scratch = stages_before(settled) if goes else ([], 0)
    found = _of_spaces(settled) if recipe.spaces else _of_the_rest(settled)
    if found is None:
        return None
    after = [] if recipe.recovery is None else _scales(settled, recipe.recovery)
    return [*before, *found[0], *after], scratch + found[1]


def _of_the_rest(settled: Settled) -> tuple[list[Stage], int]:
    """Stages of a job of which nothing is left once blocks or dimensions are gone: they are written."""
    disk, rest = settled.output.cost.bytes, STARTING + _written(settled)
    narrowed = settled.request.narrowed
    if narrowed is None or narrowed.view is None:
        return [Stage("rest", rest, 0)], disk
    shape = Shape.of(settled.model)
    return [Stage("rest", absorbing(shape, narrowed.view) + rest, 16 * shape.weights)], disk


def _of_spaces(settled: Settled) -> tuple[list[Stage], int] | None:
    """Stages of what units of spaces that go take, and what is written."""
    request, recipe, model = settled.request, settled.recipe, settled.model
    whole = request.whole.model if weighs(request.whole.recipe) else model
    samples, tokens, folds = DEFAULT_WINDOWS, model.tokens, 4 if recipe.needs_folds else 1
    if request.live is not None:
        samples, tokens, folds = len(request.live.samples), request.live.samples.tokens, request.live.folds
    elif request.statistics is not None:
        index = request.statistics.index
        samples, tokens, folds = index.samples, index.window, index.folds
    elif model.family.modality == "image" and recipe.needs_moments:
        return None
    widths = settled.spaced_widths
    kept = {space: round(sum(width[space] for width in widths) / len(widths)) for space in recipe.spaces}
    shape = Shape.of(model, kept)
    cached = request.statistics is not None
    asked = not cached and recipe.needs_moments
    sequential = asked and recipe.target != "dense"
    first = asked and (not sequential or recipe.allocation == "least-error")
    disk = settled.output.cost.bytes
    stages: list[Stage] = []
    measured = 0
    if first:
        kinds = recipe.collect
        shallow = whole.blocks <= SHALLOW and recipe.weighed_by_effect
        own = list(recipe.spaces)
        stages += of_calibration(whole, samples, tokens, kinds, folds, effects=shallow, spaces=own)
        measured = statistics_bytes(whole, collect=kinds, folds=folds, samples=samples)
    elif cached:
        measured = sum(path.stat().st_size for path in request.statistics.folder.iterdir()) if request.statistics else 0
    if recipe.allocation == "least-error" and request.plan is None:
        stages.append(_ranking(recipe, Shape.of(whole, kept), measured))
    stages.append(_blocks(settled, shape, (samples, tokens, folds), sequential=sequential, read=measured))
    stages.append(Stage("rest", _written(settled), 0))
    return stages, disk + (measured if first else 0)


def _written(settled: Settled) -> Work:
    """What reading the dense tensors once more and writing the output take."""
    disk = settled.output.cost.bytes
    written = settled.before.bytes + 2 * disk
    return Work(moved=4 * written, disk=disk, hashed=written)


def of_job(settled: Settled) -> Estimate | None:
    """What a prune will take here; None where there is no estimate."""
    found = of_prune(settled)
    return None if found is None else estimate(*found, machine.measured_rates(*_machine(settled)))


def of_plan(settled: Settled, plan: Plan) -> Estimate | None:
    """What a prune by a plan that was made of a job will take here; None where there is no estimate."""
    return of_job(replace(settled, request=replace(settled.request, plan=plan)))


def forewarning(settled: Settled) -> str | None:
    """What to say of a prune before it begins, where it is long."""
    found = of_prune(settled)
    return None if found is None else _warning(*found, *_machine(settled))


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` is to do; see `of_calibration`.

    Attributes:
        device: that it computes on.
        dtype: that it computes in.
    """

    model: Model
    samples: int
    tokens: int
    collect: Sequence[Collect]
    folds: int
    device: torch.device
    dtype: torch.dtype
    effects: bool

    @property
    def told(self) -> Estimate:
        """What it will take here."""
        return estimate(self._stages, self._disk, machine.measured_rates(self.device, self.dtype))

    @property
    def forewarning(self) -> str | None:
        """What to say of it before it begins, where it is long."""
        return _warning(self._stages, self._disk, self.device, self.dtype)

    @property
    def _stages(self) -> list[Stage]:
        return of_calibration(self.model, self.samples, self.tokens, self.collect, self.folds, effects=self.effects)

    @property
    def _disk(self) -> int:
        return statistics_bytes(self.model, collect=self.collect, folds=self.folds, samples=self.samples)


def _warning(stages: Sequence[Stage], disk: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """What to say of a job where it is long; the machine is not measured for one that is short on any."""
    if not is_long(stages):
        return None
    told = estimate(stages, disk, machine.measured_rates(device, dtype))
    return f"this takes {told.line}" if sum(told.seconds.values()) >= WORTH_SAYING else None


def _machine(settled: Settled) -> tuple[torch.device, torch.dtype]:
    """What a prune computes on, and in."""
    live = settled.request.live
    return settled.request.device, torch.float32 if live is None else live.compute_dtype


# ---- their parts -------------------------------------------------------------------------------------------------


def _uncounted(recipe: Recipe) -> bool:
    """Whether a recipe does what no formula here is for."""
    odd = (
        recipe.mask is not None
        or recipe.low_rank is not None
        or (recipe.recovery is not None and recipe.recovery.method != "scales")
        or recipe.perplexity_grid is not None
    )
    return odd or recipe.export is not None or any(ENDS[known_space(space)] == "experts" for space in recipe.spaces)


def _few(model: Model, samples: int, folds: int) -> int:
    """Samples that gradients are taken of."""
    last = fold_slices(samples, folds)[-1]
    return min(int(last.stop - last.start), LIMITS[model.family.modality])


def _of_gradients(shape: Shape, samples: int, tokens: int) -> int:
    states = shape.states(samples, tokens) * (shape.blocks + 2)
    at_once = max(READOUT_TOKENS, tokens)
    readout: int = 4 * (shape.outside + 4 * at_once * shape.outputs)
    return states + max(readout, shape.block_bytes + 3 * shape.activations(tokens) + 8 * shape.weights)


def _gradients(model: Model, shape: Shape, few: int, tokens: int, trials: Sequence[SpaceName]) -> list[Stage]:
    """The Fisher metric, sites tried out, and in deep models spaces as wholes."""
    count = few * tokens
    block = back(shape, few, tokens)
    spaces = Work()
    for space in shape.consumers:
        block += Work(grams=gram_flops(count, shape.sites[space].outputs))
    for space in trials:
        site, scores = shape.sites[space], len(kind_of(space).candidates)
        points = len(dropped_counts(site.units, POINTS))
        variants = scores * points
        if scores > 1:
            block += ranked(site)
        block += (factored(site) + tried(site, points)) * scores
        block += Work(
            single=2 * count * variants * site.outputs * site.inputs, moved=20 * count * variants * site.inputs
        )
        if model.blocks > SHALLOW:
            runs = len(dropped_counts(site.units, SPACE_POINTS))
            runs += scores if scores > 1 and site.units >= MANY else 0
            own = factored(site) * min(runs, scores) + tried(site, runs)
            spaces += (own + shape.run(few, tokens) * runs) * shape.blocks + shape.logits(count) * (2 * runs)
    held = _of_gradients(shape, few, tokens) + 8 * 6 * shape.widest**2
    return [Stage("gradients", block * shape.blocks + back_of_logits(shape, count) + spaces, held)]


def _effects(model: Model, shape: Shape, few: int, tokens: int, trials: Sequence[SpaceName]) -> Stage:
    """Every site pruned alone, and all that follows run again."""
    work = Work()
    for site in (shape.sites[space] for space in trials):
        points = len(dropped_counts(site.units, POINTS))
        runs = points * shape.blocks * (shape.blocks + 1) / 2
        work += shape.run(few, tokens) * runs + shape.logits(few * tokens) * (2 * points * shape.blocks)
        work += (ranked(site) + (blended(site) + refitted(site)) * points) * shape.blocks
    return Stage("effects", work, _of_gradients(shape, few, tokens))


def _scales(settled: Settled, recovery: RecoveryRecipe) -> list[Stage]:
    """Scales of all blocks: the dense model once, then forward, back and a softmax for every step."""
    request = settled.request
    shape, training = Shape.of(request.whole.model), request.training
    samples, tokens = recovery.samples or DEFAULT_WINDOWS, request.model.tokens
    if training is not None:
        samples, tokens = len(training.samples), training.samples.tokens
    split, batch = Split.of(samples, recovery.held_out), min(samples, part_size(recovery))
    steps = len(split.train) / batch
    # Weights are multiplied by their scales forward and again back, and their gradients are summed up.
    again = shape.read() + Work(moved=12 * shape.weights)
    step = again * 2 + Work(moved=20 * shape.weights)
    step += shape.run(batch, tokens) * (3 + BACK)
    tried_out = again * (len(split.measured) / batch) + shape.run(len(split.measured), tokens)
    stays = settled.output.cost.parameters / settled.before.parameters
    blocks = (step * (steps * recovery.epochs) + tried_out * (recovery.epochs + 1)) * (shape.blocks * stays)
    count = len(split.train) * tokens
    heads = (back_of_logits(shape, count) + shape.logits(count)) * recovery.epochs
    heads += shape.logits(len(split.measured) * tokens) * (2 * (recovery.epochs + 1))
    dense = (shape.read() + shape.run(samples, tokens)) * shape.blocks
    held = _of_gradients(shape, batch, tokens) + shape.states(samples, tokens) + 4 * shape.outside
    return [Stage("scales", dense + blocks + heads, held)]


def _ranking(recipe: Recipe, shape: Shape, read: int) -> Stage:
    """Curves of every site by every score."""
    block = Work()
    for space in recipe.spaces:
        if space in shape.inner:
            block += inner_ranked(shape.inner[space])
            continue
        site, score = shape.sites[space], recipe.spaces[space].score
        scores = kind_of(space).candidates if score == CHOSEN else (score,)
        if "obs" in scores:
            block += ranked(site)
        block += factored(site, metric=recipe.weighed_by_effect) * len(scores)
    work = block * shape.blocks + Work(hashed=read, moved=4 * read)
    return Stage("ranking", work, 8 * 5 * shape.widest**2)


def _runs(recipe: Recipe, stages: int, *, sequential: bool) -> float:
    """Runs of a block by a sequential recipe: one for what is measured in each stage, and one to go on."""
    if not sequential:
        return 0
    # Experts that stay are fitted to what the dense block gives and the pruned one does not.
    again = 2 * SWEEPS if recipe.refits_experts else 0
    if recipe.target == "drift":
        # The dense block, the pruned one up to the end and once more to go on, and up to each site before the last.
        return 3 + 0.6 * (stages - 1) + again
    return (stages if recipe.true_sequential else 1) + 1 + again


def _blocks(settled: Settled, shape: Shape, data: tuple[int, int, int], *, sequential: bool, read: int) -> Stage:
    """Every block solved, and measured first where the recipe is sequential."""
    recipe, request = settled.recipe, settled.request
    samples, tokens, folds = data
    count = samples * tokens
    block = shape.read() + shape.run(samples, tokens) * _runs(recipe, len(recipe.spaces), sequential=sequential)
    memory = shape.block_bytes
    for space, own in recipe.spaces.items():
        if space in shape.inner:
            heads = shape.inner[space]
            if sequential:
                block += inner_moments(heads, samples, tokens)
            chosen = len(own.compensation.grid) * folds if own.compensation.by_folds else 0
            fits = 0 if own.compensation.method == "none" else 2 + chosen
            block += inner_ranked(heads) + inner_solved(heads, fits)
            continue
        site = shape.sites[space]
        if sequential:
            block += moments(count, site.inputs, gram=recipe.needs_gram(space))
            if recipe.target == "drift":
                block += Work(single=2 * count * site.outputs * site.inputs, reduced=3 * count * site.outputs)
        known = request.plan is not None
        if own.score in UNIT_SCORES and UNIT_SCORES[own.score].needs_gram and not known and sequential:
            block += ranked(site) * (1 / len(kind_of(space).candidates) if own.score == CHOSEN else 1)
        for work in _solving(recipe, site, space, count, folds, known=known):
            block += work
        if request.diagnostics and site.kept < site.inputs and recipe.needs_gram(space):
            block += described(site, errors=recipe.target != "drift")
        copies = 12 if own.compensation.by_folds else 5 if own.compensation.method != "none" else 1
        if ENDS[known_space(space)] == "values":
            block += Work(wide=4 * (folds + 1) * site.inputs**3)
        memory = max(memory, shape.block_bytes + 8 * copies * site.inputs**2 + 4 * folds * site.inputs**2)
    if sequential:
        streams = 2 if recipe.target == "drift" else 1
        memory += streams * (shape.states(samples, tokens) + shape.block_bytes) + shape.activations(tokens)
    work = block * shape.blocks + Work(hashed=read, moved=4 * read)
    return Stage("blocks", STARTING + work, memory)


def _solving(recipe: Recipe, site: Site, space: Any, count: int, folds: int, *, known: bool) -> Iterator[Work]:
    """What makes up for the units that go."""
    own = recipe.spaces[space].compensation
    if own.method == "none" or site.kept == site.inputs:
        yield Work(moved=16 * site.outputs * site.inputs, calls=30)
        return
    if not recipe.needs_gram(space):
        yield Work(wide=4 * site.outputs * site.inputs, calls=40)
        return
    yield blended(site) + refitted(site)
    if not own.by_folds or known:
        return
    left_out = 2 if count * (folds - 1) / max(folds, 1) >= PLENTY * site.kept else folds
    yield blended(site) * (folds + left_out)
    shares = len(own.drift_shares) if recipe.target == "drift" else 1
    yield held_out(site, len(own.grid), shares) * left_out
    if own.method == "auto" and own.candidates is None:
        yield turned(site) * (1 + left_out * (1 + (shares - 1) / 2))
