"""What gradients tell of every site: the Fisher metric, and what dropping units by each of several scores would do.

The metric takes gradients and errors as independent, which fails where a few tokens have most of both, as in the last
block of SmolLM2 (calibration/README.md, section 5). So while a block's gradients pass, the sites of a consumer are
also tried out: for every score of `CANDIDATES` and every share of `POINTS`, units are dropped, the others refitted by
ridge on the samples that the gradients are not of, and ½ E[Σ_t (g_t·δ_t)²] is added up token by token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ckpt_prune.architectures.model import Model
from ckpt_prune.architectures.spaces import SpaceName
from ckpt_prune.calibration.fisher import LIMITS, measure_fisher
from ckpt_prune.calibration.moments import Moments, total
from ckpt_prune.calibration.readout import Drawn
from ckpt_prune.calibration.samples import Part, Samples
from ckpt_prune.calibration.sources import CachedMoments
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.statistics import Statistics, fisher_file, with_fisher, write_fisher
from ckpt_prune.calibration.streams import fold_slices
from ckpt_prune.planning.kinds import CANDIDATES
from ckpt_prune.transform.site_variants import POINTS, dropped_counts, trial_recipe
from ckpt_prune.transform.solvers import solver_of
from ckpt_prune.transform.solvers.columns import ColumnSolver

Predicted = dict[str, dict[str, list[tuple[int, float]]]]
"""Site by `Model.moments_name` → score → (units dropped, divergence), ascending."""


def add_gradients(
    model: Model,
    statistics: Statistics,
    samples: Samples,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
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
        allocate: makes the tensors that hold hidden states.

    Returns:
        The folder, with the metric in it.

    Raises:
        UserError: a gradient is not finite, or the disk is full.
    """
    last = fold_slices(len(samples), statistics.index.folds)[-1]
    some = Part(samples, last.start, min(last.stop, last.start + LIMITS[model.family.modality]))
    files: dict[str, str] = {}
    trials = _Trials(model, statistics, device) if "gram" in statistics.index.collect else None
    measured = measure_fisher(
        model, some, device=device, compute_dtype=compute_dtype, allocate=allocate, watcher=trials
    )
    for block, found in measured:
        files[fisher_file(block)] = write_fisher(statistics.folder, block, found)
    return with_fisher(statistics, len(some), dict(sorted(files.items())), {} if trials is None else trials.found)


@dataclass
class _Trials:
    """Tries sites out while their gradients pass.

    Attributes:
        found: of the blocks that are through.
    """

    model: Model
    statistics: Statistics
    device: torch.device
    found: Predicted = field(default_factory=dict)
    _block: int = 0
    _sites: dict[SpaceName, "_Site"] = field(default_factory=dict)

    def begin(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Refit every site of a block at every point."""
        self._block = block
        names = [name for name in self.model.family.columns if self.model.units(name) > 1]
        read = CachedMoments(self.statistics, self.model).moments(block, {}, names)
        for space in names:
            folds = [each.to(self.device) for each in read[space] if isinstance(each, Moments)]
            self._sites[space] = self._site(block, space, tensors, total(folds[:-1] or folds))

    def _site(self, block: int, space: SpaceName, tensors: Mapping[str, Tensor], moments: Moments) -> "_Site":
        counts = dropped_counts(self.model.units(space), POINTS)
        lost: dict[str, list[Tensor]] = {}
        centred = False
        for score in CANDIDATES:
            solver = solver_of(self.model, trial_recipe(self.model, block, space, tensors, score), space, self.device)
            assert isinstance(solver, ColumnSolver)
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
            self.found[self.model.moments_name(self._block, space)] = site.divergences(samples)
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
