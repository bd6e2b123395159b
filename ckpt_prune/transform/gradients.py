"""What errors of sites do to the model's own output: the Fisher metric, sites tried out, and spaces as wholes.

The metric takes gradients and errors as independent, which fails where a few tokens have most of both, as in the last
block of SmolLM2 (calibration/README.md, section 5). So while a block's gradients pass, the sites of a consumer are
also tried out: for every score of `CANDIDATES` and every share of `POINTS`, units are dropped, the others refitted by
ridge on the samples that the gradients are not of, and ½ E[Σ_t (g_t·δ_t)²] is added up token by token.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.architectures.family import KINDS
from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.fisher import LIMITS, measure_fisher
from ckpt_prune.calibration.moments import Moments, total
from ckpt_prune.calibration.readout import Drawn, Readout
from ckpt_prune.calibration.samples import Part, Samples
from ckpt_prune.calibration.sources import CachedMoments
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import Statistics, fisher_file, with_fisher, write_fisher
from ckpt_prune.calibration.streams import HiddenStream, fold_slices
from ckpt_prune.planning.kinds import CANDIDATES
from ckpt_prune.progress import track
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.transform.measured_effects import SHALLOW, divergences
from ckpt_prune.transform.site_variants import POINTS, check_finite, dropped_counts, run_through, trial_recipe
from ckpt_prune.transform.solvers import solver_of
from ckpt_prune.transform.solvers.columns import ColumnSolver

SPACE_POINTS = (0.25, 0.5)
"""Shares of units that are dropped from every block at once: more would leave nothing to be told from anything."""
MANY = 32
"""Units from which on the scores of a space are tried as wholes: of a few heads they hardly differ."""
ALIKE = 1.05
"""Divergences of a few samples that are no more than this apart tell nothing."""

Predicted = dict[str, dict[str, list[tuple[int, float]]]]
"""Site by `Model.site_name` → score → (units dropped, divergence), ascending."""


def add_gradients(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    spaces: Collection[SpaceName] | None = None,
    allocate: Allocate = in_memory,
) -> Statistics:
    """Measure the Fisher metric, and predict what dropping units would do, into a folder that has the Grams.

    `LIMITS` samples of the last fold are run, and refits are on the other folds where there are any: what is predicted
    is then of tokens that no refit has seen. Time: 4 runs of every block (`measure_fisher`), and for every site
    one ranking by each score, one factorisation for it, and 2 d_in d_out flops a token and point.

    Args:
        model: the dense model.
        statistics: of the same model and samples.
        samples: those that the moments were measured on.
        device: where blocks run and are refitted.
        compute_dtype: in which they run.
        spaces: whose sites are tried out; by default those that stand in no other (`Family.consumers`).
        allocate: makes the tensors that hold hidden states.

    Returns:
        The folder, with the metric in it.

    Raises:
        UserError: a gradient is not finite, or the disk is full.
    """
    last = fold_slices(len(samples), statistics.index.folds)[-1]
    some = Part(samples, last.start, min(last.stop, last.start + LIMITS[model.family.modality]))
    files: dict[str, str] = {}
    names = _tried(model, spaces)
    trials = _Trials(model, statistics, device, names) if "gram" in statistics.index.collect else None
    measured = measure_fisher(
        model, some, device=device, compute_dtype=compute_dtype, allocate=allocate, watcher=trials
    )
    for block, found in measured:
        files[fisher_file(block)] = write_fisher(statistics.folder, block, found)
    predicted: Predicted = {} if trials is None else trials.found
    together: dict[SpaceName, list[tuple[int, float]]] = {}
    scores: dict[SpaceName, str] = {}
    if predicted and model.blocks > SHALLOW:  # in others every site's own effect is measured
        how: dict[str, Any] = {"device": device, "compute_dtype": compute_dtype, "allocate": allocate}
        together, scores = measure_spaces(model, statistics, some, predicted, spaces=names, **how)
    return with_fisher(statistics, len(some), dict(sorted(files.items())), predicted, together, scores)


def _tried(model: Model, spaces: Collection[SpaceName] | None) -> list[SpaceName]:
    wanted = model.family.consumers if spaces is None else spaces
    return [name for name in model.family.columns if name in wanted and model.units(name) > 1]


def measure_spaces(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    predicted: Predicted,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    spaces: Collection[SpaceName] | None = None,
    allocate: Allocate = in_memory,
) -> tuple[dict[SpaceName, list[tuple[int, float]]], dict[SpaceName, str]]:
    """Drop as many units of a space from every block at once, and see how far that takes the model's own output.

    Predictions are of one site at a time and of second order. What they leave out, errors of blocks that add up or
    cancel and what is not quadratic, differs from space to space: this is what scales them. Units go by the score that
    is predicted to be best at each site, what stays is refitted as where effects are predicted. In spaces of many units
    each single score is tried at the first point, too.

    Time: one run of every block for each space and point, one for each single score, and one for the dense model.
    Memory: the hidden states of the samples as often.

    Args:
        model: the dense model.
        statistics: of the same model, with Grams; refits are to all folds but the last.
        samples: of the last fold.
        predicted: of every site.
        device: where blocks run and are refitted.
        compute_dtype: in which they run.
        spaces: those that sites were tried out of; as in `add_gradients`.
        allocate: makes the tensors that hold hidden states.

    Returns:
        Space → (units dropped of every block, the mean over samples of `Readout.divergence`), ascending; and for spaces
        where a single score is to be preferred to the best of each site (`_robust`), that score.

    Raises:
        UserError: the output is not finite.
    """
    checkpoint = model.checkpoint
    names = _tried(model, spaces)
    variants = [
        (space, count, single)
        for space in names
        for index, count in enumerate(dropped_counts(model.units(space), SPACE_POINTS))
        for single in (None, *(CANDIDATES if index == 0 and model.units(space) >= MANY else ()))
    ]
    factory = BlockFactory(model, device=device, dtype=compute_dtype)
    stream = HiddenStream(factory, checkpoint.tensors, checkpoint.read, samples, allocate=allocate)
    shape, dtype = tuple(stream.states.shape), stream.states.dtype
    states = [allocate(shape, dtype).copy_(stream.states) for _ in variants]
    for block in track(range(model.blocks), "effects of spaces", total=model.blocks):
        tensors = model.read_block(block)
        fitted = _moments(model, statistics, block, names, device)
        orders: dict[tuple[SpaceName, str], DropOrder] = {}
        for (space, count, single), own in zip(variants, states, strict=True):
            score = single or _best(predicted[model.site_name(block, space)], count)
            solver = _solver(model, block, space, tensors, score, device)
            if (space, score) not in orders:
                scores = solver.scores(block, tensors, (fitted[space],))
                orders[space, score] = solver.drop_order(block, tensors, fitted[space], scores)
            lost = orders[space, score].lost(count * model.copies(space)).cpu()
            consumer = solver.description.consumer
            name, bias = (model.tensor(block, consumer, kind) for kind in KINDS)
            new = {**tensors, name: (tensors[name].double() - lost).to(tensors[name].dtype)}
            if solver.centred(block, tensors):
                new[bias] = (tensors[bias].double() + lost @ fitted[space].mean.cpu()).to(tensors[bias].dtype)
            run_through(stream, factory.block(block, new), block, own, own)
        run_through(stream, factory.block(block, tensors), block, stream.states, stream.states)
    readout = Readout(factory, checkpoint.tensors, checkpoint.read)
    found: dict[SpaceName, dict[int, float]] = {}
    singles: dict[SpaceName, dict[str, float]] = {}
    values = divergences(readout, samples, stream.states, states)
    for (space, count, single), value in zip(variants, values, strict=True):
        check_finite(value, count, f"the {space} of every block", compute_dtype)
        if single is None:
            found.setdefault(space, {})[count] = value
        else:
            singles.setdefault(space, {})[single] = value
    chosen: dict[SpaceName, str] = {}
    for space, by_score in singles.items():
        first, mixed = next(iter(found[space].items()))
        best = _robust(by_score, mixed)
        if best is not None:
            found[space][first], chosen[space] = by_score[best], best
    return {space: list(own.items()) for space, own in found.items()}, chosen


def _robust(by_score: Mapping[str, float], mixed: float) -> str | None:
    """The score to rank a whole space by, or None for the best of each site.

    Other text is further off than a fold of the same one. So of what does about as well as the best, that is taken
    which learns least of the calibration text: norms of single inputs before a choice among scores at every site, and
    that before correlations of all inputs (Breiman et al. 1984 take the simplest of trees alike).

    Args:
        by_score: what each score does at all sites.
        mixed: what the best score of each site does.
    """
    limit = ALIKE * min(mixed, *by_score.values())
    simple = {score: value for score, value in by_score.items() if score != CANDIDATES[0] and value <= limit}
    if simple:
        return min(simple, key=lambda score: simple[score])
    return None if mixed <= limit else CANDIDATES[0]


def _best(by_score: Mapping[str, list[tuple[int, float]]], count: int) -> str:
    """The score that is predicted to do least at a number of units dropped."""
    return min(by_score, key=lambda score: dict(by_score[score])[count])


def _moments(
    model: Model, statistics: Statistics, block: int, names: list[SpaceName], device: torch.device
) -> dict[SpaceName, Moments]:
    """What sites are refitted to: all folds but the last, or the only one."""
    read = CachedMoments(statistics, model).moments(block, {}, names)
    folds = {space: [each for each in read[space] if isinstance(each, Moments)] for space in names}
    return {space: total(own[:-1] or own).to(device) for space, own in folds.items()}


def _solver(
    model: Model, block: int, space: SpaceName, tensors: Mapping[str, Tensor], score: str, device: torch.device
) -> ColumnSolver:
    solver = solver_of(model, trial_recipe(model, block, space, tensors, score), space, device)
    assert isinstance(solver, ColumnSolver)
    return solver


@dataclass
class _Trials:
    """Tries sites out while their gradients pass.

    Attributes:
        found: of the blocks that are through.
    """

    model: Model
    statistics: Statistics
    device: torch.device
    names: list[SpaceName]
    found: Predicted = field(default_factory=dict)
    _block: int = 0
    _sites: dict[SpaceName, "_Site"] = field(default_factory=dict)

    def begin(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Refit every site of a block at every point."""
        self._block = block
        for space, moments in _moments(self.model, self.statistics, block, self.names, self.device).items():
            self._sites[space] = self._site(block, space, tensors, moments)

    def _site(self, block: int, space: SpaceName, tensors: Mapping[str, Tensor], moments: Moments) -> "_Site":
        counts = dropped_counts(self.model.units(space), POINTS)
        lost: dict[str, list[Tensor]] = {}
        centred = False
        for score in CANDIDATES:
            solver = _solver(self.model, block, space, tensors, score, self.device)
            centred = solver.centred(block, tensors)
            order = solver.drop_order(block, tensors, moments, solver.scores(block, tensors, (moments,)))
            copies = self.model.copies(space)
            lost[score] = [order.lost(count * copies).float() for count in counts]
        return _Site(counts, lost, moments.mean.float() if centred else None)

    def see(self, space: SpaceName, inputs: Tensor, gradient: Tensor, drawn: Drawn, samples: int) -> None:
        """Add up (g·δ)²."""
        if space in self._sites:
            self._sites[space].see(inputs, gradient, drawn, samples)

    def end(self, samples: int) -> None:
        """Enter what was found."""
        for space, site in self._sites.items():
            self.found[self.model.site_name(self._block, space)] = site.divergences(samples)
        self._sites.clear()


