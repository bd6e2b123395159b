"""Effects of errors of sites on the model's own output, from gradients: the Fisher metric, and sites that are tried.

The metric takes gradients and errors as independent, which fails if a few tokens have most of both, as in the last
block of SmolLM2 (measure/README.md, section 5). So while a block's gradients pass, the sites of a consumer are also
tried, with every score of `SpaceKind.candidates` and every share of `POINTS`. Units are dropped, the others are
refitted by ridge on other samples than the gradients', and ½ E[Σ_t (g_t·δ_t)²] is added up token by token.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from statistics import median, stdev
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.common.phases import phase
from ckpt_prune.measure.samples.samples import SampleRange, Samples
from ckpt_prune.measure.statistics.distances import EndDistances
from ckpt_prune.measure.statistics.end_states import EndStates
from ckpt_prune.measure.statistics.fisher import LIMITS, Fisher, measure_fisher
from ckpt_prune.measure.statistics.folder import BlockCurves, Statistics, name_file, record_fisher, write_fisher
from ckpt_prune.measure.streams.hidden_stream import split_folds
from ckpt_prune.measure.streams.readout import DrawnGradients
from ckpt_prune.measure.streams.state_memory import Allocate, allocate_in_memory
from ckpt_prune.model.model import Model
from ckpt_prune.model.spaces import SpaceName
from ckpt_prune.parallel.group import process_group
from ckpt_prune.recipe.space_kinds import kind_of
from ckpt_prune.scoring.costs import DropOrder
from ckpt_prune.stages.spaces.effects.measured import is_shallow, label_draws
from ckpt_prune.stages.spaces.effects.predicted import Predicted, list_refits, measure_spaces
from ckpt_prune.stages.spaces.effects.refits import BlockRefits, Refits, refitted_spaces
from ckpt_prune.stages.spaces.effects.site_variants import POINTS, dropped_counts

DRAWN = 4
"""One of so many tokens is looked at where wide sites are tried, and `LEAST_TOKENS` at least."""
LEAST_TOKENS = 256
LEAST_CHANCE = 1e-2
"""The least chance of a token, as a share of the mean one, so that none is surely left out."""


def gradient_rows(model: Model, samples: int, folds: int) -> range:
    """Return the samples that gradients are taken of: the first of the last fold."""
    last = split_folds(samples, folds)[-1]
    return range(last.start, min(last.stop, last.start + LIMITS[model.family.modality]))


def add_gradients(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    spaces: Collection[SpaceName] | None = None,
    distances: bool = True,
    allocate: Allocate = allocate_in_memory,
    ends: EndStates | None = None,
) -> Statistics:
    """Measure the Fisher metric, and predict effects of dropping units, into statistics that have the Grams.

    `LIMITS` samples of the last fold are run. Refits are on the other folds, if there are any: predictions are then for
    tokens that no refit has seen. With several processes, all run these few samples, and share the refits. Labels
    are drawn `LABEL_DRAWS` times in shallow models, else once. Time: that of `measure_fisher`, and for every site one
    ranking and one factorisation by each score, and 2 d_in d_out flops a token, point and draw.

    Args:
        statistics: of the same model and samples; the result is the same with the metric in it.
        spaces: whose sites are tried; by default those that stand in no other (`Family.consumers`).
        distances: also measure how far runs of blocks move the stream, which decides what blocks go.
        ends: the states of these samples behind every block, if they are kept.
    """
    rows = gradient_rows(model, len(samples), statistics.index.folds)
    some = SampleRange(samples, rows.start, rows.stop)
    read_end = None if ends is None else partial(ends.read, rows=rows)
    files: dict[str, str] = {}
    refits = Refits(model, statistics, device, refitted_spaces(model, spaces))
    trials = _Trials(refits) if "gram" in statistics.index.collect else None
    how: dict[str, Any] = {"compute_dtype": compute_dtype, "allocate": allocate}
    rotary = "rotary" in statistics.index.collect
    group = process_group()

    # In shallow models every site's own effect is measured. Blocks with experts have too many for either.
    together_too = trials is not None and not is_shallow(model) and model.family.experts is None

    def write(block: int, metric: Mapping[str, Fisher], curves: BlockCurves) -> None:
        files[name_file("fisher", block)] = write_fisher(statistics.folder, block, metric, curves)

    apart = EndDistances(len(some)) if distances else None
    backward = measure_fisher(
        model,
        some,
        device=device,
        watcher=trials,
        ends=apart,
        rotary=rotary,
        known=read_end,
        draws=label_draws(model),
        **how,
    )
    for block, metric in backward:
        curves = {} if trials is None else trials.finish(metric, allocate if together_too else None)
        group.on_first(partial(write, block, metric, curves))
    predicted: Predicted = {} if trials is None else trials.predictions
    together: dict[SpaceName, list[tuple[int, float]]] = {}
    scores: dict[SpaceName, str] = {}
    if predicted and together_too:
        end = None if read_end is None else read_end(model.blocks - 1)
        with phase("effects"):
            together, scores = measure_spaces(refits, some, predicted, end=end, **how)
    spread = 0.0 if trials is None else trials.spread
    figures = (predicted, together, scores, None if apart is None else apart.distances, spread)
    return group.once(lambda: record_fisher(statistics, len(some), dict(sorted(files.items())), *figures))


@dataclass
class _Trials:
    """Tries sites while their gradients pass; `predictions` are of the blocks that are done."""

    refits: Refits
    predictions: Predicted = field(default_factory=dict)
    _block: BlockRefits | None = None
    _sites: dict[SpaceName, "_Site"] = field(default_factory=dict)
    _mine: set[tuple[SpaceName, str]] = field(default_factory=set)
    _spreads: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """How far another set of draws moves what is predicted of a site: the median of relative standard errors."""
        return median(self._spreads) if self._spreads else 0.0

    def begin(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Refit every site of a block at every point."""
        self._block = self.refits.of(block, tensors)
        trials = [(space, score) for space in self.refits.of_block(block) for score in kind_of(space).candidates]
        self._mine = set(trials[process_group().rank :: process_group().size])
        self._sites = {space: self._site(self._block, space) for space in self.refits.of_block(block)}

    def _site(self, refits: BlockRefits, space: SpaceName) -> "_Site":
        counts = dropped_counts(self.refits.model.units(space, refits.block), POINTS)
        scores = kind_of(space).candidates
        mine = [score for score in scores if (space, score) in self._mine]
        orders = {score: refits.order(space, score) for score in mine}
        lost, first = {}, {score: score for score in mine}
        if not all(order.is_wide for order in orders.values()):
            first = {score: next(other for other in mine if _are_same(orders[other], orders[score])) for score in mine}
            apart = dict.fromkeys(first.values())
            lost = {score: [refits.lost(space, score, count).float() for count in counts] for score in apart}
            orders = {}
        mean = refits.mean(space, scores[0])
        copies = self.refits.model.copies(space)
        return _Site(counts, lost, None if mean is None else mean.float(), orders, copies, first)

    def see(self, space: SpaceName, inputs: Tensor, gradient: Tensor, drawn: DrawnGradients, samples: int) -> None:
        if space in self._sites:
            self._sites[space].see(inputs, gradient, drawn, samples)

    def end(self, samples: int) -> None:
        assert self._block is not None
        block = self._block.block
        group, name_of = process_group(), partial(self.refits.model.site_name, block)
        divergences = {space: site.divergences(samples) for space, site in self._sites.items()}
        # Of one score a site, so that no site counts twice where processes share out its scores.
        firsts = {space: kind_of(space).candidates[0] for space in self._sites}
        spreads = [site.spread(firsts[space]) for space, site in self._sites.items() if firsts[space] in site.seen]
        gathered = group.gather((divergences, self.refits.known(block), spreads)) or []
        for of_process, scores, of_draws in group.once(lambda: gathered):
            self.refits.learn(scores)
            self._spreads += of_draws
            for space, by_score in of_process.items():
                self.predictions.setdefault(name_of(space), {}).update(by_score)
        # In the order of one process, which breaks ties.
        for space in self._sites:
            by_score = self.predictions[name_of(space)]
            ordered = {score: by_score[score] for score in kind_of(space).candidates if score in by_score}
            self.predictions[name_of(space)] = ordered

    def finish(self, metric: Mapping[str, Fisher], allocate: Allocate | None) -> BlockCurves:
        """Return the curves of the wide sites of the block that has ended, which ranking would find once more.

        Args:
            metric: of the block, by `Model.moments_name`.
            allocate: for refits that `measure_spaces` will ask for; None if it will not.
        """
        refits, model, group = self._block, self.refits.model, process_group()
        if refits is None:
            return {}
        curves: BlockCurves = {}
        for space, site in self._sites.items():
            fisher = metric.get(model.moments_name(refits.block, space))
            if fisher is not None:
                curves |= {(space, score): refits.curve(space, score, fisher) for score in site.orders}
            if allocate is not None and group.size == 1:
                for score, count in list_refits(model, refits.block, space, self.predictions):
                    refits.keep(space, score, count, allocate)
        self._block = None
        self._sites.clear()
        return {key: pair for of_process in group.gather(curves) or [] for key, pair in of_process.items()}