@dataclass
class _Site:
    """One site's refits, and what they lose.

    Attributes:
        counts: units dropped.
        lost: score → for each count W − Ŵ, (d_out, d_in) float32.
        mean: of the inputs, where a bias makes up for it.
    """

    counts: list[int]
    lost: Mapping[str, list[Tensor]]
    mean: Tensor | None
    _sums: dict[str, list[float]] = field(default_factory=dict)

    def see(self, inputs: Tensor, gradient: Tensor, drawn: Drawn, samples: int) -> None:
        """As `Watcher.see`."""
        x = inputs.float() if self.mean is None else inputs.float() - self.mean
        # Over all tokens of a sample where it has one prediction, else token by token.
        shape = (samples, -1) if drawn.whole else (-1, 1)
        for score, each in self.lost.items():
            sums = self._sums.setdefault(score, [0.0] * len(each))
            for index, lost in enumerate(each):
                moved = (gradient @ lost).mul_(x).sum(1).double().view(shape).sum(1)
                sums[index] += drawn.weight * float(moved.square().sum())

    def divergences(self, samples: int) -> dict[str, list[tuple[int, float]]]:
        """½ E[(g·δ)²], the mean over samples."""
        return {
            score: [(count, value / 2 / samples) for count, value in zip(self.counts, sums, strict=True)]
            for score, sums in self._sums.items()
        }