def draw_tokens(inputs: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one of `DRAWN` tokens to try a wide site on, those that may matter most with the greatest chance.

    The chance is in proportion to ‖g‖ ‖x‖ and at most one. A token that is drawn stands for as many as the inverse of
    its chance, so that sums over tokens keep their expectation (Horvitz and Thompson 1952).

    Returns:
        Indices of the tokens, int64, and their weights, float64.
    """
    size = gradient.norm(dim=1).double() * inputs.norm(dim=1).double()
    size += LEAST_CHANCE * size.mean().clamp_min(torch.finfo(torch.float64).tiny)
    count = min(len(size), max(LEAST_TOKENS, len(size) // DRAWN))
    chance = size * count / size.sum()
    while bool((chance > 1).any()):
        sure = chance >= 1
        unsure = size.masked_fill(sure, 0)
        chance = torch.where(sure, 1.0, unsure * (count - int(sure.sum())) / unsure.sum().clamp_min(1e-300))
    draws = torch.rand(len(size), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = (draws.to(chance.device) < chance).nonzero().squeeze(1)
    return tokens, 1 / chance[tokens]


def _are_same(one: DropOrder, other: DropOrder) -> bool:
    """Return True if two orders of a site, which drop the same units one after the other, have the same refits."""
    return one is other or (one.basis is None and other.basis is None and torch.equal(one.columns, other.columns))


@dataclass
class _Site:
    """One site's refits, and what they lose.

    Attributes:
        counts: units dropped.
        lost: score → for each count W − Ŵ, (d_out, d_in) float32, at a site that is not wide; once for equal orders.
        mean: of the inputs, if a bias makes up for it.
        orders: score → the order of the units, at a wide site: no refit is made there.
        copies: of a unit.
        first: score → the first one that has the same refits.
    """

    counts: list[int]
    lost: Mapping[str, list[Tensor]]
    mean: Tensor | None
    orders: Mapping[str, DropOrder]
    copies: int
    first: Mapping[str, str]
    _sums: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def see(self, inputs: Tensor, gradient: Tensor, drawn: DrawnGradients, samples: int) -> None:
        x = inputs.float() if self.mean is None else inputs.float() - self.mean
        # Over all tokens of a sample if it has one prediction, else token by token.
        shape = (samples, -1) if drawn.whole else (-1, 1)
        for score, losses in self.lost.items():
            sums = self._sums.setdefault((score, drawn.draw), [0.0] * len(losses))
            for index, lost in enumerate(losses):
                moved = (gradient @ lost).mul_(x).sum(1).double().view(shape).sum(1)
                sums[index] += drawn.weight * float(moved.square().sum())
        if not self.orders:
            return
        weights = None
        if not drawn.whole:
            tokens, weights = draw_tokens(x, gradient)
            x, gradient = x[tokens], gradient[tokens]
        for score, order in self.orders.items():
            sums = self._sums.setdefault((score, drawn.draw), [0.0] * len(self.counts))
            moved = order.project_on_gradient(x, gradient, [count * self.copies for count in self.counts])
            squares = moved.square() if weights is None else weights[:, None] * moved.square()
            if drawn.whole:
                squares = moved.view(samples, -1, len(self.counts)).sum(1).square()
            for index, square in enumerate(squares.sum(0).tolist()):
                sums[index] += drawn.weight * square

    def divergences(self, samples: int) -> dict[str, list[tuple[int, float]]]:
        """Return ½ E[(g·δ)²], the mean over samples."""
        sums = {score: map(sum, zip(*of_draws, strict=True)) for score, of_draws in self.seen.items()}
        means = {score: [value / 2 / samples for value in of_counts] for score, of_counts in sums.items()}
        return {
            score: list(zip(self.counts, means[first], strict=True))
            for score, first in self.first.items()
            if first in means
        }

    @property
    def seen(self) -> dict[str, list[list[float]]]:
        """Score → for each draw the sums of all counts."""
        by_score: dict[str, list[list[float]]] = {}
        for (score, _), of_counts in self._sums.items():
            by_score.setdefault(score, []).append(of_counts)
        return by_score

    def spread(self, score: str) -> float:
        """Return the standard error of the mean of all draws over it, at the middle count; 0 of a single draw."""
        values = [of_counts[len(of_counts) // 2] for of_counts in self.seen[score]]
        mean = sum(values) / len(values)
        return stdev(values) / sqrt(len(values)) / mean if len(values) > 1 and mean else 0.0
